/* RoCEv2: packets of reliable connections put together to messages.

pieces.py says what comes out; roce.py how it is used. Everything that is read may be hostile: reads
are checked against the end of the data, lengths are compared before they are believed, and memory
is bounded: payload lies in one arena of a given size, and what is open or remembered is counted.

A stream is one (source, destination, queue pair), requests and READ responses apart. Its messages
are kept open until they are complete, given up, or too many; a packet finds its message by its
sequence number, never by the order of arrival.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_arena.h"
#include "_crc.h"
#include "_forms.h"
#include "_rows.h"

/* ------------------------------------------------------------------ rows of pieces.py */

typedef struct { u32 number, source, destination, qp; u16 source_port; u8 is_response, unused; }
    stream_row;

typedef struct {
    u64 va, length, flag, frame, last_frame, immediate_frame;
    int64_t time_ns;
    u64 at, nbytes;
    u32 range_at, ranges, stream, psn, packets, span, mtu, rkey, immediate;
    u8 operation, form, has_immediate, complete, has_head, is_split, flag_errors, given_up,
        is_chain, unused[3];
} message_row;

typedef struct {
    u64 frame;
    int64_t time_ns;
    u32 source, destination, qp, psn, count;
    u16 source_port;
    u8 syndrome, unused;
} ack_row;

typedef struct { int64_t start, stop; } range_row;

_Static_assert(sizeof(stream_row) == 20 && sizeof(message_row) == 120 && sizeof(ack_row) == 40
                   && sizeof(packet_row) == 48 && sizeof(frame_row) == 24,
               "rows have no holes");

/* ------------------------------------------------------------------ what is kept */

#define PSN_MASK 0xffffffu
#define LEAST_MTU 256
#define MOST_MTU 4096
#define LEAST_CHAIN_MTU 1024  /* of a chain on a stream whose MTU is unknown: no CTS is as long */
#define LONGEST_ALONE 512     /* a longer write without immediate waits for one */
#define MOST_STREAMS 4096
#define BUCKETS 8192
#define MOST_OPEN 8192
#define OPEN_PER_STREAM 16
#define PATIENCE 1024         /* packets of a stream after which what is missing will not come */
#define REMEMBERED 32         /* messages per stream */
#define KEYS 8                /* R_Keys per stream with a form */
#define REACH 256             /* how far before the first packet seen a late one may lie */
#define FEW_PACKETS 512       /* of a message whose bits fit into its record */
#define FIRST_ROOM 65536      /* bytes for a message of unknown length; more when it grows */
#define AHEAD 2               /* packets to fetch into the cache before they are looked at */
#define LONGEST_HEADER 512    /* from IP on, for which the ICRC is computed */

enum { OP_SEND, OP_WRITE, OP_READ_RESPONSE, OP_READ_REQUEST };

enum {
    NOT_ROCE, OTHER_TRANSPORT, BAD_ICRC, UNCHECKED, MALFORMED, ATOMIC, DUPLICATE, CUT, NO_ROOM,
    CONFLICT, BAD_FLAGS, RESTARTED, GIVEN_UP, FORGOTTEN, REQUESTS, RESPONSES, ACKS, COUNTS
};

typedef struct message message;

struct message {
    message *older, *newer;   /* all that are open, by age */
    u32 stream;               /* index */
    u32 psn, span;            /* span 0: unknown. Without the closing immediate. */
    u32 extent;               /* packets from psn on, up to the last one seen */
    u32 done;                 /* packets from psn on without a gap */
    u32 packets, mtu, rkey, immediate;
    u64 va, length, flag, frame, last_frame, immediate_frame, capacity, seen_at;
    int64_t time_ns;
    u32 block, bits_block;
    u8 operation, form, has_head, has_end, is_chain, has_immediate, is_split, has_flag, flag_errors,
        has_bits;
    u64 few_bits[FEW_PACKETS / 64];
};

typedef struct { u32 psn, span; u64 va; u32 rkey; u8 operation, has_head, is_chain, is_split; } past;

typedef struct {
    stream_row row;
    u32 next_in_bucket; /* index plus 1 */
    u32 next, floor;    /* sequence number expected; the first one seen */
    u32 mtu;
    u8 is_seeded, is_recent, open_count, key_count, key_turn;
    u32 past_count;     /* ever */
    u64 packets;
    u32 keys[KEYS];
    u8 forms[KEYS];
    message *open[OPEN_PER_STREAM];
    past history[REMEMBERED];
} stream;

typedef struct { u8 *bytes; size_t used, room; } vector;

typedef struct {
    arena arena;
    u8 *memory;
    int most_order;        /* of one message */
    u64 most_bytes;
    int check_icrc;
    u64 seed;
    u32 number;            /* of the next stream */
    u32 stream_count, hand;
    u32 buckets[BUCKETS];  /* index plus 1 */
    message *oldest, *newest, *spare;
    u32 open_count;
    int out_of_memory;
    u64 counts[COUNTS];
    vector messages, ranges, acks, opened, closed, used_blocks;
    stream streams[MOST_STREAMS];
} tracker;

/* One packet, its headers read. */
typedef struct {
    const packet_row *row;
    u64 frame;
    int64_t time_ns;
    u32 qp, psn, rkey, length, immediate;
    u64 va;
    const u8 *payload;
    u32 payload_bytes;
    u8 opcode, is_cut;
} packet;

static inline u32 big24(const u8 *p) { return (u32)p[0] << 16 | (u32)p[1] << 8 | p[2]; }

/* How far `psn` lies after `from`, as a signed number of 24 bits. */
static inline int32_t distance(u32 psn, u32 from)
{
    return (int32_t)((psn - from) << 8) >> 8;
}
static inline u32 psn_add(u32 psn, u32 count) { return (psn + count) & PSN_MASK; }

/* Appending never fails without being noticed: `out_of_memory` ends the call. */
static void *append(tracker *t, vector *v, size_t nbytes)
{
    if (v->room - v->used < nbytes) {
        size_t room = v->room ? 2 * v->room : 4096;
        while (room - v->used < nbytes)
            room *= 2;
        u8 *bytes = realloc(v->bytes, room);
        if (!bytes) {
            t->out_of_memory = 1;
            return NULL;
        }
        v->bytes = bytes;
        v->room = room;
    }
    v->used += nbytes;
    return v->bytes + v->used - nbytes;
}

/* ------------------------------------------------------------------ messages */

static u8 *block_bytes(tracker *t, u32 block) { return t->memory + (u64)block * UNIT_BYTES; }

static u64 *bits_of(tracker *t, message *m)
{
    return m->bits_block == NONE ? m->few_bits : (u64 *)block_bytes(t, m->bits_block);
}

static int is_present(tracker *t, message *m, u32 i)
{
    return i < m->done || (m->has_bits && bits_of(t, m)[i / 64] >> (i % 64) & 1);
}

/* How many packets the bits can stand for. */
static u32 bits_room(const message *m)
{
    u64 packets = (m->capacity + m->mtu - 1) / (m->mtu ? m->mtu : 1);
    return packets < FEW_PACKETS ? FEW_PACKETS : (u32)packets;
}

/* 0: there is no room for the bits. */
static int need_bits(tracker *t, message *m)
{
    if (m->has_bits)
        return 1;
    u32 room = bits_room(m);
    if (room > FEW_PACKETS) {
        m->bits_block = arena_take(&t->arena, arena_order(((u64)room + 63) / 64 * 8));
        if (m->bits_block == NONE)
            return 0;
    }
    memset(bits_of(t, m), 0, ((size_t)room + 63) / 64 * 8);
    m->has_bits = 1;
    return 1;
}

static void set_present(tracker *t, message *m, u32 i)
{
    if (i == m->done) {
        m->done++;
        while (m->has_bits && m->done < m->extent && bits_of(t, m)[m->done / 64] >> (m->done % 64) & 1)
            m->done++;
    } else {
        bits_of(t, m)[i / 64] |= (u64)1 << (i % 64);
    }
}

static message *new_message(tracker *t, u32 stream_index)
{
    message *m = t->spare;
    if (m)
        t->spare = m->newer;
    else
        m = malloc(sizeof *m);
    if (!m) {
        t->out_of_memory = 1;
        return NULL;
    }
    memset(m, 0, offsetof(message, few_bits));
    m->stream = stream_index;
    m->block = m->bits_block = NONE;
    m->older = t->newest;
    if (t->newest)
        t->newest->newer = m;
    else
        t->oldest = m;
    t->newest = m;
    t->open_count++;
    stream *s = t->streams + stream_index;
    s->open[s->open_count++] = m;
    return m;
}

/* Give a block back when the caller of feed has seen what is in it. */
static void release_later(tracker *t, u32 block)
{
    u32 *place = block == NONE ? NULL : append(t, &t->used_blocks, sizeof block);
    if (place)
        *place = block;
}

static void drop_message(tracker *t, message *m)
{
    stream *s = t->streams + m->stream;
    for (int i = 0; i < s->open_count; i++)
        if (s->open[i] == m) {
            memmove(s->open + i, s->open + i + 1, (s->open_count - i - 1) * sizeof *s->open);
            s->open_count--;
            break;
        }
    if (m->older)
        m->older->newer = m->newer;
    else
        t->oldest = m->newer;
    if (m->newer)
        m->newer->older = m->older;
    else
        t->newest = m->older;
    t->open_count--;
    release_later(t, m->block);
    release_later(t, m->bits_block);
    m->newer = t->spare;
    t->spare = m;
}

static u32 count_ranges(tracker *t, message *m, u64 length)
{
    u32 count = 0, i = 0;
    while (i < m->extent) {
        if (!is_present(t, m, i)) {
            i++;
            continue;
        }
        u32 start = i;
        i = i < m->done ? m->done : i + 1;
        while (i < m->extent && is_present(t, m, i))
            i++;
        u64 stop = (u64)i * m->mtu;
        range_row *range = append(t, &t->ranges, sizeof *range);
        if (!range)
            return count;
        *range = (range_row){(int64_t)start * m->mtu, (int64_t)(stop < length ? stop : length)};
        count++;
    }
    return count;
}

static void remember(stream *s, const message *m, u32 span)
{
    s->history[s->past_count++ % REMEMBERED] =
        (past){m->psn, span, m->va, m->rkey, m->operation, m->has_head, m->is_chain, m->is_split};
}

static int is_complete(const message *m)
{
    if (m->span)
        return m->done == m->span;
    if (m->is_chain) /* as long as nothing told its length */
        return m->extent == 1;
    return m->has_head && m->has_end && m->done == m->extent;
}

/* Hand the message out, and close it. */
static void emit(tracker *t, message *m, int given_up)
{
    stream *s = t->streams + m->stream;
    u32 span = m->span, range_at = (u32)(t->ranges.used / sizeof(range_row));
    u32 ranges = m->length && m->mtu ? count_ranges(t, m, m->length) : 0;
    int complete = is_complete(m);
    if (!span && m->has_head && (m->has_end || m->is_chain))
        span = m->extent;
    message_row *row = append(t, &t->messages, sizeof *row);
    if (row)
        *row = (message_row){
            .va = m->va, .length = m->length, .flag = m->flag, .frame = m->frame,
            .last_frame = m->last_frame, .immediate_frame = m->immediate_frame,
            .time_ns = m->time_ns,
            .at = m->block == NONE ? 0 : (u64)m->block * UNIT_BYTES,
            .nbytes = m->block == NONE ? 0 : placed_bytes(m->form, m->length),
            .range_at = range_at, .ranges = ranges, .stream = s->row.number, .psn = m->psn,
            .packets = m->packets + m->is_split, .span = span ? span + m->is_split : 0,
            .mtu = m->span == 1 ? s->mtu : m->mtu, .rkey = m->rkey, .immediate = m->immediate, .operation = m->operation,
            .form = m->form, .has_immediate = m->has_immediate, .complete = (u8)complete,
            .has_head = m->has_head, .is_split = m->is_split, .flag_errors = m->flag_errors,
            .given_up = (u8)(given_up && !complete),
            .is_chain = m->is_chain && m->extent > 1};
    t->counts[GIVEN_UP] += given_up && !complete;
    remember(s, m, (m->span ? m->span : m->extent) + m->is_split);
    drop_message(t, m);
}

/* Room for `capacity` bytes of the wire, `front` packets of them before the `length` bytes that are
there; not in form LL128, whose slices would not fit. 0: none. */
static int resize(tracker *t, message *m, u64 capacity, u32 front)
{
    u32 had_bits = m->has_bits;
    if (capacity > t->most_bytes)
        return 0;
    u32 block = arena_take(&t->arena, arena_order(placed_bytes(m->form, capacity)));
    if (block == NONE)
        return 0;
    message old = *m;
    m->block = block;
    m->capacity = capacity;
    m->has_bits = 0;
    m->bits_block = NONE;
    if ((front || had_bits) && !need_bits(t, m)) {
        arena_give(&t->arena, block);
        *m = old;
        return 0;
    }
    m->extent = front + old.extent;
    m->done = 0;
    /* old.few_bits stands in for the bits of the old record: it was copied whole */
    for (u32 i = 0; i < old.extent; i++)
        if (is_present(t, &old, i)) {
            if (front || had_bits)
                bits_of(t, m)[(i + front) / 64] |= (u64)1 << ((i + front) % 64);
            else
                m->done++;
        }
    while (m->has_bits && m->done < m->extent && bits_of(t, m)[m->done / 64] >> (m->done % 64) & 1)
        m->done++;
    if (old.block != NONE)
        memcpy(block_bytes(t, block) + placed_bytes(m->form, (u64)front * m->mtu),
               block_bytes(t, old.block), placed_bytes(m->form, old.length));
    if (old.block != NONE)
        arena_give(&t->arena, old.block);
    if (old.bits_block != NONE)
        arena_give(&t->arena, old.bits_block);
    return 1;
}

/* Put payload to its place, as packet `i` of the message. 0: it was not taken. */
static int take_payload(tracker *t, message *m, u32 i, const packet *p)
{
    m->seen_at = t->streams[m->stream].packets;
    if (is_present(t, m, i)) {
        t->counts[DUPLICATE]++;
        return 0;
    }
    if (p->is_cut && p->payload_bytes) {
        t->counts[CUT]++;
        return 0;
    }
    if (i != m->done && !need_bits(t, m)) {
        t->counts[NO_ROOM]++;
        return 0;
    }
    if (p->payload_bytes) {
        u64 flag =
            m->has_flag ? m->flag : first_flag(m->form, p->payload, p->payload_bytes);
        if (!place(m->form, block_bytes(t, m->block), (u64)i * m->mtu, p->payload, p->payload_bytes,
                   flag)) {
            t->counts[BAD_FLAGS]++;
            m->flag_errors += m->flag_errors < 255;
            return 0;
        }
        m->flag = flag;
        m->has_flag = m->form != RAW;
    }
    if (i >= m->extent)
        m->extent = i + 1;
    set_present(t, m, i);
    m->packets++;
    return 1;
}

static void note_frame(message *m, u64 frame, int64_t time_ns)
{
    if (!m->frame || frame < m->frame)
        m->frame = frame;
    if (frame >= m->last_frame) {
        m->last_frame = frame;
        m->time_ns = time_ns;
    }
}

/* ------------------------------------------------------------------ streams */

static u32 bucket_of(const tracker *t, u32 source, u32 destination, u32 qp, int is_response)
{
    u64 h = (((u64)source << 32 | destination) ^ t->seed) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 31 ^ ((u64)qp << 1 | (u64)is_response)) * 0xbf58476d1ce4e5b9u;
    return (u32)(h >> 40) % BUCKETS;
}

static u32 *link_to(tracker *t, u32 index)
{
    const stream_row *row = &t->streams[index].row;
    u32 *link =
        t->buckets + bucket_of(t, row->source, row->destination, row->qp, row->is_response);
    while (*link != index + 1)
        link = &t->streams[*link - 1].next_in_bucket;
    return link;
}

static void give_up_all(tracker *t, stream *s)
{
    while (s->open_count)
        emit(t, s->open[0], 1);
}

static void say_closed(tracker *t, const stream *s)
{
    u32 *number = append(t, &t->closed, sizeof *number);
    if (number)
        *number = s->row.number;
}

static void say_opened(tracker *t, stream *s)
{
    s->row.number = t->number++;
    stream_row *row = append(t, &t->opened, sizeof *row);
    if (row)
        *row = s->row;
}

/* A place for a new stream: a free one, or that of one that was not used for long. */
static u32 free_stream(tracker *t)
{
    if (t->stream_count < MOST_STREAMS)
        return t->stream_count++;
    for (;; t->hand = (t->hand + 1) % MOST_STREAMS) {
        stream *s = t->streams + t->hand;
        if (s->is_recent) {
            s->is_recent = 0;
            continue;
        }
        give_up_all(t, s);
        say_closed(t, s);
        t->counts[FORGOTTEN]++;
        *link_to(t, t->hand) = s->next_in_bucket;
        u32 index = t->hand;
        t->hand = (t->hand + 1) % MOST_STREAMS;
        return index;
    }
}

static u32 find_stream(tracker *t, const packet *p, int is_response)
{
    u32 source = p->row->source, destination = p->row->destination;
    u32 bucket = bucket_of(t, source, destination, p->qp, is_response);
    for (u32 link = t->buckets[bucket]; link; link = t->streams[link - 1].next_in_bucket) {
        const stream_row *row = &t->streams[link - 1].row;
        if (row->qp == p->qp && row->source == source && row->destination == destination
            && row->is_response == is_response)
            return link - 1;
    }
    u32 index = free_stream(t);
    stream *s = t->streams + index;
    memset(s, 0, sizeof *s);
    s->row = (stream_row){0, source, destination, p->qp, p->row->source_port, (u8)is_response, 0};
    s->next_in_bucket = t->buckets[bucket];
    t->buckets[bucket] = index + 1;
    say_opened(t, s);
    return index;
}

/* The other side began anew with the same queue pair: nothing that was known holds any more. */
static void restart(tracker *t, stream *s, u32 psn)
{
    t->counts[RESTARTED]++;
    give_up_all(t, s);
    say_closed(t, s);
    s->is_seeded = 0;
    s->floor = psn;
    s->past_count = 0;
    s->key_count = s->key_turn = 0;
    s->mtu = 0;
    say_opened(t, s);
}

static int form_of(const stream *s, u32 rkey)
{
    for (int i = 0; i < s->key_count; i++)
        if (s->keys[i] == rkey)
            return s->forms[i];
    return RAW;
}

/* ------------------------------------------------------------------ opcodes of reliable connections */

enum { RETH = 1, ATOMIC_ETH = 2, AETH = 4, IMMEDIATE = 8, INVALIDATE = 16 };
enum { FIRST = 1, MIDDLE = 2, LAST = 4, ONLY = 5 };

typedef struct { u8 operation, place, headers, is_known; } opcode;

static const opcode OPCODES[32] = {
    [0] = {OP_SEND, FIRST, 0, 1},
    [1] = {OP_SEND, MIDDLE, 0, 1},
    [2] = {OP_SEND, LAST, 0, 1},
    [3] = {OP_SEND, LAST, IMMEDIATE, 1},
    [4] = {OP_SEND, ONLY, 0, 1},
    [5] = {OP_SEND, ONLY, IMMEDIATE, 1},
    [6] = {OP_WRITE, FIRST, RETH, 1},
    [7] = {OP_WRITE, MIDDLE, 0, 1},
    [8] = {OP_WRITE, LAST, 0, 1},
    [9] = {OP_WRITE, LAST, IMMEDIATE, 1},
    [10] = {OP_WRITE, ONLY, RETH, 1},
    [11] = {OP_WRITE, ONLY, RETH | IMMEDIATE, 1},
    [12] = {OP_READ_REQUEST, ONLY, RETH, 1},
    [13] = {OP_READ_RESPONSE, FIRST, AETH, 1},
    [14] = {OP_READ_RESPONSE, MIDDLE, 0, 1},
    [15] = {OP_READ_RESPONSE, LAST, AETH, 1},
    [16] = {OP_READ_RESPONSE, ONLY, AETH, 1},
    [22] = {OP_SEND, LAST, INVALIDATE, 1},
    [23] = {OP_SEND, ONLY, INVALIDATE, 1},
};
#define ACKNOWLEDGE 17
#define ATOMIC_ACKNOWLEDGE 18
#define COMPARE_SWAP 19
#define FETCH_ADD 20

/* ------------------------------------------------------------------ one request or response */

static void advance(stream *s, u32 end)
{
    if (!s->is_seeded || distance(end, s->next) > 0)
        s->next = end;
    s->is_seeded = 1;
}

/* A message that waits for an immediate is whole as soon as something else follows. */
static void end_waiting(tracker *t, stream *s, u32 psn)
{
    for (int i = s->open_count - 1; i >= 0; i--) {
        message *m = s->open[i];
        if (psn_add(m->psn, m->span ? m->span : m->extent) == psn && is_complete(m))
            emit(t, m, 0);
        else if (m->is_chain && !m->span && m->done == m->extent
                 && psn_add(m->psn, m->extent) == psn)
            emit(t, m, 0);
    }
}

static void give_up_old(tracker *t, stream *s)
{
    for (int i = 0; i < s->open_count;)
        if (s->packets - s->open[i]->seen_at > PATIENCE)
            emit(t, s->open[i], 1);
        else
            i++;
}

/* Make room for one more open message. */
static void make_room(tracker *t, stream *s)
{
    if (s->open_count == OPEN_PER_STREAM)
        emit(t, s->open[0], 1);
    if (t->open_count >= MOST_OPEN)
        emit(t, t->oldest, 1);
}

/* NULL: no room. `capacity`: bytes of the wire. */
static message *begin_message(tracker *t, u32 index, const packet *p, int operation, int form,
                              u64 capacity)
{
    stream *s = t->streams + index;
    u32 block = NONE;
    make_room(t, s);
    if (capacity) {
        block = arena_take(&t->arena, arena_order(placed_bytes(form, capacity)));
        if (block == NONE) {
            t->counts[NO_ROOM]++;
            return NULL;
        }
    }
    message *m = new_message(t, index);
    if (!m) {
        if (block != NONE)
            arena_give(&t->arena, block);
        return NULL;
    }
    m->psn = p->psn;
    m->operation = (u8)operation;
    m->form = (u8)form;
    m->block = block;
    m->capacity = capacity;
    m->seen_at = s->packets;
    return m;
}

static message *covering(const stream *s, u32 psn)
{
    for (int i = s->open_count - 1; i >= 0; i--) {
        message *m = s->open[i];
        u32 extent = m->span ? m->span + m->is_split : m->extent;
        if (((psn - m->psn) & PSN_MASK) < extent)
            return m;
    }
    return NULL;
}

/* The message of the past that this number belongs to. */
static const past *past_covering(const stream *s, u32 psn)
{
    u32 count = s->past_count < REMEMBERED ? s->past_count : REMEMBERED;
    for (u32 i = 1; i <= count; i++) {
        const past *entry = s->history + (s->past_count - i) % REMEMBERED;
        if (((psn - entry->psn) & PSN_MASK) < entry->span)
            return entry;
    }
    return NULL;
}

static u32 oldest_psn(const stream *s)
{
    return s->past_count > REMEMBERED ? s->history[s->past_count % REMEMBERED].psn : s->floor;
}

enum { NEW, OLD, ANEW };

/* What a first packet is that belongs to no open message and lies before the one expected. */
static int judge(const stream *s, const packet *p, int operation)
{
    const past *entry = past_covering(s, p->psn);
    if (entry) {
        int is_first = entry->psn == p->psn, is_closing = entry->is_split && !p->va && !p->rkey;
        int is_same = is_first ? entry->operation == operation && entry->va == p->va
                                     && entry->rkey == p->rkey
                               : !entry->has_head || entry->is_chain || is_closing;
        return is_same ? OLD : ANEW;
    }
    int32_t before = distance(p->psn, oldest_psn(s));
    if (s->past_count > REMEMBERED ? before < 0 : before < -REACH)
        return ANEW;
    return NEW;
}

/* A message whose first packet comes after others of it: take over what they brought. */
static void absorb(tracker *t, stream *s, message *m)
{
    for (int i = s->open_count - 1; i >= 0; i--) {
        message *f = s->open[i];
        u32 offset = (f->psn - m->psn) & PSN_MASK;
        if (f == m || f->has_head || f->operation != m->operation || offset >= m->span
            || f->extent > m->span - offset || (f->mtu != m->mtu && f->extent > 1)
            || (u64)offset * m->mtu + f->length > m->length
            || f->has_end != (offset + f->extent == m->span))
            continue;
        for (u32 j = 0; j < f->extent; j++) {
            packet part = {.payload = block_bytes(t, f->block) + (u64)j * f->mtu};
            u64 left = f->length - (u64)j * f->mtu;
            part.payload_bytes = (u32)(left < f->mtu ? left : f->mtu);
            u64 at = (u64)(offset + j) * m->mtu, room = m->length - at;
            if (part.payload_bytes == (room < m->mtu ? room : m->mtu))
                take_payload(t, m, offset + j, &part);
        }
        if (f->has_immediate)
            m->has_immediate = 1, m->immediate = f->immediate;
        m->has_end |= f->has_end;
        note_frame(m, f->frame, f->time_ns);
        note_frame(m, f->last_frame, f->time_ns);
        drop_message(t, f);
    }
}

static void set_immediate(message *m, const packet *p, const opcode *o)
{
    if (o->headers & IMMEDIATE) {
        m->has_immediate = 1;
        m->immediate = p->immediate;
    }
}

/* Complete messages go out at once, but for those that an immediate may follow. */
static void end_packet(tracker *t, message *m)
{
    if (!is_complete(m))
        return;
    if (m->operation == OP_WRITE && !m->has_immediate && m->length > LONGEST_ALONE && m->has_head)
        return;
    emit(t, m, 0);
}

/* ---- a WRITE of known length */

static void begin_write(tracker *t, u32 index, const packet *p, const opcode *o)
{
    stream *s = t->streams + index;
    u32 mtu = o->place == FIRST ? p->payload_bytes : s->mtu;
    if (o->place == ONLY && mtu < p->length)
        mtu = p->length;
    u32 span = p->length && mtu ? (p->length - 1) / mtu + 1 : 1;
    message *m = begin_message(t, index, p, OP_WRITE, form_of(s, p->rkey), p->length);
    advance(s, psn_add(p->psn, m ? span : 1));
    if (!m)
        return;
    m->va = p->va, m->rkey = p->rkey, m->length = p->length;
    m->mtu = mtu, m->span = span, m->has_head = 1, m->has_end = o->place == ONLY;
    set_immediate(m, p, o);
    note_frame(m, p->frame, p->time_ns);
    take_payload(t, m, 0, p);
    if (span > 1 && s->open_count > 1)
        absorb(t, s, m);
    end_packet(t, m);
}

/* ---- WRITE ONLY packets that continue each other: a chain */

static int can_chain(const stream *s, const packet *p, const opcode *o)
{
    u32 n = p->payload_bytes;
    return o->operation == OP_WRITE && o->place == ONLY && !(o->headers & IMMEDIATE)
        && (s->mtu ? n == s->mtu : (n == 1024 || n == 2048 || n == 4096));
}

/* The chain that this packet belongs to, and as which packet of it (may be negative). */
static message *chain_of(const stream *s, const packet *p, const opcode *o, int32_t *i)
{
    if (o->place != ONLY || o->operation != OP_WRITE || o->headers & IMMEDIATE || !p->payload_bytes)
        return NULL;
    for (int k = s->open_count - 1; k >= 0; k--) {
        message *m = s->open[k];
        int32_t offset = distance(p->psn, m->psn);
        if (!m->is_chain || m->rkey != p->rkey || p->payload_bytes > m->mtu
            || p->va != m->va + (u64)((int64_t)offset * m->mtu))
            continue;
        int64_t end = (int64_t)offset * m->mtu + p->payload_bytes;
        if (m->span ? offset < 0 || (u32)offset >= m->span || (u64)end > m->length
                    : m->has_end && offset >= (int32_t)m->extent)
            continue;
        if (p->payload_bytes < m->mtu && (m->span ? (u64)end != m->length
                                                  : offset + 1 < (int32_t)m->extent))
            continue;
        *i = offset;
        return m;
    }
    return NULL;
}

static void take_chained(tracker *t, stream *s, message *m, int32_t offset, const packet *p)
{
    u32 front = offset < 0 ? (u32)-offset : 0, i = offset < 0 ? 0 : (u32)offset;
    u64 end = (u64)i * m->mtu + p->payload_bytes;
    u64 need = front ? (u64)(front + m->extent) * m->mtu : end;
    if (need > m->capacity) {
        u64 room = 2 * m->capacity < t->most_bytes ? 2 * m->capacity : t->most_bytes;
        if (!resize(t, m, room > need ? room : need, front)) {
            t->counts[NO_ROOM]++;
            return;
        }
    } else if (front && !resize(t, m, m->capacity, front)) {
        t->counts[NO_ROOM]++;
        return;
    }
    if (front) {
        m->psn = p->psn;
        m->va = p->va;
        m->length += (u64)front * m->mtu;
    }
    advance(s, psn_add(p->psn, 1));
    if (!take_payload(t, m, i, p))
        return;
    note_frame(m, p->frame, p->time_ns);
    if (!m->span && end > m->length)
        m->length = end;
    m->has_end |= p->payload_bytes < m->mtu;
    end_packet(t, m);
}

static void begin_chain(tracker *t, u32 index, const packet *p)
{
    stream *s = t->streams + index;
    u64 room = FIRST_ROOM < t->most_bytes ? FIRST_ROOM : t->most_bytes;
    advance(s, psn_add(p->psn, 1));
    /* where in a slice of LL128 it begins is unknown until it is whole */
    int form = form_of(s, p->rkey) == LL ? LL : RAW;
    message *m = begin_message(t, index, p, OP_WRITE, form, room);
    if (!m)
        return;
    m->va = p->va, m->rkey = p->rkey, m->mtu = p->payload_bytes, m->length = p->payload_bytes;
    m->is_chain = 1, m->has_head = 1;
    note_frame(m, p->frame, p->time_ns);
    take_payload(t, m, 0, p);
}

/* ---- the empty write with the immediate of the write before it */

static u32 swapped(u32 x) { return __builtin_bswap32(x); }

/* Whether a chain is the end of `length` bytes before `psn`; then it begins where these begin. */
static int fit_chain(tracker *t, message *m, u32 length, u32 psn)
{
    u32 count = length ? (length - 1) / m->mtu + 1 : 0;
    u32 start = (psn - count) & PSN_MASK;
    int32_t front = distance(m->psn, start);
    if (!count || front < 0 || (u32)front + m->extent > count || length > t->most_bytes
        || (u64)front * m->mtu + m->length > length
        || (m->has_end && (u64)front * m->mtu + m->length != length))
        return 0;
    if ((front || length > m->capacity) && !resize(t, m, length, (u32)front))
        return 0;
    m->psn = start;
    m->va -= (u64)front * m->mtu;
    m->length = length;
    m->span = count;
    return 1;
}

/* Whether an immediate may be that of a write of this length, or of a message of which it is a
 * part: one that is cut over several queue pairs. */
static int may_be_of(u32 immediate, u64 length)
{
    return immediate >= length || swapped(immediate) >= length;
}

/* Whether the packet was the closing immediate of an open message. */
static int closes(tracker *t, stream *s, const packet *p, const opcode *o)
{
    if (o->operation != OP_WRITE || o->place != ONLY || !(o->headers & IMMEDIATE) || p->length
        || p->va || p->rkey || !p->immediate)
        return 0;
    for (int i = s->open_count - 1; i >= 0; i--) {
        message *m = s->open[i];
        u32 length = 0;
        if (m->operation != OP_WRITE || m->has_immediate || !m->has_head)
            continue;
        if (m->is_chain && !m->span) {
            if (fit_chain(t, m, p->immediate, p->psn))
                length = p->immediate;
            else if (fit_chain(t, m, swapped(p->immediate), p->psn))
                length = swapped(p->immediate);
        } else if (psn_add(m->psn, m->span) == p->psn && may_be_of(p->immediate, m->length)) {
            length = (u32)m->length;
        }
        if (!length)
            continue;
        m->is_split = m->has_immediate = 1;
        m->immediate = p->immediate;
        m->immediate_frame = p->frame;
        m->seen_at = s->packets;
        note_frame(m, p->frame, p->time_ns);
        advance(s, psn_add(p->psn, 1));
        end_packet(t, m);
        return 1;
    }
    return 0;
}

/* ---- runs: messages of unknown length, from a first packet on or from where a gap ends */

static void extend_run(tracker *t, message *m, const packet *p, const opcode *o)
{
    stream *s = t->streams + m->stream;
    u32 i = m->extent;
    u64 end = (u64)i * m->mtu + p->payload_bytes;
    advance(s, psn_add(p->psn, 1));
    if (end > m->capacity) {
        u64 room = 2 * m->capacity < t->most_bytes ? 2 * m->capacity : t->most_bytes;
        if (end > room || !resize(t, m, room, 0)) {
            t->counts[NO_ROOM]++;
            emit(t, m, 1);
            return;
        }
    }
    if (!take_payload(t, m, i, p)) {
        emit(t, m, 1); /* a hole: what follows may be another message */
        return;
    }
    m->length = end;
    note_frame(m, p->frame, p->time_ns);
    if (o->place & LAST) {
        m->has_end = 1;
        set_immediate(m, p, o);
        if (m->has_head)
            end_packet(t, m);
    }
}

static void begin_run(tracker *t, u32 index, const packet *p, const opcode *o)
{
    stream *s = t->streams + index;
    u64 room = FIRST_ROOM < t->most_bytes ? FIRST_ROOM : t->most_bytes;
    if (o->place == ONLY)
        room = p->payload_bytes;
    advance(s, psn_add(p->psn, 1));
    message *m = begin_message(t, index, p, o->operation, RAW, room);
    if (!m)
        return;
    m->mtu = o->place & LAST && s->mtu > p->payload_bytes ? s->mtu : p->payload_bytes;
    m->has_head = o->place & FIRST;
    if (o->place == ONLY)
        m->span = 1;
    set_immediate(m, p, o);
    note_frame(m, p->frame, p->time_ns);
    m->has_end = (o->place & LAST) != 0;
    m->length = p->payload_bytes;
    if (take_payload(t, m, 0, p))
        end_packet(t, m);
    else
        drop_message(t, m);
}

/* ---- which of these a packet is for */

static void middle_or_last(tracker *t, u32 index, const packet *p, const opcode *o)
{
    stream *s = t->streams + index;
    message *m = covering(s, p->psn);
    if (m && m->span) {
        u32 i = (p->psn - m->psn) & PSN_MASK;
        u64 left = m->length - (u64)i * m->mtu;
        int fits = m->operation == o->operation && !m->is_chain && i < m->span
            && (i == m->span - 1) == (o->place == LAST)
            && p->payload_bytes == (left < m->mtu ? left : m->mtu);
        if (!fits) {
            t->counts[CONFLICT]++;
            return;
        }
        if (o->place == LAST) {
            m->has_end = 1;
            set_immediate(m, p, o);
        }
        note_frame(m, p->frame, p->time_ns);
        take_payload(t, m, i, p);
        end_packet(t, m);
        return;
    }
    if (m) {
        t->counts[DUPLICATE]++;
        return;
    }
    for (int i = s->open_count - 1; i >= 0; i--) {
        m = s->open[i];
        if (!m->span && !m->is_chain && !m->has_end && m->operation == o->operation
            && psn_add(m->psn, m->extent) == p->psn
            && (o->place == LAST ? p->payload_bytes <= m->mtu : p->payload_bytes == m->mtu)) {
            extend_run(t, m, p, o);
            return;
        }
    }
    if (s->is_seeded && distance(p->psn, s->next) < 0 && past_covering(s, p->psn))
        t->counts[DUPLICATE]++;
    else
        begin_run(t, index, p, o);
}

static void read_request(tracker *t, u32 index, const packet *p)
{
    stream *s = t->streams + index;
    u32 span = s->mtu && p->length ? (p->length - 1) / s->mtu + 1 : p->length ? 0 : 1;
    message *m = begin_message(t, index, p, OP_READ_REQUEST, RAW, 0);
    advance(s, psn_add(p->psn, span && span < PSN_MASK / 2 ? span : 1));
    if (!m)
        return;
    m->va = p->va, m->rkey = p->rkey, m->length = p->length;
    m->has_head = m->has_end = 1;
    m->extent = m->done = m->span = span ? span : 1;
    m->packets = 1;
    note_frame(m, p->frame, p->time_ns);
    emit(t, m, 0);
    if (!span && t->messages.used >= sizeof(message_row))
        ((message_row *)(t->messages.bytes + t->messages.used))[-1].span = 0;
}

/* 1: the packet was seen before, or does not fit what is open; nothing is to be done. */
static int is_repeated(tracker *t, stream *s, const packet *p, const opcode *o)
{
    message *m = covering(s, p->psn);
    if (m && !m->has_head)
        return 0; /* it will be absorbed, or given up */
    if (m && m->psn == p->psn && m->operation == o->operation && m->va == p->va
        && m->rkey == p->rkey && (!m->span || m->is_chain || m->length == p->length)) {
        if (m->span && !is_present(t, m, 0) && p->payload_bytes == (m->length < m->mtu ? m->length : m->mtu)) {
            take_payload(t, m, 0, p);
            note_frame(m, p->frame, p->time_ns);
            end_packet(t, m);
        } else {
            t->counts[DUPLICATE]++;
        }
        return 1;
    }
    if (m && m->is_split && p->psn == psn_add(m->psn, m->span) && !p->length) {
        t->counts[DUPLICATE]++; /* the closing immediate once more */
        return 1;
    }
    if (m) { /* two beginnings cannot be in one message */
        t->counts[CONFLICT]++;
        emit(t, m, 1);
        return 0;
    }
    if (!s->is_seeded || distance(p->psn, s->next) >= 0)
        return 0;
    switch (judge(s, p, o->operation)) {
    case OLD:
        t->counts[DUPLICATE]++;
        return 1;
    case ANEW:
        restart(t, s, p->psn);
        return 0;
    default:
        return 0;
    }
}

static void first_or_only(tracker *t, u32 index, const packet *p, const opcode *o)
{
    stream *s = t->streams + index;
    int32_t offset;
    if (closes(t, s, p, o))
        return;
    message *chain = chain_of(s, p, o, &offset);
    if (chain) {
        take_chained(t, s, chain, offset, p);
        return;
    }
    if (is_repeated(t, s, p, o))
        return;
    if (s->open_count)
        end_waiting(t, s, p->psn);
    if (o->operation == OP_READ_REQUEST)
        read_request(t, index, p);
    else if (o->operation != OP_WRITE)
        begin_run(t, index, p, o);
    else if (can_chain(s, p, o))
        begin_chain(t, index, p);
    else
        begin_write(t, index, p, o);
}

/* Whether the payload is as long as this place in a message allows. */
static int is_sound(const tracker *t, const packet *p, const opcode *o)
{
    u32 n = p->payload_bytes;
    if (o->place == FIRST || o->place == MIDDLE) {
        if (n < LEAST_MTU || n > MOST_MTU || n & (n - 1))
            return 0;
    } else if (n > MOST_MTU || (o->place == LAST && !n)) {
        return 0;
    }
    if (o->operation == OP_READ_REQUEST)
        return !n;
    if (o->headers & RETH) {
        if (o->place == ONLY && p->length != n)
            return 0;
        if (o->place == FIRST && (p->length <= n || p->length > t->most_bytes))
            return 0;
    }
    return 1;
}

static void take_packet(tracker *t, const packet *p, const opcode *o)
{
    u32 index = find_stream(t, p, o->operation == OP_READ_RESPONSE);
    stream *s = t->streams + index;
    s->is_recent = 1;
    s->packets++;
    if (!is_sound(t, p, o)) {
        t->counts[MALFORMED]++;
        return;
    }
    if (o->place == FIRST || o->place == MIDDLE)
        s->mtu = p->payload_bytes;
    if (!s->is_seeded)
        s->floor = p->psn;
    if (o->place & FIRST)
        first_or_only(t, index, p, o);
    else
        middle_or_last(t, index, p, o);
    give_up_old(t, s);
}

/* ------------------------------------------------------------------ headers */

/* The ICRC of a packet that was captured whole. Source: InfiniBand Architecture, annex A17 (RoCEv2):
CRC-32 from the IP header to the end of the payload, behind eight bytes of ones, with all fields that
routers may change set to ones. 1 right, 0 wrong, -1 cannot be told. */
static int icrc_is_right(const u8 *data, const packet_row *row)
{
    u8 head[8 + LONGEST_HEADER + 12 + 16];
    size_t fixed = (size_t)row->header + 12;
    if (row->header > LONGEST_HEADER || row->header < 28 || row->header > row->at
        || row->captured < row->length || row->length < 16)
        return -1;
    const u8 *ip = data + row->at - row->header;
    memset(head, 0xff, 8);
    memcpy(head + 8, ip, fixed);
    u8 *p = head + 8, *udp = p + row->header - 8;
    if (p[0] >> 4 == 6) {
        p[0] |= 0x0f, p[1] = p[2] = p[3] = 0xff; /* traffic class, flow label */
        p[7] = 0xff;                             /* hop limit */
    } else {
        p[1] = 0xff;         /* type of service */
        p[8] = 0xff;         /* time to live */
        p[10] = p[11] = 0xff; /* header checksum */
    }
    udp[6] = udp[7] = 0xff;
    udp[8 + 4] = 0xff; /* FECN, BECN and reserved bits */
    const u8 *rest = data + row->at + 12, *end = data + row->at + row->length - 4;
    size_t more = -(8 + fixed) % 16, left = (size_t)(end - rest);
    if (more > left)
        more = left;
    memcpy(head + 8 + fixed, rest, more);
    u32 crc = crc_of(head, 8 + fixed + more, rest + more, left - more, crc_best);
    return crc == ((u32)end[3] << 24 | (u32)end[2] << 16 | (u32)end[1] << 8 | end[0]);
}

static void take_ack(tracker *t, const packet *p, const u8 *aeth)
{
    t->counts[ACKS]++;
    ack_row *row = append(t, &t->acks, sizeof *row);
    if (row)
        *row = (ack_row){p->frame, p->time_ns, p->row->source, p->row->destination, p->qp, p->psn,
                         big24(aeth + 1), p->row->source_port, aeth[0], 0};
}

/* Reads the extension headers; 0: they are not all there. */
static int read_headers(packet *p, const opcode *o, const u8 *bth, u32 captured, u32 length)
{
    u32 at = 12, pad = bth[1] >> 4 & 3, end = length - 4;
    u32 headers = (o->headers & RETH ? 16 : 0) + (o->headers & AETH ? 4 : 0)
        + (o->headers & IMMEDIATE ? 4 : 0) + (o->headers & INVALIDATE ? 4 : 0);
    if (captured < at + headers || end < at + headers + pad)
        return 0;
    if (o->headers & RETH) {
        p->va = (u64)big32(bth + at) << 32 | big32(bth + at + 4);
        p->rkey = big32(bth + at + 8);
        p->length = big32(bth + at + 12);
        at += 16;
    }
    if (o->headers & IMMEDIATE) {
        memcpy(&p->immediate, bth + at, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        p->immediate = swapped(p->immediate);
#endif
    }
    at = 12 + headers;
    p->payload = bth + at;
    p->payload_bytes = end - pad - at;
    p->is_cut = captured < at + p->payload_bytes;
    return 1;
}

static void take_row(tracker *t, const u8 *data, const packet_row *row, const frame_row *frame,
                     u64 number)
{
    const u8 *bth = data + row->at;
    if (row->length < 16 || row->captured < 12 || bth[1] & 15) {
        t->counts[NOT_ROCE]++;
        return;
    }
    if (t->check_icrc) {
        int right = icrc_is_right(data, row);
        if (right <= 0) { /* what cannot be checked may say anything */
            t->counts[right ? UNCHECKED : BAD_ICRC]++;
            return;
        }
    }
    packet p = {.row = row, .frame = number, .time_ns = frame->time_ns, .qp = big24(bth + 5),
                .psn = big24(bth + 9), .opcode = bth[0]};
    if (p.opcode >> 5) {
        t->counts[OTHER_TRANSPORT]++;
        return;
    }
    const opcode *o = OPCODES + p.opcode;
    if (p.opcode == ACKNOWLEDGE && row->captured >= 16 && row->length >= 20) {
        take_ack(t, &p, bth + 12);
    } else if (p.opcode >= ATOMIC_ACKNOWLEDGE && p.opcode <= FETCH_ADD) {
        t->counts[ATOMIC]++;
        if (p.opcode != ATOMIC_ACKNOWLEDGE) {
            stream *s = t->streams + find_stream(t, &p, 0);
            if (!s->is_seeded)
                s->floor = p.psn;
            advance(s, psn_add(p.psn, 1));
        }
    } else if (!o->is_known || !read_headers(&p, o, bth, row->captured, row->length)) {
        t->counts[MALFORMED]++;
    } else {
        t->counts[o->operation == OP_READ_RESPONSE ? RESPONSES : REQUESTS]++;
        take_packet(t, &p, o);
    }
}

/* ------------------------------------------------------------------ batches */

static void recycle(tracker *t)
{
    const u32 *blocks = (const u32 *)t->used_blocks.bytes;
    for (size_t i = 0; i < t->used_blocks.used / sizeof *blocks; i++)
        arena_give(&t->arena, blocks[i]);
    t->used_blocks.used = 0;
}

/* Whether the largest message would find room; else something has been closed to make some. */
static int has_room(tracker *t)
{
    if (t->arena.free_orders >> t->most_order)
        return 1;
    while (!t->used_blocks.used && t->oldest)
        emit(t, t->oldest, 1);
    return 0;
}

/* Packets lie too far apart for the processor to see the pattern; inside a long one it does. */
static void prefetch(const u8 *data, size_t size, const packet_row *row)
{
    if (row->at > size || row->captured > size - row->at)
        return;
    const u8 *p = data + row->at, *end = p + (row->captured < 1088 ? row->captured : 1088);
    for (; p < end; p += 64)
        __builtin_prefetch(p);
}

/* Gives the row to go on with: what was closed must be fetched first. -1: a row is not in the data. */
static Py_ssize_t feed_rows(tracker *t, const u8 *data, size_t size, const frame_row *frames,
                            size_t frame_count, u64 first, const packet_row *rows, size_t count,
                            size_t from, u32 port)
{
    recycle(t);
    for (size_t i = from; i < count && !t->out_of_memory; i++) {
        const packet_row *row = rows + i;
        if (row->at > size || row->captured > size - row->at || row->captured > row->length
            || row->frame >= frame_count)
            return -1;
        if (i + AHEAD < count)
            prefetch(data, size, rows + i + AHEAD);
        if (row->protocol != 17 || row->destination_port != port)
            continue;
        if (!has_room(t))
            return (Py_ssize_t)i;
        take_row(t, data, row, frames + row->frame, first + row->frame);
    }
    return (Py_ssize_t)count;
}

/* ------------------------------------------------------------------ for Python */

static void tracker_free(PyObject *capsule)
{
    tracker *t = PyCapsule_GetPointer(capsule, "tracker");
    Py_buffer *memory = PyCapsule_GetContext(capsule);
    while (t->oldest)
        drop_message(t, t->oldest);
    while (t->spare) {
        message *m = t->spare;
        t->spare = m->newer;
        free(m);
    }
    vector *vectors[] = {&t->messages, &t->ranges, &t->acks, &t->opened, &t->closed, &t->used_blocks};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++)
        free(vectors[i]->bytes);
    arena_end(&t->arena);
    free(t);
    if (memory) {
        PyBuffer_Release(memory);
        PyMem_Free(memory);
    }
}

static PyObject *new_tracker(PyObject *module, PyObject *args)
{
    PyObject *array;
    unsigned long long seed, most_bytes;
    int check_icrc;
    if (!PyArg_ParseTuple(args, "OKKp", &array, &most_bytes, &seed, &check_icrc))
        return NULL;
    tracker *t = calloc(1, sizeof *t);
    Py_buffer *memory = PyMem_Calloc(1, sizeof *memory);
    PyObject *capsule = t && memory ? PyCapsule_New(t, "tracker", tracker_free) : NULL;
    if (!capsule) {
        free(t);
        PyMem_Free(memory);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    if (PyObject_GetBuffer(array, memory, PyBUF_WRITABLE) < 0) {
        PyMem_Free(memory);
        Py_DECREF(capsule);
        return NULL;
    }
    PyCapsule_SetContext(capsule, memory);
    u64 units = (u64)memory->len / UNIT_BYTES;
    t->most_order = arena_order(most_bytes);
    if (units & (units - 1) || units < 4 || units > 1u << 30
        || (u64)1 << t->most_order > units / 4) {
        PyErr_SetString(PyExc_ValueError, "an arena of this size cannot be divided");
        Py_DECREF(capsule);
        return NULL;
    }
    t->memory = memory->buf;
    t->most_bytes = most_bytes;
    t->seed = seed;
    t->check_icrc = check_icrc;
    if (!arena_begin(&t->arena, (u32)units)) {
        Py_DECREF(capsule);
        return PyErr_NoMemory();
    }
    return capsule;
}

/* What has been collected since the last time, as five byte strings. */
static PyObject *fetch(tracker *t)
{
    if (t->out_of_memory)
        return PyErr_NoMemory();
    vector *v[] = {&t->messages, &t->ranges, &t->acks, &t->opened, &t->closed};
    PyObject *answer =
        Py_BuildValue("y#y#y#y#y#", v[0]->used ? (char *)v[0]->bytes : "", (Py_ssize_t)v[0]->used,
                      v[1]->used ? (char *)v[1]->bytes : "", (Py_ssize_t)v[1]->used,
                      v[2]->used ? (char *)v[2]->bytes : "", (Py_ssize_t)v[2]->used,
                      v[3]->used ? (char *)v[3]->bytes : "", (Py_ssize_t)v[3]->used,
                      v[4]->used ? (char *)v[4]->bytes : "", (Py_ssize_t)v[4]->used);
    if (answer)
        for (int i = 0; i < 5; i++)
            v[i]->used = 0;
    return answer;
}

static PyObject *feed(PyObject *module, PyObject *args)
{
    PyObject *capsule, *answer = NULL;
    Py_buffer data, frames, rows;
    unsigned long long first;
    Py_ssize_t from;
    unsigned port;
    if (!PyArg_ParseTuple(args, "Oy*y*Ky*nI", &capsule, &data, &frames, &first, &rows, &from, &port))
        return NULL;
    tracker *t = PyCapsule_GetPointer(capsule, "tracker");
    if (t && from >= 0 && rows.len % (Py_ssize_t)sizeof(packet_row) == 0
        && frames.len % (Py_ssize_t)sizeof(frame_row) == 0) {
        Py_ssize_t next;
        Py_BEGIN_ALLOW_THREADS
        next = feed_rows(t, data.buf, (size_t)data.len, frames.buf,
                         (size_t)frames.len / sizeof(frame_row), first, rows.buf,
                         (size_t)rows.len / sizeof(packet_row), (size_t)from, port);
        Py_END_ALLOW_THREADS
        if (next < 0)
            PyErr_SetString(PyExc_ValueError, "a packet outside its data");
        else if ((answer = fetch(t)))
            answer = Py_BuildValue("nN", next, answer);
    } else if (t) {
        PyErr_SetString(PyExc_ValueError, "tables that do not fit");
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&frames);
    PyBuffer_Release(&rows);
    return answer;
}

static PyObject *flush(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    long long before_ns;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &before_ns))
        return NULL;
    tracker *t = PyCapsule_GetPointer(capsule, "tracker");
    if (!t)
        return NULL;
    recycle(t);
    message *next;
    for (message *m = t->oldest; m; m = next) {
        next = m->newer;
        if (m->time_ns < before_ns)
            emit(t, m, 1);
    }
    return fetch(t);
}

static PyObject *place_key(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    unsigned number, rkey, form;
    if (!PyArg_ParseTuple(args, "OIII", &capsule, &number, &rkey, &form))
        return NULL;
    tracker *t = PyCapsule_GetPointer(capsule, "tracker");
    if (!t)
        return NULL;
    if (form >= FORMS) {
        PyErr_SetString(PyExc_ValueError, "no such form");
        return NULL;
    }
    for (u32 i = 0; i < t->stream_count; i++) {
        stream *s = t->streams + i;
        if (s->row.number != number)
            continue;
        int k = 0;
        while (k < s->key_count && s->keys[k] != rkey)
            k++;
        if (k == KEYS) {
            k = s->key_turn;
            s->key_turn = (u8)((s->key_turn + 1) % KEYS);
        } else if (k == s->key_count) {
            s->key_count++;
        }
        s->keys[k] = rkey;
        s->forms[k] = (u8)form;
        Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

static PyObject *unpack(PyObject *module, PyObject *args)
{
    Py_buffer to, from;
    Py_ssize_t at;
    unsigned form;
    PyObject *answer = NULL;
    if (!PyArg_ParseTuple(args, "w*y*nI", &to, &from, &at, &form))
        return NULL;
    if (at < 0 || form >= FORMS
        || placed_bytes((int)form, (u64)at + (u64)from.len) > (u64)to.len) {
        PyErr_SetString(PyExc_ValueError, "no room for what is unpacked");
    } else {
        u64 flag = first_flag((int)form, from.buf, (size_t)from.len);
        int right = place((int)form, to.buf, (u64)at, from.buf, (size_t)from.len, flag);
        answer = Py_BuildValue("KN", flag, PyBool_FromLong(right));
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    return answer;
}

/* What a stream's messages should look like, one after the other. */
typedef struct {
    const int64_t *lengths;
    u32 psn, flag; /* of the first */
    int form;
    const u32 *keys;
    size_t key_count;
} foreseen_rows;

static int is_key(const foreseen_rows *f, u32 rkey)
{
    for (size_t k = 0; k < f->key_count; k++)
        if (f->keys[k] == rkey)
            return 1;
    return 0;
}

/* How many of the first rows are whole writes as foreseen, each right behind the one before. */
static size_t count_foreseen(const foreseen_rows *f, const u8 *rows, size_t count)
{
    u32 psn = f->psn;
    size_t i = 0;
    for (; i < count; i++) {
        message_row row;
        memcpy(&row, rows + i * sizeof row, sizeof row);
        u64 length = (u64)f->lengths[i];
        u64 flag = f->form == RAW || !length ? 0 : (u32)(f->flag + i);
        if (row.length != length || row.psn != psn || row.flag != flag || !row.span
            || (row.immediate != length && swapped(row.immediate) != length)
            || (length && (row.form != f->form || !is_key(f, row.rkey)))
            || row.operation != OP_WRITE || !row.complete || !row.has_head || !row.has_immediate
            || row.is_split || row.is_chain)
            break;
        psn = psn_add(psn, row.span);
    }
    return i;
}

static PyObject *foreseen(PyObject *module, PyObject *args)
{
    Py_buffer rows, lengths, keys;
    foreseen_rows f;
    PyObject *answer = NULL;
    if (!PyArg_ParseTuple(args, "y*y*IIiy*", &rows, &lengths, &f.psn, &f.flag, &f.form, &keys))
        return NULL;
    size_t count = (size_t)rows.len / sizeof(message_row);
    if ((size_t)rows.len % sizeof(message_row) || (size_t)lengths.len / sizeof(int64_t) < count) {
        PyErr_SetString(PyExc_ValueError, "tables that do not fit");
    } else {
        f.lengths = lengths.buf;
        f.keys = keys.buf;
        f.key_count = (size_t)keys.len / sizeof(u32);
        answer = PyLong_FromSize_t(count_foreseen(&f, rows.buf, count));
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&keys);
    return answer;
}

static PyObject *counts(PyObject *module, PyObject *capsule)
{
    tracker *t = PyCapsule_GetPointer(capsule, "tracker");
    PyObject *list = t ? PyList_New(COUNTS) : NULL;
    for (int i = 0; list && i < COUNTS; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(t->counts[i]);
        if (!number)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    return list;
}

static PyObject *crc32_of(PyObject *module, PyObject *args)
{
    Py_buffer head, body;
    int how;
    if (!PyArg_ParseTuple(args, "y*y*i", &head, &body, &how))
        return NULL;
    how = how < CRC_TABLES ? CRC_TABLES : how > crc_best ? crc_best : how;
    u32 crc = crc_of(head.buf, (size_t)head.len, body.buf, (size_t)body.len, how);
    PyBuffer_Release(&head);
    PyBuffer_Release(&body);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef methods[] = {
    {"new_tracker", new_tracker, METH_VARARGS,
     "new_tracker(arena, most_bytes, seed, check_icrc) -> tracker"},
    {"feed", feed, METH_VARARGS,
     "feed(tracker, data, frames, first, packets, from, port) -> (next, (messages, ranges, acks, "
     "opened, closed))"},
    {"flush", flush, METH_VARARGS, "flush(tracker, before_ns) -> as feed"},
    {"place", place_key, METH_VARARGS, "place(tracker, stream, rkey, form) -> is it known?"},
    {"unpack", unpack, METH_VARARGS, "unpack(to, from, at, form) -> (flag, are all flags so?)"},
    {"foreseen", foreseen, METH_VARARGS,
     "foreseen(messages, lengths, psn, flag, form, keys) -> how many of the first are as foreseen"},
    {"counts", counts, METH_O, "counts(tracker) -> numbers, in the order of roce.py"},
    {"crc32", crc32_of, METH_VARARGS,
     "crc32(head, body, how): of both together, as in zlib; by tables (0), folding (1), wide (2)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_roce", .m_doc = "Messages of RoCEv2.", .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__roce(void)
{
    crc_begin();
    forms_begin();
    return PyModule_Create(&definition);
}
