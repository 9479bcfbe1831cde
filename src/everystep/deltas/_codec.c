/* The loops over the elements of gradients, compiled; loops.py holds the same in NumPy.

Every function checks the lengths of the buffers that it is given and every position that it reads,
takes buffers of any alignment, and lets go of the interpreter lock while it runs. Numbers are
little-endian. How gaps are written is said in loops.py.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));
typedef int32_t i32 __attribute__((aligned(1), may_alias));
typedef int64_t i64 __attribute__((aligned(1), may_alias));
typedef struct { uint64_t low, high; } __attribute__((aligned(1), may_alias)) u128;

typedef u8 v8 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t v16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint32_t v32 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint64_t v64 __attribute__((vector_size(16), aligned(1), may_alias));

#define BLOCK_BYTES 64
#define ZEROED_BYTES 32768 /* stays in the cache until values are put into it */
#define PREFETCHED 32      /* elements ahead */

/* ------------------------------------------------------------------ gaps */

#define LEAST_2 240 /* the least gap that takes two bytes, … */
#define LEAST_3 3568
#define LEAST_4 69104
#define LEAST_7 16846320
#define FIRST_3 253 /* the first byte of a gap of three bytes, … */
#define FIRST_4 254
#define FIRST_7 255

/* Rare, so that the two functions below need not guess: no branch depends on one byte or two. */
static u8 *put_long(u8 *first, u8 *more, uint64_t gap)
{
    int length = gap < LEAST_4 ? 2 : gap < LEAST_7 ? 3 : 6;
    switch (length) {
    case 2: gap -= LEAST_3, *first = FIRST_3; break;
    case 3: gap -= LEAST_4, *first = FIRST_4; break;
    default: gap -= LEAST_7, *first = FIRST_7;
    }
    for (; length; length--, gap >>= 8)
        *more++ = (u8)gap;
    return more;
}

/* May write one byte more than it uses. */
static inline u8 *put_gap(u8 *first, u8 *more, uint64_t gap)
{
    if (__builtin_expect(gap >= LEAST_3, 0))
        return put_long(first, more, gap);
    uint64_t is_two = gap >= LEAST_2, beyond = gap - LEAST_2;
    *first = (u8)(is_two ? LEAST_2 + (beyond >> 8) : gap);
    *more = (u8)beyond;
    return more + is_two;
}

/* The bytes after the first ones. */
typedef struct { const u8 *bytes; Py_ssize_t length, used; } rest;

/* Where bytes are missing, a gap that no length holds. */
static int64_t get_long(u8 first, rest *more)
{
    int length = first == FIRST_3 ? 2 : first == FIRST_4 ? 3 : 6;
    int64_t gap = first == FIRST_3 ? LEAST_3 : first == FIRST_4 ? LEAST_4 : LEAST_7;
    if (more->length - more->used < length)
        return INT64_MAX;
    for (int i = 0; i < length; i++)
        gap += (int64_t)more->bytes[more->used++] << (8 * i);
    return gap;
}

/* Where bytes are missing, more->used grows beyond more->length, or as get_long. */
static inline int64_t get_gap(u8 first, rest *more)
{
    if (__builtin_expect(first >= FIRST_3, 0))
        return get_long(first, more);
    int is_two = first >= LEAST_2;
    int64_t low = more->used < more->length ? more->bytes[more->used] : 0;
    more->used += is_two;
    return is_two ? LEAST_2 + ((first - LEAST_2) << 8) + low : first;
}

/* At most so many bytes follow the first ones: a gap of n bytes is at least 240 (n - 1). One is to
spare. */
static Py_ssize_t most_more(Py_ssize_t count, Py_ssize_t length)
{
    Py_ssize_t by_length = length / LEAST_2;
    return (6 * count < by_length ? 6 * count : by_length) + 1;
}

/* ------------------------------------------------------------------ one set of loops per width */

#define ONE_WORD(value) (value)
#define TWO_WORDS(value) ((value).low | (value).high)

/* extract: -1 where there are not `count` of them. scatter: 0 where the gaps do not fit. */
#define LOOPS(BITS, TYPE, BITS_OF)                                                              \
static Py_ssize_t extract_##BITS(const TYPE *data, Py_ssize_t length, Py_ssize_t count,         \
                                 u8 *first, TYPE *values)                                       \
{                                                                                               \
    const Py_ssize_t step = BLOCK_BYTES / sizeof(TYPE);                                         \
    Py_ssize_t found = 0, next = 0;                                                             \
    u8 *more = first + count;                                                                   \
    for (Py_ssize_t block = 0; block < length; block += step) {                                 \
        Py_ssize_t inside = length - block < step ? length - block : step;                      \
        uint64_t mask = 0;                                                                      \
        if (inside == step) {                                                                   \
            const u64 *w = (const u64 *)(data + block);                                         \
            if (!(w[0] | w[1] | w[2] | w[3] | w[4] | w[5] | w[6] | w[7]))                       \
                continue;                                                                       \
            for (Py_ssize_t i = 0; i < step; i++)                                               \
                mask |= (uint64_t)(BITS_OF(data[block + i]) != 0) << i;                         \
        } else {                                                                                \
            for (Py_ssize_t i = 0; i < inside; i++)                                             \
                mask |= (uint64_t)(BITS_OF(data[block + i]) != 0) << i;                         \
        }                                                                                       \
        for (; mask; mask &= mask - 1) {                                                        \
            Py_ssize_t at = block + __builtin_ctzll(mask);                                      \
            if (found == count)                                                                 \
                return -1;                                                                      \
            values[found] = data[at];                                                           \
            more = put_gap(first + found++, more, (uint64_t)(at - next));                       \
            next = at + 1;                                                                      \
        }                                                                                       \
    }                                                                                           \
    return found == count ? more - first : -1;                                                  \
}                                                                                               \
static int scatter_##BITS(const u8 *first, Py_ssize_t count, rest more, const TYPE *values,     \
                          TYPE *to, Py_ssize_t length)                                          \
{                                                                                               \
    const Py_ssize_t ahead = ZEROED_BYTES / sizeof(TYPE);                                       \
    Py_ssize_t at = 0, zeroed = 0;                                                              \
    for (Py_ssize_t i = 0; i < count; i++) {                                                    \
        int64_t gap = get_gap(first[i], &more);                                                 \
        if (gap >= length - at)                                                                 \
            return 0;                                                                           \
        at += gap;                                                                              \
        if (__builtin_expect(at >= zeroed, 0)) {                                                \
            Py_ssize_t stop = length - at < ahead ? length : at + ahead;                        \
            memset(to + zeroed, 0, (stop - zeroed) * sizeof(TYPE));                             \
            zeroed = stop;                                                                      \
        }                                                                                       \
        to[at++] = values[i];                                                                   \
    }                                                                                           \
    memset(to + zeroed, 0, (length - zeroed) * sizeof(TYPE));                                   \
    return more.used == more.length;                                                            \
}                                                                                               \
static Py_ssize_t gather_##BITS(const TYPE *data, Py_ssize_t length, const u8 *indices,         \
                                Py_ssize_t index_bytes, Py_ssize_t count, TYPE *values)         \
{                                                                                               \
    for (Py_ssize_t i = 0; i < count; i++) {                                                    \
        int64_t at = index_bytes == 8 ? ((const i64 *)indices)[i] : ((const i32 *)indices)[i];  \
        Py_ssize_t soon = i + PREFETCHED < count ? i + PREFETCHED : i;                          \
        int64_t then = index_bytes == 8 ? ((const i64 *)indices)[soon]                          \
                                        : ((const i32 *)indices)[soon];                         \
        if (at < 0 || at >= length)                                                             \
            return -1;                                                                          \
        if (then >= 0 && then < length)                                                         \
            __builtin_prefetch(data + then);                                                    \
        values[i] = data[at];                                                                   \
    }                                                                                           \
    return count;                                                                               \
}

LOOPS(8, u8, ONE_WORD)
LOOPS(16, u16, ONE_WORD)
LOOPS(32, u32, ONE_WORD)
LOOPS(64, u64, ONE_WORD)
LOOPS(128, u128, TWO_WORDS)

/* How many are not zero. A lane counts at most 255 before it is emptied. */
#define COUNT(BITS, TYPE, VECTOR)                                                               \
static Py_ssize_t count_##BITS(const TYPE *data, Py_ssize_t length, uint32_t *seen)             \
{                                                                                               \
    const Py_ssize_t step = 16 / sizeof(TYPE);                                                  \
    Py_ssize_t found = 0, at = 0;                                                               \
    VECTOR all = {0};                                                                           \
    while (length - at >= step) {                                                               \
        Py_ssize_t stop = length - at < 255 * step ? length - step : at + 254 * step;           \
        VECTOR lanes = {0};                                                                     \
        for (; at <= stop; at += step) {                                                        \
            VECTOR values = *(const VECTOR *)(data + at);                                       \
            all |= values;                                                                      \
            lanes -= (VECTOR)(values != 0);                                                     \
        }                                                                                       \
        for (Py_ssize_t i = 0; i < step; i++)                                                   \
            found += (Py_ssize_t)lanes[i];                                                      \
    }                                                                                           \
    for (Py_ssize_t i = 0; i < step; i++)                                                       \
        *seen |= (uint32_t)all[i];                                                              \
    for (; at < length; at++) {                                                                 \
        found += data[at] != 0;                                                                 \
        *seen |= (uint32_t)data[at];                                                            \
    }                                                                                           \
    return found;                                                                               \
}

COUNT(8, u8, v8)
COUNT(16, u16, v16)
COUNT(32, u32, v32)
COUNT(64, u64, v64)

static Py_ssize_t count_128(const u128 *data, Py_ssize_t length, uint32_t *seen)
{
    Py_ssize_t found = 0;
    (void)seen;
    for (Py_ssize_t i = 0; i < length; i++)
        found += TWO_WORDS(data[i]) != 0;
    return found;
}

#define BY_WIDTH(width, CALL)                                                                   \
    switch (width) {                                                                            \
    case 1: CALL(8, u8); break;                                                                 \
    case 2: CALL(16, u16); break;                                                               \
    case 4: CALL(32, u32); break;                                                               \
    case 8: CALL(64, u64); break;                                                               \
    default: CALL(128, u128);                                                                   \
    }

static Py_ssize_t put_gaps(const u8 *indices, Py_ssize_t index_bytes, Py_ssize_t count,
                           int64_t start, int64_t stop, u8 *first)
{
    u8 *more = first + count;
    int64_t next = start;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t at = index_bytes == 8 ? ((const i64 *)indices)[i] : ((const i32 *)indices)[i];
        if (at < next || at >= stop)
            return -1;
        more = put_gap(first + i, more, (uint64_t)(at - next));
        next = at + 1;
    }
    return more - first;
}

static int get_positions(const u8 *first, Py_ssize_t count, rest more, int64_t limit, i64 *to)
{
    int64_t at = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t gap = get_gap(first[i], &more);
        if (gap >= limit - at)
            return 0;
        at += gap;
        to[i] = at++;
    }
    return more.used == more.length;
}

/* ------------------------------------------------------------------ narrow floating-point numbers */

/* The float16 number of the same value, by bits alone (a NaN keeps its payload); 0 if none is. */
static inline int half_of(uint32_t single, uint16_t *half)
{
    uint32_t sign = single >> 16 & 0x8000, exponent = single >> 23 & 255;
    uint32_t mantissa = single & 0x7fffff, lost = 0x1fff, bits;
    if (exponent > 112 && exponent < 143) {
        bits = (exponent - 112) << 10 | mantissa >> 13;
    } else if (exponent == 255) {
        bits = 0x7c00 | mantissa >> 13;
    } else if (exponent > 102 && exponent < 113) {
        mantissa |= 0x800000;
        lost = (1u << (126 - exponent)) - 1;
        bits = mantissa >> (126 - exponent);
    } else {
        lost = 0xffffffff;
        mantissa |= exponent;
        bits = 0;
    }
    *half = (uint16_t)(sign | bits);
    return !(mantissa & lost);
}

static inline uint32_t single_of(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31;
    uint32_t mantissa = half & 0x3ff;
    if (exponent == 31)
        return sign | 0x7f800000 | mantissa << 13;
    if (exponent)
        return sign | (exponent + 112) << 23 | mantissa << 13;
    if (!mantissa)
        return sign;
    uint32_t top = 31 - __builtin_clz(mantissa);
    return sign | (top + 103) << 23 | (mantissa << (23 - top) & 0x7fffff);
}

static int narrow_all(const u32 *data, Py_ssize_t length, int half, u16 *to)
{
    for (Py_ssize_t at = 0; at < length;) {
        Py_ssize_t stop = length - at < 4096 ? length : at + 4096;
        uint32_t lost = 0;
        if (half) {
            for (; at < stop; at++) {
                uint16_t bits;
                lost |= !half_of(data[at], &bits);
                to[at] = bits;
            }
        } else {
            for (; at < stop; at++) {
                lost |= data[at] & 0xffff;
                to[at] = (uint16_t)(data[at] >> 16);
            }
        }
        if (lost)
            return 0;
    }
    return 1;
}

static void widen_all(const u16 *data, Py_ssize_t length, int half, u32 *to)
{
    if (half)
        for (Py_ssize_t i = 0; i < length; i++)
            to[i] = single_of(data[i]);
    else
        for (Py_ssize_t i = 0; i < length; i++)
            to[i] = (uint32_t)data[i] << 16;
}

/* ------------------------------------------------------------------ what Python sees */

static int is_width(Py_ssize_t width)
{
    return width == 1 || width == 2 || width == 4 || width == 8 || width == 16;
}

static PyObject *release(Py_buffer *buffers, int count, PyObject *result)
{
    for (int i = 0; i < count; i++)
        PyBuffer_Release(buffers + i);
    return result;
}

static rest after(const Py_buffer *gaps, Py_ssize_t count)
{
    return (rest){(const u8 *)gaps->buf + count, gaps->len - count, 0};
}

static PyObject *refuse(void)
{
    PyErr_SetString(PyExc_ValueError, "the lengths of the buffers do not fit each other");
    return NULL;
}

static PyObject *survey(PyObject *module, PyObject *args)
{
    Py_buffer b[1];
    Py_ssize_t width, count = 0;
    uint32_t seen = 0;
    if (!PyArg_ParseTuple(args, "y*n", b, &width))
        return NULL;
    if (!is_width(width) || b[0].len % width)
        return release(b, 1, refuse());
    Py_BEGIN_ALLOW_THREADS
#define CALL(BITS, TYPE) count = count_##BITS((const TYPE *)b[0].buf, b[0].len / width, &seen)
    BY_WIDTH(width, CALL)
#undef CALL
    Py_END_ALLOW_THREADS
    return release(b, 1, Py_BuildValue("nk", count, (unsigned long)(width == 4 ? seen : 0)));
}

static PyObject *extract(PyObject *module, PyObject *args)
{
    Py_buffer b[3];
    Py_ssize_t width, length, count, used = -1;
    if (!PyArg_ParseTuple(args, "y*nw*w*", b, &width, b + 1, b + 2))
        return NULL;
    if (!is_width(width) || b[0].len % width || b[2].len % width)
        return release(b, 3, refuse());
    length = b[0].len / width, count = b[2].len / width;
    if (b[1].len < count || b[1].len - count < most_more(count, length))
        return release(b, 3, refuse());
    Py_BEGIN_ALLOW_THREADS
#define CALL(BITS, TYPE)                                                                        \
    used = extract_##BITS((const TYPE *)b[0].buf, length, count, b[1].buf, (TYPE *)b[2].buf)
    BY_WIDTH(width, CALL)
#undef CALL
    Py_END_ALLOW_THREADS
    return release(b, 3, PyLong_FromSsize_t(used));
}

static PyObject *gather(PyObject *module, PyObject *args)
{
    Py_buffer b[3];
    Py_ssize_t width, index_bytes, count, done = -1;
    if (!PyArg_ParseTuple(args, "y*ny*nw*", b, &width, b + 1, &index_bytes, b + 2))
        return NULL;
    if (!is_width(width) || b[0].len % width || b[2].len % width)
        return release(b, 3, refuse());
    count = b[2].len / width;
    if ((index_bytes != 4 && index_bytes != 8) || b[1].len % index_bytes
        || b[1].len / index_bytes != count)
        return release(b, 3, refuse());
    Py_BEGIN_ALLOW_THREADS
#define CALL(BITS, TYPE)                                                                        \
    done = gather_##BITS((const TYPE *)b[0].buf, b[0].len / width, b[1].buf, index_bytes,       \
                         count, (TYPE *)b[2].buf)
    BY_WIDTH(width, CALL)
#undef CALL
    Py_END_ALLOW_THREADS
    return release(b, 3, PyBool_FromLong(done == count));
}

static PyObject *gaps(PyObject *module, PyObject *args)
{
    Py_buffer b[2];
    Py_ssize_t index_bytes, start, stop, count, used;
    if (!PyArg_ParseTuple(args, "y*nnnw*", b, &index_bytes, &start, &stop, b + 1))
        return NULL;
    if ((index_bytes != 4 && index_bytes != 8) || b[0].len % index_bytes || start < 0
        || stop < start)
        return release(b, 2, refuse());
    count = b[0].len / index_bytes;
    if (b[1].len < count || b[1].len - count < most_more(count, stop - start))
        return release(b, 2, refuse());
    Py_BEGIN_ALLOW_THREADS
    used = put_gaps(b[0].buf, index_bytes, count, start, stop, b[1].buf);
    Py_END_ALLOW_THREADS
    return release(b, 2, PyLong_FromSsize_t(used));
}

static PyObject *positions(PyObject *module, PyObject *args)
{
    Py_buffer b[2];
    Py_ssize_t limit, count;
    int fits;
    if (!PyArg_ParseTuple(args, "y*nw*", b, &limit, b + 1))
        return NULL;
    count = b[1].len / 8;
    if (b[1].len % 8 || limit < 0 || b[0].len < count)
        return release(b, 2, refuse());
    Py_BEGIN_ALLOW_THREADS
    fits = get_positions(b[0].buf, count, after(b, count), limit, b[1].buf);
    Py_END_ALLOW_THREADS
    return release(b, 2, PyBool_FromLong(fits));
}

static PyObject *scatter(PyObject *module, PyObject *args)
{
    Py_buffer b[3];
    Py_ssize_t width, count;
    int fits = 0;
    if (!PyArg_ParseTuple(args, "y*y*nw*", b, b + 1, &width, b + 2))
        return NULL;
    if (!is_width(width) || b[1].len % width || b[2].len % width)
        return release(b, 3, refuse());
    count = b[1].len / width;
    if (b[0].len < count)
        return release(b, 3, refuse());
    Py_BEGIN_ALLOW_THREADS
#define CALL(BITS, TYPE)                                                                        \
    fits = scatter_##BITS(b[0].buf, count, after(b, count), (const TYPE *)b[1].buf,             \
                          (TYPE *)b[2].buf, b[2].len / width)
    BY_WIDTH(width, CALL)
#undef CALL
    Py_END_ALLOW_THREADS
    return release(b, 3, PyBool_FromLong(fits));
}

static PyObject *narrow(PyObject *module, PyObject *args)
{
    Py_buffer b[2];
    int half, exact;
    if (!PyArg_ParseTuple(args, "y*pw*", b, &half, b + 1))
        return NULL;
    if (b[0].len % 4 || b[1].len * 2 != b[0].len)
        return release(b, 2, refuse());
    Py_BEGIN_ALLOW_THREADS
    exact = narrow_all(b[0].buf, b[0].len / 4, half, b[1].buf);
    Py_END_ALLOW_THREADS
    return release(b, 2, PyBool_FromLong(exact));
}

static PyObject *widen(PyObject *module, PyObject *args)
{
    Py_buffer b[2];
    int half;
    if (!PyArg_ParseTuple(args, "y*pw*", b, &half, b + 1))
        return NULL;
    if (b[1].len % 4 || b[0].len * 2 != b[1].len)
        return release(b, 2, refuse());
    Py_BEGIN_ALLOW_THREADS
    widen_all(b[0].buf, b[0].len / 2, half, b[1].buf);
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    return release(b, 2, Py_None);
}

static PyMethodDef methods[] = {
    {"survey", survey, METH_VARARGS, NULL},       {"extract", extract, METH_VARARGS, NULL},
    {"gather", gather, METH_VARARGS, NULL},       {"gaps", gaps, METH_VARARGS, NULL},
    {"positions", positions, METH_VARARGS, NULL}, {"scatter", scatter, METH_VARARGS, NULL},
    {"narrow", narrow, METH_VARARGS, NULL},       {"widen", widen, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_codec", .m_methods = methods,
    .m_doc = "The loops over the elements of gradients; everystep.deltas.loops says what each does.",
};

PyMODINIT_FUNC PyInit__codec(void)
{
    return PyModule_Create(&definition);
}
