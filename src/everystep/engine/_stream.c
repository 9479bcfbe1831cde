/* Copy memory past the cache, and hash it on the way.

A large copy whose target will not be read soon costs a third less memory traffic when its stores do
not first fetch the lines that they overwrite. The C library does so only for copies far larger
than a tensor. The hash is XXH3 (128 bits, seed 0) of inputs longer than 240 bytes, as its
specification says (Collet, doc/xxhash_spec.md of xxHash); each stretch is copied while it is in the
first cache. The interpreter lock is not held meanwhile.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

static void copy_streaming(char *to, const char *from, size_t count)
{
    size_t head = (16 - ((size_t)to & 15)) & 15;
    if (head > count)
        head = count;
    memcpy(to, from, head);
    to += head, from += head, count -= head;
    for (; count >= 64; to += 64, from += 64, count -= 64) {
        const __m128i *source = (const __m128i *)from;
        __m128i *target = (__m128i *)to;
        __m128i a = _mm_loadu_si128(source);
        __m128i b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2);
        __m128i d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(to, from, count);
}

static void copies_end(void)
{
    _mm_sfence();
}
#else
static void copy_streaming(char *to, const char *from, size_t count)
{
    memcpy(to, from, count);
}

static void copies_end(void)
{
}
#endif

static PyObject *copy(PyObject *module, PyObject *args)
{
    Py_ssize_t to, from, count;
    if (!PyArg_ParseTuple(args, "nnn", &to, &from, &count))
        return NULL;
    if (count < 0) {
        PyErr_SetString(PyExc_ValueError, "a negative number of bytes");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    copy_streaming((char *)to, (const char *)from, (size_t)count);
    copies_end();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

enum {
    LANES = 8,
    STRIPE = 64,          /* bytes */
    STRIPES = 16,         /* per block */
    BLOCK = 1024,         /* bytes */
    AT_ONCE = 16 * BLOCK, /* hashed, then copied */
    AHEAD = 1024,         /* of what is hashed, bytes are asked for */
    SHORTEST = 241,
};

static const uint32_t PRIME32_1 = 0x9e3779b1u, PRIME32_2 = 0x85ebca77u, PRIME32_3 = 0xc2b2ae3du;
static const uint64_t PRIME64_1 = 0x9e3779b185ebca87u, PRIME64_2 = 0xc2b2ae3d27d4eb4fu,
                      PRIME64_3 = 0x165667b19e3779f9u, PRIME64_4 = 0x85ebca77c2b2ae63u,
                      PRIME64_5 = 0x27d4eb2f165667c5u;

/* The specification's secret, as little-endian words. */
static const uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

static uint64_t secret_at(size_t offset)
{
    uint64_t word;
    memcpy(&word, (const char *)SECRET + offset, sizeof word);
    return word;
}

__attribute__((target("avx2"))) static inline void add_stripe(__m256i *sums, const char *from,
                                                              const char *secret)
{
    for (int half = 0; half < 2; half++) {
        __m256i data = _mm256_loadu_si256((const __m256i *)from + half);
        __m256i mixed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret + half));
        __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
        __m256i crossed = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
        sums[half] = _mm256_add_epi64(product, _mm256_add_epi64(sums[half], crossed));
    }
}

__attribute__((target("avx2"))) static inline void scramble(__m256i *sums)
{
    const char *secret = (const char *)SECRET + sizeof SECRET - STRIPE;
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    for (int half = 0; half < 2; half++) {
        __m256i mixed = _mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47));
        mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((const __m256i *)secret + half));
        __m256i low = _mm256_mul_epu32(mixed, prime);
        __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
        sums[half] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
}

__attribute__((target("avx2"))) static void sum_up(char *to, const char *from, size_t count,
                                                   uint64_t *lanes)
{
    const char *secret = (const char *)SECRET, *end = from + count;
    __m256i sums[2] = {
        _mm256_loadu_si256((const __m256i *)lanes),
        _mm256_loadu_si256((const __m256i *)lanes + 1),
    };
    size_t blocks = (count - 1) / BLOCK;
    const char *begun = from;
    for (size_t block = 0; block < blocks; block++) {
        for (int stripe = 0; stripe < STRIPES; stripe++, from += STRIPE) {
            _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
            add_stripe(sums, from, secret + 8 * stripe);
        }
        scramble(sums);
        if (to && (size_t)(from - begun) >= AT_ONCE) {
            copy_streaming(to, begun, (size_t)(from - begun));
            to += from - begun, begun = from;
        }
    }
    size_t left = (count - 1 - blocks * BLOCK) / STRIPE;
    for (size_t stripe = 0; stripe < left; stripe++, from += STRIPE)
        add_stripe(sums, from, secret + 8 * stripe);
    add_stripe(sums, end - STRIPE, secret + sizeof SECRET - STRIPE - 7);
    if (to) {
        copy_streaming(to, begun, (size_t)(end - begun));
        copies_end();
    }
    _mm256_storeu_si256((__m256i *)lanes, sums[0]);
    _mm256_storeu_si256((__m256i *)lanes + 1, sums[1]);
}

static uint64_t merged(const uint64_t *lanes, size_t offset, uint64_t sum)
{
    for (int pair = 0; pair < LANES / 2; pair++) {
        uint64_t one = lanes[2 * pair] ^ secret_at(offset + 16 * pair);
        uint64_t other = lanes[2 * pair + 1] ^ secret_at(offset + 16 * pair + 8);
        unsigned __int128 product = (unsigned __int128)one * other;
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= 0x165667919e3779f9u;
    return sum ^ sum >> 32;
}

static PyObject *digest(PyObject *module, PyObject *args)
{
    Py_ssize_t to, from, count;
    if (!PyArg_ParseTuple(args, "nnn", &to, &from, &count))
        return NULL;
    if (count < SHORTEST) {
        PyErr_SetString(PyExc_ValueError, "too few bytes");
        return NULL;
    }
    uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                             PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    Py_BEGIN_ALLOW_THREADS
    sum_up((char *)to, (const char *)from, (size_t)count, lanes);
    Py_END_ALLOW_THREADS
    uint64_t length = (uint64_t)count;
    uint64_t low = merged(lanes, 11, length * PRIME64_1);
    uint64_t high = merged(lanes, sizeof SECRET - STRIPE - 11, ~(length * PRIME64_2));
    char hex[33];
    snprintf(hex, sizeof hex, "%016llx%016llx", (unsigned long long)high, (unsigned long long)low);
    return PyUnicode_FromString(hex);
}

static int can_digest(void)
{
    return __builtin_cpu_supports("avx2");
}
#else
static PyObject *digest(PyObject *module, PyObject *args)
{
    PyErr_SetString(PyExc_NotImplementedError, "not for this processor");
    return NULL;
}

static int can_digest(void)
{
    return 0;
}
#endif

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(to, from, nbytes): copy between two addresses."},
    {"digest", digest, METH_VARARGS,
     "digest(to, from, nbytes): the hexadecimal xxh3-128 of more than 240 bytes, which are copied, "
     "too, unless `to` is 0."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_stream", "Copy and hash memory past the cache.", 0, methods,
};

PyMODINIT_FUNC PyInit__stream(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "can_digest", can_digest() ? Py_True : Py_False)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
