/* TCP streams from captured segments, gloo's preambles in them, and bytes put to their places.

Everything that is read may be hostile: every offset is checked against its buffer, memory is
bounded by what the caller set, every loop moves on. Rows are those of pieces.py (packets) and
tcp.py (all others). The interpreter lock is not held while a batch is worked on.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "_rows.h"

enum { DATA, SPILLED, LOST, BROKEN, ENDED }; /* kinds of extents */

typedef struct { u64 position, at, length, frame; u32 stream, kind; } extent_row;

typedef struct {
    u32 stream, source, destination;
    u16 source_port, destination_port;
    u32 reverse, from_start;
} opened_row;

enum { HEADER, RESYNC, SKIPPED, WRONG }; /* kinds of marks */

typedef struct { u64 position, length, slot, frame; u32 opcode, kind; } mark_row;

typedef struct { u64 position, stop; int64_t start; u64 collective; } body_row;

typedef struct { u64 start, at, length, frame, collective; u32 stream, source; } scatter_row;

typedef struct { u64 start, stop, frame; u32 stream, _; } source_row;

typedef struct { u64 start, at, stop, frame; u32 stream, _; } mismatch_row;

_Static_assert(sizeof(extent_row) == 40 && sizeof(opened_row) == 24
               && sizeof(mark_row) == 40 && sizeof(body_row) == 32 && sizeof(scatter_row) == 48
               && sizeof(source_row) == 32 && sizeof(mismatch_row) == 40, "rows have no holes");

/* ------------------------------------------------------------------ growing buffers */

typedef struct { u8 *bytes; size_t size, room; } vector;

/* Room for so many bytes more; NULL when there is no memory. */
static void *more(vector *v, size_t bytes)
{
    if (bytes > SIZE_MAX / 4 || v->size > SIZE_MAX / 4)
        return NULL;
    if (v->room - v->size < bytes) {
        size_t room = v->room ? 2 * v->room : 4096;
        while (room < v->size + bytes)
            room *= 2;
        u8 *grown = realloc(v->bytes, room);
        if (!grown)
            return NULL;
        v->bytes = grown;
        v->room = room;
    }
    void *at = v->bytes + v->size;
    v->size += bytes;
    return at;
}

static void drop(vector *v)
{
    free(v->bytes);
    *v = (vector){0};
}

static PyObject *bytes_of(const vector *v)
{
    return PyByteArray_FromStringAndSize((const char *)v->bytes, (Py_ssize_t)v->size);
}

/* A buffer of whole rows: how many; -1 with an error set. */
static Py_ssize_t rows_in(const Py_buffer *buffer, size_t row)
{
    if ((size_t)buffer->len % row || (uintptr_t)buffer->buf % 8) {
        PyErr_SetString(PyExc_ValueError, "not a table of such rows");
        return -1;
    }
    return buffer->len / (Py_ssize_t)row;
}

/* ------------------------------------------------------------------ streams */

#define FAR (1 << 30)       /* no window of TCP is larger (RFC 7323): such a distance is a break */
#define STRANGE 3           /* so many segments in a row from far away are believed */
#define MOST_LATE 8192      /* segments that wait in one direction */

enum { FIN = 1, SYN = 2, RST = 4, ACK = 16 };

typedef struct { u64 position, frame; u8 *data; u32 length; } late;

typedef struct {
    u32 stream, start; /* sequence number of position 0 */
    u64 next, acked, end, since;
    late *stash; /* by position; [head, tail) */
    u32 head, tail, room, strange;
    u64 stashed;
    u8 is_known, from_start, is_ignored, has_end, is_over, is_pending;
} half;

typedef struct {
    u32 address[2];
    u16 port[2];
    int next; /* in its bucket */
    half half[2];
    u64 used, packets;
} connection;

enum { SEGMENTS, DUPLICATES, LATE, STRANGERS, CUT, BAD_SUMS, LOST_BYTES, FORGOTTEN, IGNORED, COUNTS };
static const char *const COUNT_NAMES[COUNTS] = {
    "segments", "duplicates", "late", "strange", "cut", "bad_checksums", "lost_bytes", "forgotten",
    "ignored"};

typedef struct {
    PyObject_HEAD
    connection *connections;
    int *buckets;
    int room, used;
    u32 mask, streams;
    u64 clock, most_half, most_all, stashed, patience, count[COUNTS];
    int checks, busy, failed;
    vector extents, spill, opened, closed;
} tracker;

static void emit(tracker *t, half *h, u64 at, u64 length, u64 frame, u32 kind)
{
    extent_row *row = more(&t->extents, sizeof *row);
    if (!row)
        t->failed = 1;
    else
        *row = (extent_row){h->next, at, length, frame, h->stream, kind};
    h->next += length;
}

static void forget_late(tracker *t, half *h)
{
    for (u32 i = h->head; i < h->tail; i++)
        free(h->stash[i].data);
    free(h->stash);
    t->stashed -= h->stashed;
    h->stash = NULL;
    h->head = h->tail = h->room = 0;
    h->stashed = 0;
}

/* What waited and has been reached goes on, by way of the spill. */
static void drain(tracker *t, half *h)
{
    while (h->head < h->tail && h->stash[h->head].position <= h->next) {
        late *l = h->stash + h->head++;
        u64 old = h->next - l->position;
        h->stashed -= l->length;
        t->stashed -= l->length;
        if (old < l->length) {
            u64 length = l->length - old, at = t->spill.size;
            u8 *to = more(&t->spill, length);
            if (to)
                memcpy(to, l->data + old, length);
            else
                t->failed = 1;
            if (to)
                emit(t, h, at, length, l->frame, SPILLED);
        } else {
            t->count[DUPLICATES]++;
        }
        free(l->data);
    }
    if (h->head == h->tail)
        h->head = h->tail = 0;
}

static void lose(tracker *t, half *h, u64 until, u64 frame)
{
    t->count[LOST_BYTES] += until - h->next;
    emit(t, h, 0, until - h->next, frame, LOST);
    drain(t, h);
}

/* The first hole will not be filled any more. */
static void give_up(tracker *t, half *h, u64 frame)
{
    if (h->head < h->tail)
        lose(t, h, h->stash[h->head].position, frame);
}

static int keep_late(tracker *t, half *h, u64 position, const u8 *data, u32 length, u64 frame)
{
    u32 at = h->tail;
    while (at > h->head && h->stash[at - 1].position > position)
        at--;
    if (at > h->head && h->stash[at - 1].position == position
        && h->stash[at - 1].length >= length) {
        t->count[DUPLICATES]++;
        return 1;
    }
    if (h->tail == h->room) {
        u32 waiting = h->tail - h->head;
        if (h->head) {
            memmove(h->stash, h->stash + h->head, waiting * sizeof *h->stash);
            at -= h->head;
        } else {
            u32 room = h->room ? 2 * h->room : 64;
            late *grown = realloc(h->stash, room * sizeof *grown);
            if (!grown)
                return 0;
            h->stash = grown;
            h->room = room;
        }
        h->head = 0;
        h->tail = waiting;
    }
    u8 *copy = malloc(length);
    if (!copy)
        return 0;
    memcpy(copy, data, length);
    memmove(h->stash + at + 1, h->stash + at, (h->tail - at) * sizeof *h->stash);
    h->stash[at] = (late){position, frame, copy, length};
    h->tail++;
    h->stashed += length;
    t->stashed += length;
    t->count[LATE]++;
    return 1;
}

/* Where the newest data that waits ends. */
static u64 reach(const half *h)
{
    const late *last = h->head < h->tail ? h->stash + h->tail - 1 : NULL;
    return last ? last->position + last->length : h->next;
}

static void ahead(tracker *t, half *h, u64 position, const u8 *data, u32 length, u64 frame)
{
    if (position > reach(h) + t->most_half) {
        t->count[STRANGERS]++;
        if (++h->strange < STRANGE)
            return; /* one damaged number must not break the stream */
        while (h->head < h->tail)
            give_up(t, h, frame);
        if (position > h->next)
            lose(t, h, position, frame);
    }
    h->strange = 0;
    while (position > h->next && h->head < h->tail
           && (position + length - h->next > t->most_half || h->stashed + length > t->most_half
               || h->tail - h->head >= MOST_LATE || t->stashed + length > t->most_all))
        give_up(t, h, frame);
    if (position > h->next && t->stashed + length > t->most_all)
        lose(t, h, position, frame); /* others use all the room */
    if (position > h->next && !keep_late(t, h, position, data, length, frame))
        t->failed = 1;
}

static void segment(tracker *t, half *h, u32 sequence, const u8 *data, u64 at, u32 length, u64 frame)
{
    int64_t distance = (int32_t)(sequence - (h->start + (u32)h->next));
    t->count[SEGMENTS]++;
    if (distance > FAR || distance < -FAR) {
        t->count[STRANGERS]++;
        if (++h->strange < STRANGE)
            return;
        while (h->head < h->tail)
            give_up(t, h, frame);
        emit(t, h, 0, 0, frame, BROKEN);
        h->start = sequence - (u32)h->next;
        h->acked = h->next;
        h->strange = h->is_pending = h->has_end = 0;
        distance = 0;
    }
    if (distance > 0) {
        u64 position = h->next + (u64)distance;
        ahead(t, h, position, data, length, frame);
        if (position > h->next || t->failed)
            return;
        distance = (int64_t)(position - h->next); /* holes were given up: it has its turn */
    }
    h->strange = 0;
    u64 old = (u64)-distance;
    if (old >= length) {
        t->count[DUPLICATES]++;
        return;
    }
    emit(t, h, at + old, length - old, frame, DATA);
    drain(t, h);
}

/* The other side has told how far it has got this direction's data. */
static void acknowledged(tracker *t, half *h, u32 number, u64 packets)
{
    int64_t distance = (int32_t)(number - (h->start + (u32)h->next));
    if (distance <= 0 || distance > FAR)
        return;
    u64 acked = h->next + (u64)distance;
    if (h->has_end && acked == h->end + 1)
        acked = h->end; /* its FIN counts as one */
    if (acked > reach(h) + t->most_half || acked <= h->acked)
        return;
    h->acked = acked;
    if (!h->is_pending && acked > h->next) {
        h->is_pending = 1;
        h->since = packets;
    }
}

/* The other side has it and the mirror has not: it will not be sent again. */
static void resign(tracker *t, half *h, u64 frame)
{
    while (h->acked > h->next) {
        u64 until = h->acked;
        if (h->head < h->tail && h->stash[h->head].position < until)
            until = h->stash[h->head].position;
        lose(t, h, until, frame);
    }
    h->is_pending = 0;
}

static void look_at_ends(tracker *t, connection *c, u64 frame)
{
    for (int side = 0; side < 2; side++) {
        half *h = c->half + side;
        if (h->is_ignored)
            continue;
        if (h->is_pending && h->acked <= h->next)
            h->is_pending = 0;
        if (h->is_pending && c->packets - h->since >= t->patience)
            resign(t, h, frame);
        if (h->has_end && !h->is_over && h->next >= h->end) {
            emit(t, h, 0, 0, frame, ENDED);
            h->is_over = 1;
        }
    }
}

/* ------------------------------------------------------------------ connections */

static u32 hash_of(u32 a, u32 b, u16 p, u16 q)
{
    u64 x = ((u64)a << 32 | b) * 0x9e3779b97f4a7c15u ^ ((u64)p << 16 | q) * 0xc2b2ae3d27d4eb4fu;
    return (u32)(x >> 29);
}

static void tell_closed(tracker *t, half *h)
{
    u32 *row = h->is_known ? more(&t->closed, sizeof *row) : NULL;
    if (row)
        *row = h->stream;
    else if (h->is_known)
        t->failed = 1;
}

static void tell_opened(tracker *t, connection *c, int side)
{
    half *h = c->half + side;
    opened_row *row = more(&t->opened, sizeof *row);
    if (!row) {
        t->failed = 1;
        return;
    }
    *row = (opened_row){h->stream,        c->address[side],          c->address[!side],
                        c->port[side],    c->port[!side],            c->half[!side].stream,
                        h->from_start};
}

static void renew(tracker *t, connection *c, int side)
{
    tell_closed(t, c->half + side);
    forget_late(t, c->half + side);
    c->half[side] = (half){.stream = t->streams++};
}

static void begin(tracker *t, connection *c, int side, u32 start, int from_start)
{
    half *h = c->half + side;
    h->is_known = 1;
    h->start = start;
    h->from_start = (u8)from_start;
    tell_opened(t, c, side);
}

static int *place_in_bucket(tracker *t, connection *c)
{
    int *link = t->buckets
              + (hash_of(c->address[0], c->address[1], c->port[0], c->port[1]) & t->mask);
    while (*link >= 0 && t->connections + *link != c)
        link = &t->connections[*link].next;
    return link;
}

/* The connection that has been idle longest makes room; ignored ones first. */
static int evict(tracker *t)
{
    int oldest = 0;
    for (int i = 1; i < t->used; i++) {
        connection *a = t->connections + i, *b = t->connections + oldest;
        int ia = a->half[0].is_ignored & a->half[1].is_ignored;
        int ib = b->half[0].is_ignored & b->half[1].is_ignored;
        if (ia > ib || (ia == ib && a->used < b->used))
            oldest = i;
    }
    connection *c = t->connections + oldest;
    *place_in_bucket(t, c) = c->next;
    for (int side = 0; side < 2; side++) {
        tell_closed(t, c->half + side);
        forget_late(t, c->half + side);
    }
    t->count[FORGOTTEN]++;
    return oldest;
}

static connection *find(tracker *t, const packet_row *p, int *side)
{
    u32 a = p->source, b = p->destination;
    u16 m = p->source_port, n = p->destination_port;
    *side = a > b || (a == b && m > n);
    if (*side) {
        a = p->destination, b = p->source;
        m = p->destination_port, n = p->source_port;
    }
    int *bucket = t->buckets + (hash_of(a, b, m, n) & t->mask);
    for (int i = *bucket; i >= 0; i = t->connections[i].next) {
        connection *c = t->connections + i;
        if (c->address[0] == a && c->address[1] == b && c->port[0] == m && c->port[1] == n)
            return c;
    }
    int i = t->used < t->room ? t->used++ : evict(t);
    connection *c = t->connections + i;
    *c = (connection){.address = {a, b}, .port = {m, n}, .next = *bucket};
    c->half[0].stream = t->streams++;
    c->half[1].stream = t->streams++;
    *bucket = i; /* after evict, which may have changed the bucket */
    return c;
}

/* ------------------------------------------------------------------ checksums */

static u64 sum_of(const u8 *p, size_t length)
{
    u64 sum = 0;
    u32 word;
    size_t i = 0;
    for (; i + 4 <= length; i += 4) {
        memcpy(&word, p + i, 4);
        sum += word;
    }
    for (word = 0; i < length; i++) /* read as the bytes lie in memory, zeros behind them */
        ((u8 *)&word)[i & 3] = p[i];
    return sum + word;
}

static u32 folded(u64 sum)
{
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (u32)sum;
}

/* Whether the TCP checksum is right (RFC 9293, section 3.1), or is not filled in yet: then the sum
of the pseudo-header stands in its place, for whoever sends the segment on. A cut segment cannot be
checked. */
static int is_sound(const packet_row *p, const u8 *data)
{
    if (p->captured != p->length || p->header < 40 || p->header > p->at)
        return 0;
    const u8 *ip = data + p->at - p->header;
    size_t before = 0; /* bytes of IP headers */
    u64 sum;
    if (*ip >> 4 == 4) {
        before = 4 * (size_t)(*ip & 15);
        sum = sum_of(ip + 12, 8);
    } else {
        u8 next = ip[6];
        before = 40;
        sum = sum_of(ip + 8, 32);
        while (next != 6 && before + 8 <= p->header) {
            size_t length = next == 44 ? 8 : next == 51 ? 4 * ((size_t)ip[before + 1] + 2)
                                                        : 8 * ((size_t)ip[before + 1] + 1);
            next = ip[before];
            before += length;
        }
    }
    if (before + 20 > p->header)
        return 0;
    size_t length = p->header - before + p->length;
    u8 tail[8] = {0, 0, 0, 6, (u8)(length >> 24), (u8)(length >> 16), (u8)(length >> 8), (u8)length};
    sum += sum_of(tail, 8);
    u16 told;
    memcpy(&told, ip + before + 16, 2);
    return told == folded(sum) || folded(sum + sum_of(ip + before, length)) == 0xffff;
}

/* ------------------------------------------------------------------ packets */

static void take(tracker *t, const packet_row *p, const u8 *data, u64 size, u64 first)
{
    u64 frame = first + p->frame;
    if (p->protocol != 6 || p->at > size || p->captured > size - p->at || p->captured > p->length)
        return;
    if (t->checks && !is_sound(p, data)) {
        t->count[BAD_SUMS]++;
        return;
    }
    int side;
    connection *c = find(t, p, &side);
    half *h = c->half + side, *o = c->half + !side;
    u32 sequence = p->sequence;
    c->used = ++t->clock;
    c->packets++;
    if (p->flags & SYN) {
        sequence++;
        if (h->is_known && !(h->from_start && h->start == sequence)) {
            if (!(p->flags & ACK))
                renew(t, c, !side);
            renew(t, c, side);
        }
        if (!h->is_known)
            begin(t, c, side, sequence, 1);
    } else if (!h->is_known && !(p->flags & RST)) {
        begin(t, c, side, sequence, 0);
    }
    if (p->flags & ACK && !(p->flags & RST)) {
        if (!o->is_known)
            begin(t, c, !side, p->acknowledgement, p->flags & SYN ? 1 : 0);
        else if (!o->is_ignored)
            acknowledged(t, o, p->acknowledgement, c->packets);
    }
    if (h->is_ignored) {
        t->count[IGNORED]++;
        return;
    }
    t->count[CUT] += p->captured < p->length;
    if (p->captured && h->is_known)
        segment(t, h, sequence, data + p->at, p->at, p->captured, frame);
    int64_t distance = (int32_t)(sequence + p->length - (h->start + (u32)h->next));
    if (p->flags & (FIN | RST) && h->is_known && distance >= 0 && distance <= FAR
        && !(p->flags & RST && distance)) {
        h->has_end = 1;
        h->end = h->next + (u64)distance;
    }
    look_at_ends(t, c, frame);
}

static int new_batch(tracker *t)
{
    if (t->busy) {
        PyErr_SetString(PyExc_ValueError, "it is fed by another thread");
        return 0;
    }
    if (t->failed) {
        PyErr_NoMemory();
        return 0;
    }
    t->busy = 1;
    t->extents.size = t->opened.size = t->closed.size = 0;
    if (t->spill.room > 1 << 20)
        drop(&t->spill); /* a rare need does not hold memory for ever */
    t->spill.size = 0;
    return 1;
}

typedef struct { u32 stream, used; u64 first, count; } group_row;

static group_row *group_of(group_row *groups, u32 mask, u32 stream)
{
    u32 i = stream * 0x9e3779b1u & mask;
    while (groups[i].used && groups[i].stream != stream)
        i = (i + 1) & mask;
    groups[i].used = 1;
    groups[i].stream = stream;
    return groups + i;
}

/* The extents of each stream together, in their order; `out` gets stream, first, stop. */
static int sort(tracker *t, vector *sorted, vector *out)
{
    const extent_row *rows = (const extent_row *)t->extents.bytes;
    size_t count = t->extents.size / sizeof *rows;
    u32 room = 16;
    while (room < 2 * count && room < 4 * (u32)t->room)
        room *= 2; /* at most two streams per connection, and some that were replaced */
    if (room < 2 * count && t->closed.size)
        while (room < 2 * count && room < 1u << 31)
            room *= 2;
    group_row *groups = calloc(room, sizeof *groups), *group = NULL;
    extent_row *to = more(sorted, count * sizeof *to);
    int done = groups && (to || !count);
    for (size_t i = 0; done && i < count; i++) {
        if (!group || group->stream != rows[i].stream)
            group = group_of(groups, room - 1, rows[i].stream);
        group->count++;
    }
    u64 first = 0;
    for (u32 i = 0; done && i < room; i++) {
        if (!groups[i].used)
            continue;
        u64 *row = more(out, 24);
        done = row != NULL;
        if (row) {
            row[0] = groups[i].stream;
            row[1] = groups[i].first = first;
            row[2] = first += groups[i].count;
        }
    }
    group = NULL;
    for (size_t i = 0; done && i < count; i++) {
        if (!group || group->stream != rows[i].stream)
            group = group_of(groups, room - 1, rows[i].stream);
        to[group->first++] = rows[i];
    }
    free(groups);
    return done;
}

static PyObject *end_batch(tracker *t)
{
    vector sorted = {0}, groups = {0};
    PyObject *result = NULL;
    if (!t->failed)
        t->failed = !sort(t, &sorted, &groups);
    t->busy = 0;
    if (t->failed)
        PyErr_NoMemory();
    else
        result = Py_BuildValue("NNNNN", bytes_of(&sorted), bytes_of(&groups), bytes_of(&t->spill),
                               bytes_of(&t->opened), bytes_of(&t->closed));
    drop(&sorted);
    drop(&groups);
    return result;
}

static PyObject *tracker_feed(tracker *t, PyObject *args)
{
    Py_buffer table, data;
    unsigned long long first;
    if (!PyArg_ParseTuple(args, "y*y*K", &table, &data, &first))
        return NULL;
    Py_ssize_t rows = rows_in(&table, sizeof(packet_row));
    PyObject *result = NULL;
    if (rows >= 0 && new_batch(t)) {
        Py_BEGIN_ALLOW_THREADS
        const packet_row *p = table.buf;
        for (Py_ssize_t i = 0; i < rows && !t->failed; i++)
            take(t, p + i, data.buf, (u64)data.len, first);
        Py_END_ALLOW_THREADS
        result = end_batch(t);
    }
    PyBuffer_Release(&table);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *tracker_flush(tracker *t, PyObject *args)
{
    int final;
    if (!PyArg_ParseTuple(args, "p", &final) || !new_batch(t))
        return NULL;
    for (int i = 0; i < t->used; i++) {
        for (int side = 0; side < 2; side++) {
            half *h = t->connections[i].half + side;
            while (final && h->head < h->tail)
                give_up(t, h, 0);
            if (!h->is_ignored)
                resign(t, h, 0);
        }
        look_at_ends(t, t->connections + i, 0);
    }
    return end_batch(t);
}

static PyObject *tracker_ignore(tracker *t, PyObject *args)
{
    unsigned int stream;
    if (!PyArg_ParseTuple(args, "I", &stream))
        return NULL;
    for (int i = 0; i < t->used; i++) {
        for (int side = 0; side < 2; side++) {
            half *h = t->connections[i].half + side;
            if (h->stream == stream && !h->is_ignored) {
                forget_late(t, h);
                h->is_ignored = 1;
            }
        }
    }
    Py_RETURN_NONE;
}

static PyObject *tracker_counts(tracker *t, PyObject *Py_UNUSED(none))
{
    PyObject *counts = PyDict_New();
    for (int i = 0; counts && i < COUNTS; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(t->count[i]);
        if (!number || PyDict_SetItemString(counts, COUNT_NAMES[i], number) < 0)
            Py_CLEAR(counts);
        Py_XDECREF(number);
    }
    return counts;
}

static PyObject *tracker_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    int room, checks;
    unsigned long long most_half, most_all, patience;
    if (!PyArg_ParseTuple(args, "iKKKp", &room, &most_half, &most_all, &patience, &checks))
        return NULL;
    if (room < 1 || room > 1 << 20 || most_half > FAR) {
        PyErr_SetString(PyExc_ValueError, "bounds out of range");
        return NULL;
    }
    tracker *t = (tracker *)type->tp_alloc(type, 0);
    if (!t)
        return NULL;
    u32 buckets = 1;
    while (buckets < 2 * (u32)room)
        buckets *= 2;
    t->connections = calloc((size_t)room, sizeof *t->connections);
    t->buckets = malloc(buckets * sizeof *t->buckets);
    if (!t->connections || !t->buckets) {
        Py_DECREF(t);
        return PyErr_NoMemory();
    }
    for (u32 i = 0; i < buckets; i++)
        t->buckets[i] = -1;
    t->room = room;
    t->mask = buckets - 1;
    t->most_half = most_half;
    t->most_all = most_all;
    t->patience = patience;
    t->checks = checks;
    return (PyObject *)t;
}

static void tracker_dealloc(tracker *t)
{
    for (int i = 0; i < t->used; i++) {
        forget_late(t, t->connections[i].half);
        forget_late(t, t->connections[i].half + 1);
    }
    free(t->connections);
    free(t->buckets);
    drop(&t->extents);
    drop(&t->spill);
    drop(&t->opened);
    drop(&t->closed);
    PyTypeObject *type = Py_TYPE(t);
    type->tp_free(t);
    Py_DECREF(type);
}

static PyMethodDef tracker_methods[] = {
    {"feed", (PyCFunction)tracker_feed, METH_VARARGS, NULL},
    {"flush", (PyCFunction)tracker_flush, METH_VARARGS, NULL},
    {"ignore", (PyCFunction)tracker_ignore, METH_VARARGS, NULL},
    {"counts", (PyCFunction)tracker_counts, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tracker_slots[] = {
    {Py_tp_new, tracker_new},
    {Py_tp_dealloc, tracker_dealloc},
    {Py_tp_methods, tracker_methods},
    {0, NULL},
};

static PyType_Spec tracker_spec = {"everystep.tap._tcp.Tracker", sizeof(tracker), 0,
                                   Py_TPFLAGS_DEFAULT, tracker_slots};

/* ------------------------------------------------------------------ gloo's preambles */

#define PREAMBLE 48
#define MOST_LENGTH ((u64)1 << 40)

static inline u64 get64(const u8 *p)
{
    u64 x = 0;
    for (int i = 7; i >= 0; i--)
        x = x << 8 | p[i];
    return x;
}

/* Six little-endian u64: nbytes, opcode, slot, offset, length, roffset. This one may follow the
operation before it. */
static int may_follow(const u8 *p)
{
    u64 opcode = get64(p + 8), length = get64(p + 32);
    return opcode <= 3 && length <= MOST_LENGTH
           && get64(p) == PREAMBLE + (opcode <= 1 ? length : 0);
}

/* This one is one wherever it stands. */
static int is_preamble(const u8 *p)
{
    return !get64(p + 24) && !get64(p + 40) && p[8] && p[23] >= 1 && p[23] <= 8 && may_follow(p);
}

typedef struct {
    u64 position; /* of the next preamble; hunting: of the first byte of the carry */
    int hunting;
    u32 have;
    u8 carry[PREAMBLE];
    vector marks;
    int failed;
} walk;

static void mark(walk *w, u32 kind, u64 position, u64 frame)
{
    mark_row *row = more(&w->marks, sizeof *row);
    if (!row) {
        w->failed = 1;
        return;
    }
    *row = (mark_row){position, 0, 0, frame, 0, kind};
    if (kind == HEADER) {
        row->length = get64(w->carry + 32);
        row->slot = get64(w->carry + 16);
        row->opcode = (u32)get64(w->carry + 8);
    }
}

static void lose_track(walk *w, u32 kind, u64 at, u64 from, u64 frame)
{
    mark(w, kind, at, frame);
    w->hunting = 1;
    w->position = from;
    w->have = 0;
}

/* Look for a preamble that ends in these bytes, which begin at `a`. */
static void hunt(walk *w, const u8 *bytes, u64 length, u64 a, u64 frame)
{
    u8 seam[2 * PREAMBLE];
    u32 have = w->have, joined = have + (u32)(length < PREAMBLE - 1 ? length : PREAMBLE - 1);
    memcpy(seam, w->carry, have);
    memcpy(seam + have, bytes, joined - have);
    for (u32 i = 0; i < have && i + PREAMBLE <= joined; i++) {
        if (is_preamble(seam + i)) {
            w->hunting = 0;
            w->position = a - have + i;
            w->have = have - i;
            memcpy(w->carry, seam + i, w->have);
            mark(w, RESYNC, w->position, frame);
            return;
        }
    }
    for (u64 i = 0; i + PREAMBLE <= length; i++) {
        if (is_preamble(bytes + i)) {
            w->hunting = 0;
            w->position = a + i;
            w->have = 0;
            mark(w, RESYNC, w->position, frame);
            return;
        }
    }
    if (length >= PREAMBLE - 1) {
        w->have = PREAMBLE - 1;
        memcpy(w->carry, bytes + length - w->have, w->have);
    } else {
        w->have = joined < PREAMBLE - 1 ? joined : PREAMBLE - 1;
        memcpy(w->carry, seam + joined - w->have, w->have);
    }
    w->position = a + length - w->have;
}

static void walk_data(walk *w, const u8 *bytes, u64 length, u64 a, u64 frame)
{
    u64 b = a + length;
    while (!w->failed) {
        if (w->hunting) {
            u64 from = w->position + w->have; /* later than `a` after a wrong preamble */
            if (from >= b)
                return;
            hunt(w, bytes + (from - a), b - from, from, frame);
            if (w->hunting)
                return;
        }
        u64 from = w->position + w->have;
        if (from >= b)
            return;
        u64 n = b - from < PREAMBLE - w->have ? b - from : PREAMBLE - w->have;
        memcpy(w->carry + w->have, bytes + (from - a), n);
        w->have += (u32)n;
        if (w->have < PREAMBLE)
            return;
        if (may_follow(w->carry)) {
            mark(w, HEADER, w->position, frame);
            w->position += get64(w->carry);
            w->have = 0;
        } else {
            lose_track(w, WRONG, w->position, from + n, frame);
        }
    }
}

static int walk_row(walk *w, const extent_row *e, const Py_buffer *data, const Py_buffer *spill)
{
    u64 stop = e->position + e->length;
    const Py_buffer *source = e->kind == DATA ? data : spill;
    switch (e->kind) {
    case DATA:
    case SPILLED:
        if (e->at > (u64)source->len || e->length > (u64)source->len - e->at)
            return 0;
        if (w->position + w->have < e->position) /* rows must continue each other */
            return 0;
        walk_data(w, (const u8 *)source->buf + e->at, e->length, e->position, e->frame);
        return 1;
    case LOST:
        if (w->hunting) {
            w->position = stop;
            w->have = 0;
        } else if (stop > w->position) {
            lose_track(w, SKIPPED, w->position, stop, e->frame);
        }
        return 1;
    case BROKEN:
        lose_track(w, SKIPPED, e->position, e->position, e->frame);
        return 1;
    default:
        return 1;
    }
}

static PyObject *tcp_walk(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer table, data, spill, carry;
    unsigned long long position;
    int hunting;
    if (!PyArg_ParseTuple(args, "y*y*y*Kpy*", &table, &data, &spill, &position, &hunting, &carry))
        return NULL;
    walk w = {.position = position, .hunting = hunting};
    Py_ssize_t rows = rows_in(&table, sizeof(extent_row)), i = 0;
    PyObject *result = NULL;
    if (rows >= 0 && carry.len < PREAMBLE && position < (u64)1 << 62) {
        w.have = (u32)carry.len;
        memcpy(w.carry, carry.buf, w.have);
        Py_BEGIN_ALLOW_THREADS
        const extent_row *e = table.buf;
        while (i < rows && !w.failed && walk_row(&w, e + i, &data, &spill))
            i++;
        Py_END_ALLOW_THREADS
    }
    if (w.failed)
        PyErr_NoMemory();
    else if (i < rows)
        PyErr_SetString(PyExc_ValueError, "extents that do not fit");
    else if (!PyErr_Occurred())
        result = Py_BuildValue("NKNy#", bytes_of(&w.marks), (unsigned long long)w.position,
                               PyBool_FromLong(w.hunting), (char *)w.carry, (Py_ssize_t)w.have);
    drop(&w.marks);
    PyBuffer_Release(&table);
    PyBuffer_Release(&data);
    PyBuffer_Release(&spill);
    PyBuffer_Release(&carry);
    return result;
}

/* ------------------------------------------------------------------ pieces */

/* The parts of extents that lie in bodies; both are in the order of their positions. */
static int cut(const extent_row *e, Py_ssize_t extents, const body_row *b, Py_ssize_t bodies,
               vector *out)
{
    Py_ssize_t i = 0, j = 0;
    while (i < extents && j < bodies) {
        u64 stop = e[i].position + e[i].length;
        if (e[i].kind > SPILLED || stop <= b[j].position) {
            i++;
            continue;
        }
        u64 from = e[i].position > b[j].position ? e[i].position : b[j].position;
        u64 to = stop < b[j].stop ? stop : b[j].stop;
        if (from < to) {
            scatter_row *row = more(out, sizeof *row);
            if (!row)
                return 0;
            *row = (scatter_row){(u64)b[j].start + (from - b[j].position),
                                 e[i].at + (from - e[i].position), to - from, e[i].frame,
                                 b[j].collective, e[i].stream, e[i].kind};
        }
        if (b[j].stop <= stop)
            j++;
        else
            i++;
    }
    return 1;
}

static PyObject *tcp_cut(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer extents, bodies;
    if (!PyArg_ParseTuple(args, "y*y*", &extents, &bodies))
        return NULL;
    Py_ssize_t rows = rows_in(&extents, sizeof(extent_row));
    Py_ssize_t count = rows < 0 ? -1 : rows_in(&bodies, sizeof(body_row));
    PyObject *result = NULL;
    vector out = {0};
    if (count >= 0)
        result = cut(extents.buf, rows, bodies.buf, count, &out) ? bytes_of(&out) : PyErr_NoMemory();
    drop(&out);
    PyBuffer_Release(&extents);
    PyBuffer_Release(&bodies);
    return result;
}

/* ------------------------------------------------------------------ places */

/* One bit per byte of a buffer. */
static inline int bit(const u64 *bits, u64 at) { return (int)(bits[at / 64] >> (at % 64) & 1); }

/* Where the run of bits like the one at `at` ends; at most `stop`. */
static u64 run_end(const u64 *bits, u64 at, u64 stop, int value)
{
    u64 flip = value ? ~(u64)0 : 0;
    while (at < stop) {
        u64 other = (bits[at / 64] ^ flip) >> (at % 64);
        if (other) {
            at += (u64)__builtin_ctzll(other);
            return at < stop ? at : stop;
        }
        at = (at / 64 + 1) * 64;
    }
    return stop;
}

static void put_bits(u64 *bits, u64 at, u64 stop, int value)
{
    while (at < stop) {
        u64 next = (at / 64 + 1) * 64, count = (next < stop ? next : stop) - at;
        u64 mask = (count == 64 ? ~(u64)0 : ((u64)1 << count) - 1) << (at % 64);
        if (value)
            bits[at / 64] |= mask;
        else
            bits[at / 64] &= ~mask;
        at += count;
    }
}

typedef struct { u8 *to; u64 *bits; u64 size, fresh; vector sources, mismatches; } placing;

#define STREAMED ((u64)4 << 20) /* a buffer of so many bytes would push all else out of the cache */

/* Past the cache, where that helps: no line of `to` is read before it is overwritten. */
static void copy(u8 *to, const u8 *from, u64 length, int streamed)
{
#ifdef __SSE2__
    if (streamed && length >= 512) {
        u64 head = -(uintptr_t)to & 63;
        memcpy(to, from, head);
        to += head, from += head, length -= head;
        for (; length >= 64; length -= 64, to += 64, from += 64) {
            const __m128i *f = (const __m128i *)from;
            __m128i *t = (__m128i *)to;
            __m128i a = _mm_loadu_si128(f), b = _mm_loadu_si128(f + 1);
            __m128i c = _mm_loadu_si128(f + 2), d = _mm_loadu_si128(f + 3);
            _mm_stream_si128(t, a);
            _mm_stream_si128(t + 1, b);
            _mm_stream_si128(t + 2, c);
            _mm_stream_si128(t + 3, d);
        }
    }
#else
    (void)streamed;
#endif
    memcpy(to, from, length);
}

static int put_row(placing *p, const scatter_row *r, const u8 *from)
{
    u64 at = r->start, stop = r->start + r->length;
    while (at < stop) {
        int there = bit(p->bits, at);
        u64 end = run_end(p->bits, at, stop, there);
        const u8 *source = from + (at - r->start);
        if (!there) {
            copy(p->to + at, source, end - at, p->size >= STREAMED);
            put_bits(p->bits, at, end, 1);
            p->fresh += end - at;
        } else if (memcmp(p->to + at, source, end - at)) {
            u64 first = at;
            while (p->to[first] == source[first - at])
                first++;
            mismatch_row *m = more(&p->mismatches, sizeof *m);
            if (!m)
                return 0;
            *m = (mismatch_row){r->start, first, end, r->frame, r->stream, 0};
        }
        at = end;
    }
    source_row *last = p->sources.size ? (source_row *)(p->sources.bytes + p->sources.size) - 1 : NULL;
    if (last && last->stop == r->start && last->stream == r->stream) {
        last->stop = stop;
        last->frame = r->frame;
        return 1;
    }
    source_row *row = more(&p->sources, sizeof *row);
    if (row)
        *row = (source_row){r->start, stop, r->frame, r->stream, 0};
    return row != NULL;
}

/* 1: done; 0: no memory; -1: a row that does not fit. */
static int put_rows(placing *p, const scatter_row *r, Py_ssize_t rows, const Py_buffer from[2])
{
    for (const scatter_row *end = r + rows; r < end; r++) {
        if (r->source > 1 || r->at > (u64)from[r->source].len
            || r->length > (u64)from[r->source].len - r->at || r->start > p->size
            || r->length > p->size - r->start)
            return -1;
        if (r + 1 < end && r[1].source < 2 && r[1].at < (u64)from[r[1].source].len)
            for (int i = 0; i < 8; i++) /* its beginning lies where no hardware looks ahead */
                __builtin_prefetch((const u8 *)from[r[1].source].buf + r[1].at + 64 * i);
        if (!put_row(p, r, (const u8 *)from[r->source].buf + r->at))
            return 0;
    }
    return 1;
}

static PyObject *tcp_place(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer table, from[2], to, bits;
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*", &table, from, from + 1, &to, &bits))
        return NULL;
    Py_ssize_t rows = rows_in(&table, sizeof(scatter_row));
    PyObject *result = NULL;
    placing p = {.to = to.buf, .bits = bits.buf, .size = (u64)to.len};
    int done = -1;
    if (rows >= 0 && rows_in(&bits, 8) >= 0 && bits.len / 8 >= to.len / 64 + (to.len % 64 != 0)) {
        Py_BEGIN_ALLOW_THREADS
        done = put_rows(&p, table.buf, rows, from);
#ifdef __SSE2__
        _mm_sfence();
#endif
        Py_END_ALLOW_THREADS
    }
    if (done > 0)
        result = Py_BuildValue("KNN", (unsigned long long)p.fresh, bytes_of(&p.sources),
                               bytes_of(&p.mismatches));
    else if (done == 0)
        PyErr_NoMemory();
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "pieces that do not fit");
    drop(&p.sources);
    drop(&p.mismatches);
    PyBuffer_Release(&table);
    PyBuffer_Release(from);
    PyBuffer_Release(from + 1);
    PyBuffer_Release(&to);
    PyBuffer_Release(&bits);
    return result;
}

static int is_range(const Py_buffer *bits, unsigned long long start, unsigned long long stop)
{
    if (rows_in(bits, 8) < 0)
        return 0;
    if (start <= stop && stop <= (u64)bits->len * 8)
        return 1;
    PyErr_SetString(PyExc_ValueError, "beyond the bits");
    return 0;
}

/* Runs of set bits before `stop`, as pairs of i64. */
static PyObject *tcp_runs(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer bits;
    unsigned long long stop;
    if (!PyArg_ParseTuple(args, "y*K", &bits, &stop))
        return NULL;
    PyObject *result = NULL;
    if (is_range(&bits, 0, stop)) {
        vector out = {0};
        int failed = 0;
        u64 at = run_end(bits.buf, 0, stop, 0);
        while (at < stop && !failed) {
            u64 *pair = more(&out, 16);
            failed = !pair;
            if (pair) {
                pair[0] = at;
                pair[1] = run_end(bits.buf, at, stop, 1);
                at = run_end(bits.buf, pair[1], stop, 0);
            }
        }
        result = failed ? PyErr_NoMemory() : bytes_of(&out);
        drop(&out);
    }
    PyBuffer_Release(&bits);
    return result;
}

/* How many bits were set before. */
static PyObject *tcp_clear(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer bits;
    unsigned long long start, stop, cleared = 0;
    if (!PyArg_ParseTuple(args, "w*KK", &bits, &start, &stop))
        return NULL;
    int fits = is_range(&bits, start, stop);
    if (fits) {
        for (u64 at = run_end(bits.buf, start, stop, 0); at < stop;) {
            u64 end = run_end(bits.buf, at, stop, 1);
            cleared += end - at;
            at = run_end(bits.buf, end, stop, 0);
        }
        put_bits(bits.buf, start, stop, 0);
    }
    PyBuffer_Release(&bits);
    return fits ? PyLong_FromUnsignedLongLong(cleared) : NULL;
}

static PyMethodDef methods[] = {
    {"walk", tcp_walk, METH_VARARGS, NULL},   {"cut", tcp_cut, METH_VARARGS, NULL},
    {"place", tcp_place, METH_VARARGS, NULL}, {"runs", tcp_runs, METH_VARARGS, NULL},
    {"clear", tcp_clear, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "everystep.tap._tcp", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tcp(void)
{
    PyObject *m = PyModule_Create(&module);
    PyObject *type = m ? PyType_FromSpec(&tracker_spec) : NULL;
    if (!type || PyModule_AddObject(m, "Tracker", type) < 0) {
        Py_XDECREF(type);
        Py_CLEAR(m);
    }
    return m;
}
