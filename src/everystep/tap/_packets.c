/* Frames of a capture, and the headers of Ethernet, VLAN, IPv4, IPv6, UDP and TCP.

Everything that is read may be hostile: every read is checked against the end of its buffer, no
length is believed before it is compared, and every loop moves on. Tables are those of pieces.py.
The interpreter lock is not held while a batch is read.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <linux/if_packet.h>
#include <stdint.h>
#include <string.h>

#include "_rows.h"

/* One interface of a pcapng section; ticks 0: its times cannot be told. */
typedef struct { u64 ticks_per_s; int64_t offset_s; u32 snap, ethernet; } interface_row;

_Static_assert(sizeof(interface_row) == 24, "rows have no holes");

static inline u16 big16(const u8 *p) { return (u16)(p[0] << 8 | p[1]); }
static inline u16 get16(const u8 *p, int big)
{
    return big ? big16(p) : (u16)(p[1] << 8 | p[0]);
}
static inline u32 get32(const u8 *p, int big)
{
    return big ? big32(p) : (u32)p[3] << 24 | (u32)p[2] << 16 | (u32)p[1] << 8 | p[0];
}

/* ------------------------------------------------------------------ files */

enum { FULL, END, CUT, ASK, BAD }; /* why an index stopped */

#define MOST_CAPTURED 0x1000000 /* bytes of one frame; any real one is far shorter */

typedef struct { const u8 *data; size_t size, at; frame_row *rows; size_t room, count; } index_state;

/* Each record tells where the next one is: without a guess, each would cost a wait for memory. Most
are as long as the one before. */
static inline void guess_next(const index_state *s, size_t stride)
{
    size_t guess = s->at + 8 * stride;
    if (guess < s->size) {
        __builtin_prefetch(s->data + guess);
        __builtin_prefetch(s->data + guess + 64);
    }
}

/* Records of a pcap file after its header. */
static int index_pcap(index_state *s, int big, u32 ns_per_tick, int ethernet)
{
    while (s->count < s->room) {
        size_t left = s->size - s->at;
        if (left == 0)
            return END;
        if (left < 16)
            return CUT;
        const u8 *p = s->data + s->at;
        u32 captured = get32(p + 8, big);
        if (captured > MOST_CAPTURED)
            return BAD;
        if (left - 16 < captured)
            return CUT;
        frame_row *row = s->rows + s->count++;
        row->at = s->at + 16;
        row->time_ns = (int64_t)get32(p, big) * 1000000000
                     + (int64_t)get32(p + 4, big) * ns_per_tick;
        row->captured = ethernet ? captured : 0;
        row->length = get32(p + 12, big);
        guess_next(s, 16 + (size_t)captured);
        s->at += 16 + (size_t)captured;
    }
    return FULL;
}

static int64_t time_of(u64 ticks, const interface_row *interface)
{
    if (!interface->ticks_per_s)
        return 0;
    u64 seconds = ticks / interface->ticks_per_s, rest = ticks % interface->ticks_per_s;
    u64 ns = (u64)((unsigned __int128)rest * 1000000000u / interface->ticks_per_s);
    return (int64_t)((seconds + (u64)interface->offset_s) * 1000000000u + ns);
}

#define SIMPLE_PACKET 3
#define OLD_PACKET 2
#define ENHANCED_PACKET 6
#define INTERFACE 1
#define SECTION 0x0a0d0d0a

/* One packet block of `length` bytes, header and trailer included. 0: it contradicts itself. */
static int packet_block(index_state *s, const u8 *p, u32 type, u32 length, int big,
                        const interface_row *interfaces, size_t interface_count)
{
    u32 fixed = type == SIMPLE_PACKET ? 4 : 20;
    if (length < 12 + fixed)
        return 0;
    u32 room = length - 12 - fixed, number = 0, captured, original;
    u64 ticks = 0;
    if (type == SIMPLE_PACKET) {
        captured = original = get32(p + 8, big);
    } else {
        number = type == OLD_PACKET ? get16(p + 8, big) : get32(p + 8, big);
        ticks = (u64)get32(p + 12, big) << 32 | get32(p + 16, big);
        captured = get32(p + 20, big);
        original = get32(p + 24, big);
    }
    if (number >= interface_count)
        return 0;
    const interface_row *interface = interfaces + number;
    if (type == SIMPLE_PACKET) {
        if (interface->snap && captured > interface->snap)
            captured = interface->snap;
    }
    if (captured > room)
        return 0;
    frame_row *row = s->rows + s->count++;
    row->at = s->at + 8 + fixed;
    row->time_ns = type == SIMPLE_PACKET ? 0 : time_of(ticks, interface);
    row->captured = interface->ethernet ? captured : 0;
    row->length = original;
    return 1;
}

/* Blocks of a pcapng file; ASK: at one that describes a section or an interface. */
static int index_pcapng(index_state *s, int big, const interface_row *interfaces,
                        size_t interface_count)
{
    while (s->count < s->room) {
        size_t left = s->size - s->at;
        if (left == 0)
            return END;
        if (left < 12)
            return CUT;
        const u8 *p = s->data + s->at;
        u32 type = get32(p, big), length = get32(p + 4, big);
        if (type == SECTION) /* reads the same in both byte orders; its length may not */
            return ASK;
        if (length < 12 || length & 3)
            return BAD;
        if (left < length)
            return CUT;
        if (get32(p + length - 4, big) != length)
            return BAD;
        if (type == INTERFACE)
            return ASK;
        if ((type == SIMPLE_PACKET || type == OLD_PACKET || type == ENHANCED_PACKET)
            && !packet_block(s, p, type, length, big, interfaces, interface_count))
            return BAD;
        guess_next(s, length);
        s->at += length;
    }
    return FULL;
}

static PyObject *index_answer(const index_state *s, int why)
{
    return Py_BuildValue("nni", (Py_ssize_t)s->at, (Py_ssize_t)s->count, why);
}

static int index_begin(index_state *s, Py_buffer *data, Py_ssize_t at, Py_buffer *rows)
{
    if (at < 0 || at > data->len || rows->len % (Py_ssize_t)sizeof(frame_row)) {
        PyErr_SetString(PyExc_ValueError, "an index out of its buffer");
        return 0;
    }
    *s = (index_state){data->buf, (size_t)data->len, (size_t)at, rows->buf,
                       (size_t)rows->len / sizeof(frame_row), 0};
    return 1;
}

static PyObject *pcap(PyObject *module, PyObject *args)
{
    Py_buffer data, rows;
    Py_ssize_t at;
    int big, ethernet;
    unsigned ns_per_tick;
    PyObject *answer = NULL;
    if (!PyArg_ParseTuple(args, "y*nw*pIp", &data, &at, &rows, &big, &ns_per_tick, &ethernet))
        return NULL;
    index_state s;
    if (index_begin(&s, &data, at, &rows)) {
        int why;
        Py_BEGIN_ALLOW_THREADS
        why = index_pcap(&s, big, ns_per_tick, ethernet);
        Py_END_ALLOW_THREADS
        answer = index_answer(&s, why);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&rows);
    return answer;
}

static PyObject *pcapng(PyObject *module, PyObject *args)
{
    Py_buffer data, rows, interfaces;
    Py_ssize_t at;
    int big;
    PyObject *answer = NULL;
    if (!PyArg_ParseTuple(args, "y*nw*py*", &data, &at, &rows, &big, &interfaces))
        return NULL;
    index_state s;
    if (index_begin(&s, &data, at, &rows)) {
        int why;
        Py_BEGIN_ALLOW_THREADS
        why = index_pcapng(&s, big, interfaces.buf,
                           (size_t)interfaces.len / sizeof(interface_row));
        Py_END_ALLOW_THREADS
        answer = index_answer(&s, why);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&interfaces);
    return answer;
}

/* ------------------------------------------------------------------ a block of the live ring */

static int is_block(const Py_buffer *ring, Py_ssize_t start, Py_ssize_t size)
{
    return start >= 0 && size >= (Py_ssize_t)sizeof(struct tpacket_block_desc)
        && start <= ring->len && size <= ring->len - start
        && ((size_t)ring->buf + (size_t)start) % 8 == 0;
}

/* Who owns a block: the kernel or us. */
static u32 *status_of(const Py_buffer *ring, Py_ssize_t start)
{
    return &((struct tpacket_block_desc *)((u8 *)ring->buf + start))->hdr.bh1.block_status;
}

/* The block begins at `start` of the ring; written by the kernel, and checked all the same. Gives
how many rows were filled. */
static size_t index_block(const u8 *ring, size_t start, size_t block_size, frame_row *rows,
                          size_t room)
{
    const u8 *block = ring + start;
    struct tpacket_block_desc desc;
    memcpy(&desc, block, sizeof desc);
    size_t at = desc.hdr.bh1.offset_to_first_pkt, count = 0;
    for (u32 i = 0; i < desc.hdr.bh1.num_pkts && count < room; i++) {
        struct tpacket3_hdr packet;
        if (at > block_size || block_size - at < sizeof packet)
            break;
        memcpy(&packet, block + at, sizeof packet);
        if (packet.tp_mac > block_size - at || packet.tp_snaplen > block_size - at - packet.tp_mac)
            break;
        rows[count++] = (frame_row){start + at + packet.tp_mac,
                                    (int64_t)packet.tp_sec * 1000000000 + packet.tp_nsec,
                                    packet.tp_snaplen, packet.tp_len};
        if (!packet.tp_next_offset)
            break;
        at += packet.tp_next_offset;
    }
    return count;
}

/* Count of frames; None: the block is still the kernel's. */
static PyObject *ring_block(PyObject *module, PyObject *args)
{
    Py_buffer ring, rows;
    Py_ssize_t start, size;
    PyObject *answer = NULL;
    if (!PyArg_ParseTuple(args, "y*nnw*", &ring, &start, &size, &rows))
        return NULL;
    if (!is_block(&ring, start, size)) {
        PyErr_SetString(PyExc_ValueError, "a block out of its ring");
    } else if (!(__atomic_load_n(status_of(&ring, start), __ATOMIC_ACQUIRE) & TP_STATUS_USER)) {
        answer = Py_NewRef(Py_None);
    } else {
        size_t count;
        Py_BEGIN_ALLOW_THREADS
        count = index_block(ring.buf, (size_t)start, (size_t)size, rows.buf,
                            (size_t)rows.len / sizeof(frame_row));
        Py_END_ALLOW_THREADS
        answer = PyLong_FromSize_t(count);
    }
    PyBuffer_Release(&ring);
    PyBuffer_Release(&rows);
    return answer;
}

static PyObject *release_block(PyObject *module, PyObject *args)
{
    Py_buffer ring;
    Py_ssize_t start, size;
    if (!PyArg_ParseTuple(args, "w*nn", &ring, &start, &size))
        return NULL;
    int fits = is_block(&ring, start, size);
    if (fits)
        __atomic_store_n(status_of(&ring, start), TP_STATUS_KERNEL, __ATOMIC_RELEASE);
    else
        PyErr_SetString(PyExc_ValueError, "a block out of its ring");
    PyBuffer_Release(&ring);
    return fits ? Py_NewRef(Py_None) : NULL;
}

/* ------------------------------------------------------------------ addresses */

#define MOST_ADDRESSES 65536
#define SLOTS (2 * MOST_ADDRESSES)
#define MOST_PROBES 64

typedef struct { u64 words[2]; u8 mac[6], is_ip6, was_source; } address;

enum { SHORT, OTHER, FRAGMENT, OTHER_PROTOCOL, MALFORMED, CROWDED, CUT_SHORT, COUNTS };

typedef struct {
    address list[MOST_ADDRESSES];
    u32 slots[SLOTS]; /* index into the list, plus 1 */
    u32 count;
    u64 seed;
    u64 counts[COUNTS];
} parser;

static inline u32 hash_of(const parser *state, const u64 words[2])
{
    u64 h = (words[0] ^ state->seed) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 29 ^ words[1]) * 0xbf58476d1ce4e5b9u;
    return (u32)(h >> 32);
}

/* Index of the address; -1: the table is full. */
static int64_t address_index(parser *state, const u64 words[2], int is_ip6, const u8 *mac,
                             int is_source)
{
    u32 slot = hash_of(state, words) % SLOTS;
    for (int probe = 0; probe < MOST_PROBES; probe++, slot = (slot + 1) % SLOTS) {
        u32 entry = state->slots[slot];
        if (!entry) {
            if (state->count == MOST_ADDRESSES)
                return -1;
            address *new = state->list + state->count;
            *new = (address){{words[0], words[1]}, {0}, (u8)is_ip6, (u8)is_source};
            memcpy(new->mac, mac, 6);
            state->slots[slot] = ++state->count;
            return state->count - 1;
        }
        address *known = state->list + entry - 1;
        if (known->words[0] == words[0] && known->words[1] == words[1]
            && known->is_ip6 == is_ip6) {
            if (is_source && !known->was_source) {
                known->was_source = 1;
                memcpy(known->mac, mac, 6);
            }
            return entry - 1;
        }
    }
    return -1;
}

/* ------------------------------------------------------------------ headers */

typedef struct { const u8 *bytes; size_t size; } span; /* what of a frame was captured */

/* What IP tells: where its header begins, where the next one begins, how long that part is. */
typedef struct { size_t at, next, length; u8 protocol, is_ip6; } ip_header;

static int ip4(span frame, ip_header *ip)
{
    if (frame.size - ip->at < 20)
        return SHORT;
    const u8 *p = frame.bytes + ip->at;
    size_t header = (size_t)(p[0] & 15) * 4, total = big16(p + 2);
    if (p[0] >> 4 != 4 || header < 20 || total < header)
        return MALFORMED;
    if (big16(p + 6) & 0x3fff) /* more fragments, or an offset */
        return FRAGMENT;
    if (frame.size - ip->at < header)
        return SHORT;
    ip->next = ip->at + header;
    ip->length = total - header;
    ip->protocol = p[9];
    return -1;
}

static int ip6(span frame, ip_header *ip)
{
    if (frame.size - ip->at < 40)
        return SHORT;
    const u8 *p = frame.bytes + ip->at;
    if (p[0] >> 4 != 6)
        return MALFORMED;
    ip->length = big16(p + 4);
    ip->next = ip->at + 40;
    ip->protocol = p[6];
    for (;;) {
        size_t extension;
        p = frame.bytes + ip->next;
        switch (ip->protocol) {
        case 0: case 43: case 60: case 135: case 139: case 140: case 44: case 51:
            break;
        default:
            return -1;
        }
        if (ip->length < 8)
            return MALFORMED;
        if (frame.size - ip->next < 8)
            return SHORT;
        if (ip->protocol == 44) {
            if (big16(p + 2) & 0xfff9)
                return FRAGMENT;
            extension = 8;
        } else {
            extension = ip->protocol == 51 ? ((size_t)p[1] + 2) * 4 : ((size_t)p[1] + 1) * 8;
        }
        if (extension > ip->length)
            return MALFORMED;
        if (extension > frame.size - ip->next)
            return SHORT;
        ip->protocol = p[0];
        ip->next += extension;
        ip->length -= extension;
    }
}

/* Ports, and for TCP the rest; gives the length of the header, or 0 for what is in *why. */
static size_t transport(span frame, const ip_header *ip, packet_row *row, int *why)
{
    const u8 *p = frame.bytes + ip->next;
    size_t captured = frame.size - ip->next, least = ip->protocol == 17 ? 8 : 20, header = 8;
    if (ip->length < least) {
        *why = MALFORMED;
        return 0;
    }
    if (captured < least) {
        *why = SHORT;
        return 0;
    }
    row->source_port = big16(p);
    row->destination_port = big16(p + 2);
    if (ip->protocol == 17) {
        size_t length = big16(p + 4);
        if (length < 8 || length > ip->length) {
            *why = MALFORMED;
            return 0;
        }
        row->sequence = row->acknowledgement = 0;
        row->flags = 0, row->window = 0;
        row->length = (u32)(length - 8);
    } else {
        header = (size_t)(p[12] >> 4) * 4;
        if (header < 20 || header > ip->length) {
            *why = MALFORMED;
            return 0;
        }
        if (captured < header) {
            *why = SHORT;
            return 0;
        }
        row->sequence = big32(p + 4);
        row->acknowledgement = big32(p + 8);
        row->flags = p[13];
        row->window = big16(p + 14);
        row->length = (u32)(ip->length - header);
    }
    return header;
}

static int addresses_of(parser *state, span frame, const ip_header *ip, packet_row *row)
{
    u64 from[2] = {0, 0}, to[2] = {0, 0};
    const u8 *p = frame.bytes + ip->at;
    size_t length = ip->is_ip6 ? 16 : 4;
    memcpy(from, p + (ip->is_ip6 ? 8 : 12), length);
    memcpy(to, p + (ip->is_ip6 ? 24 : 16), length);
    int64_t source = address_index(state, from, ip->is_ip6, frame.bytes + 6, 1);
    int64_t destination = address_index(state, to, ip->is_ip6, frame.bytes, 0);
    if (source < 0 || destination < 0)
        return 0;
    row->source = (u32)source;
    row->destination = (u32)destination;
    return 1;
}

/* -1: the row is filled; else why not. */
static int parse_frame(parser *state, span frame, packet_row *row)
{
    if (frame.size < 14)
        return SHORT;
    size_t at = 12;
    u16 type = big16(frame.bytes + at);
    while (type == 0x8100 || type == 0x88a8 || type == 0x9100) {
        at += 4;
        if (frame.size < at + 2)
            return SHORT;
        type = big16(frame.bytes + at);
    }
    if (type != 0x0800 && type != 0x86dd)
        return OTHER;
    ip_header ip = {.at = at + 2, .is_ip6 = type == 0x86dd};
    int why = ip.is_ip6 ? ip6(frame, &ip) : ip4(frame, &ip);
    if (why >= 0)
        return why;
    if (ip.protocol != 6 && ip.protocol != 17)
        return OTHER_PROTOCOL;
    size_t header = transport(frame, &ip, row, &why);
    if (!header)
        return why;
    if (!addresses_of(state, frame, &ip, row))
        return CROWDED;
    size_t payload = ip.next + header, captured = frame.size - payload;
    row->at = payload;
    row->captured = captured < row->length ? (u32)captured : row->length;
    row->header = (u32)(payload - ip.at);
    row->protocol = ip.protocol;
    return -1;
}

/* -1: a row of the table lies outside the data. */
static Py_ssize_t parse_frames(parser *state, const u8 *data, size_t size, const frame_row *frames,
                               size_t count, packet_row *rows)
{
    size_t filled = 0;
    for (size_t i = 0; i < count; i++) {
        frame_row frame = frames[i];
        if (frame.at > size || frame.captured > size - frame.at)
            return -1;
        if (i + 8 < count && frames[i + 8].at < size)
            __builtin_prefetch(data + frames[i + 8].at);
        packet_row *row = rows + filled;
        int why = parse_frame(state, (span){data + frame.at, frame.captured}, row);
        if (why >= 0) {
            state->counts[why]++;
            continue;
        }
        state->counts[CUT_SHORT] += row->captured < row->length;
        row->at += frame.at;
        row->frame = (u32)i;
        filled++;
    }
    return (Py_ssize_t)filled;
}

/* ------------------------------------------------------------------ the parser, for Python */

static void parser_free(PyObject *capsule)
{
    PyMem_RawFree(PyCapsule_GetPointer(capsule, "parser"));
}

static PyObject *new_parser(PyObject *module, PyObject *args)
{
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "K", &seed))
        return NULL;
    parser *state = PyMem_RawCalloc(1, sizeof *state);
    if (!state)
        return PyErr_NoMemory();
    state->seed = seed;
    PyObject *capsule = PyCapsule_New(state, "parser", parser_free);
    if (!capsule)
        PyMem_RawFree(state);
    return capsule;
}

static PyObject *parse(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    Py_buffer data, frames, rows;
    if (!PyArg_ParseTuple(args, "Oy*y*w*", &capsule, &data, &frames, &rows))
        return NULL;
    PyObject *answer = NULL;
    parser *state = PyCapsule_GetPointer(capsule, "parser");
    size_t count = (size_t)frames.len / sizeof(frame_row);
    if (state && ((size_t)frames.len % sizeof(frame_row) || count > UINT32_MAX
                  || (size_t)rows.len / sizeof(packet_row) < count)) {
        PyErr_SetString(PyExc_ValueError, "tables that do not fit");
    } else if (state) {
        Py_ssize_t filled;
        Py_BEGIN_ALLOW_THREADS
        filled = parse_frames(state, data.buf, (size_t)data.len, frames.buf, count, rows.buf);
        Py_END_ALLOW_THREADS
        if (filled < 0)
            PyErr_SetString(PyExc_ValueError, "a frame outside its data");
        else
            answer = PyLong_FromSsize_t(filled);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&frames);
    PyBuffer_Release(&rows);
    return answer;
}

static PyObject *counts(PyObject *module, PyObject *capsule)
{
    parser *state = PyCapsule_GetPointer(capsule, "parser");
    if (!state)
        return NULL;
    PyObject *list = PyList_New(COUNTS);
    for (int i = 0; list && i < COUNTS; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(state->counts[i]);
        if (!number)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    return list;
}

static PyObject *address_at(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "On", &capsule, &index))
        return NULL;
    parser *state = PyCapsule_GetPointer(capsule, "parser");
    if (!state)
        return NULL;
    if (index < 0 || index >= (Py_ssize_t)state->count) {
        PyErr_SetString(PyExc_IndexError, "no such address");
        return NULL;
    }
    const address *found = state->list + index;
    return Py_BuildValue("y#y#", (const char *)found->words, (Py_ssize_t)(found->is_ip6 ? 16 : 4),
                         (const char *)found->mac, (Py_ssize_t)6);
}

static PyObject *address_count(PyObject *module, PyObject *capsule)
{
    parser *state = PyCapsule_GetPointer(capsule, "parser");
    return state ? PyLong_FromUnsignedLong(state->count) : NULL;
}

static PyMethodDef methods[] = {
    {"pcap", pcap, METH_VARARGS,
     "pcap(data, at, rows, big, ns_per_tick, ethernet) -> (at, count, why)"},
    {"pcapng", pcapng, METH_VARARGS, "pcapng(data, at, rows, big, interfaces) -> (at, count, why)"},
    {"ring_block", ring_block, METH_VARARGS,
     "ring_block(ring, start, size, rows) -> count, or None while the kernel has the block"},
    {"release_block", release_block, METH_VARARGS, "release_block(ring, start, size)"},
    {"new_parser", new_parser, METH_VARARGS, "new_parser(seed) -> parser"},
    {"parse", parse, METH_VARARGS, "parse(parser, data, frames, rows) -> count"},
    {"counts", counts, METH_O, "counts(parser) -> what was skipped, by reason"},
    {"address_at", address_at, METH_VARARGS, "address_at(parser, index) -> (ip, mac)"},
    {"address_count", address_count, METH_O, "address_count(parser) -> number of addresses"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_packets", .m_doc = "Frames and headers.", .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__packets(void)
{
    return PyModule_Create(&definition);
}
