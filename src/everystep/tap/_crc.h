/* CRC-32 (IEEE 802.3, as in zlib), by carry-less multiplication where the processor has it.

Source of the folding: Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
Instruction", Intel, 2009. Folding leaves 16 bytes that have the CRC of all that was folded; they and
what is shorter go through eight tables of 256 words.
*/

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint32_t crc_table[8][256];
static uint32_t crc_by_table(uint32_t crc, const uint8_t *p, size_t length)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; length >= 8; p += 8, length -= 8) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255]
            ^ crc_table[5][low >> 16 & 255] ^ crc_table[4][low >> 24]
            ^ crc_table[3][high & 255] ^ crc_table[2][high >> 8 & 255]
            ^ crc_table[1][high >> 16 & 255] ^ crc_table[0][high >> 24];
    }
    for (; length >= 4; p += 4, length -= 4) {
        uint32_t low;
        memcpy(&low, p, 4);
        low ^= crc;
        crc = crc_table[3][low & 255] ^ crc_table[2][low >> 8 & 255]
            ^ crc_table[1][low >> 16 & 255] ^ crc_table[0][low >> 24];
    }
#endif
    for (; length; p++, length--)
        crc = crc_table[0][(crc ^ *p) & 255] ^ crc >> 8;
    return crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

#define FOLDING __attribute__((target("pclmul,sse4.1")))
#define FOLDING_WIDE __attribute__((target("vpclmulqdq,pclmul,avx2")))

/* What brings 16 bytes forward by 16, 32, 64, 128 bytes. */
static __m128i crc_by_16, crc_by_32, crc_by_64, crc_by_128;

/* x^exponent modulo the polynomial, bits reversed. */
static uint64_t crc_power(int exponent)
{
    uint32_t power = 0x80000000;
    while (exponent--)
        power = power >> 1 ^ (power & 1 ? 0xedb88320 : 0);
    return power;
}

/* Section "Folding": x^(n+32) and x^(n-32), one bit up because the product of reversed numbers is
one bit short. */
static __m128i crc_forward(int nbytes)
{
    return _mm_set_epi64x((long long)(crc_power(8 * nbytes - 32) << 1),
                          (long long)(crc_power(8 * nbytes + 32) << 1));
}

FOLDING static inline __m128i crc_fold(__m128i value, __m128i by, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(value, by, 0x00);
    __m128i high = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

FOLDING static inline __m128i crc_load(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* `value` holds what came before `p`. */
FOLDING static uint32_t crc_end(__m128i value, const uint8_t *p, size_t length)
{
    uint8_t rest[16];
    for (; length >= 16; p += 16, length -= 16)
        value = crc_fold(value, crc_by_16, crc_load(p));
    _mm_storeu_si128((__m128i *)rest, value);
    return crc_by_table(crc_by_table(0, rest, 16), p, length);
}

/* The CRC state of `value`, then `p`. */
FOLDING static uint32_t crc_folded(__m128i value, const uint8_t *p, size_t length)
{
    if (length < 64)
        return crc_end(value, p, length);
    __m128i a = crc_fold(value, crc_by_16, crc_load(p));
    __m128i b = crc_load(p + 16), c = crc_load(p + 32), d = crc_load(p + 48);
    for (p += 64, length -= 64; length >= 64; p += 64, length -= 64) {
        a = crc_fold(a, crc_by_64, crc_load(p));
        b = crc_fold(b, crc_by_64, crc_load(p + 16));
        c = crc_fold(c, crc_by_64, crc_load(p + 32));
        d = crc_fold(d, crc_by_64, crc_load(p + 48));
    }
    a = crc_fold(a, crc_by_16, b);
    a = crc_fold(a, crc_by_16, c);
    a = crc_fold(a, crc_by_16, d);
    return crc_end(a, p, length);
}

FOLDING_WIDE static inline __m256i crc_fold_wide(__m256i value, __m256i by, __m256i next)
{
    __m256i low = _mm256_clmulepi64_epi128(value, by, 0x00);
    __m256i high = _mm256_clmulepi64_epi128(value, by, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

FOLDING_WIDE static inline __m256i crc_load_wide(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

FOLDING_WIDE static uint32_t crc_folded_wide(__m128i value, const uint8_t *p, size_t length)
{
    if (length < 128)
        return crc_folded(value, p, length);
    const __m256i by_128 = _mm256_broadcastsi128_si256(crc_by_128);
    const __m256i by_32 = _mm256_broadcastsi128_si256(crc_by_32);
    __m128i first = crc_fold(value, crc_by_16, crc_load(p));
    __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(first), crc_load(p + 16), 1);
    __m256i b = crc_load_wide(p + 32), c = crc_load_wide(p + 64), d = crc_load_wide(p + 96);
    for (p += 128, length -= 128; length >= 128; p += 128, length -= 128) {
        a = crc_fold_wide(a, by_128, crc_load_wide(p));
        b = crc_fold_wide(b, by_128, crc_load_wide(p + 32));
        c = crc_fold_wide(c, by_128, crc_load_wide(p + 64));
        d = crc_fold_wide(d, by_128, crc_load_wide(p + 96));
    }
    a = crc_fold_wide(a, by_32, b);
    a = crc_fold_wide(a, by_32, c);
    a = crc_fold_wide(a, by_32, d);
    for (; length >= 32; p += 32, length -= 32)
        a = crc_fold_wide(a, by_32, crc_load_wide(p));
    value = crc_fold(_mm256_castsi256_si128(a), crc_by_16, _mm256_extracti128_si256(a, 1));
    return crc_end(value, p, length);
}

enum { CRC_TABLES, CRC_NARROW, CRC_WIDE };

static int crc_best; /* of these, on this processor */

/* `head` is a multiple of 16 bytes. */
FOLDING static uint32_t crc_by_folding(const uint8_t *head, size_t head_length,
                                       const uint8_t *body, size_t length, int how)
{
    __m128i value = _mm_xor_si128(crc_load(head), _mm_cvtsi32_si128(-1));
    for (size_t at = 16; at < head_length; at += 16)
        value = crc_fold(value, crc_by_16, crc_load(head + at));
    return ~(how == CRC_WIDE ? crc_folded_wide(value, body, length)
                             : crc_folded(value, body, length));
}

static void crc_choose(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
        crc_best = CRC_NARROW;
    if (crc_best && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq"))
        crc_best = CRC_WIDE;
    crc_by_16 = crc_forward(16);
    crc_by_32 = crc_forward(32);
    crc_by_64 = crc_forward(64);
    crc_by_128 = crc_forward(128);
}
#else
enum { CRC_TABLES, crc_best = CRC_TABLES };
#define crc_by_folding(head, head_length, body, length, how) 0
#define crc_choose() ((void)0)
#endif

/* CRC-32 of two pieces, the second behind the first. */
static uint32_t crc_of(const uint8_t *head, size_t head_length, const uint8_t *body, size_t length,
                       int how)
{
    if (how != CRC_TABLES && head_length && head_length % 16 == 0)
        return crc_by_folding(head, head_length, body, length, how);
    return ~crc_by_table(crc_by_table(0xffffffff, head, head_length), body, length);
}

static void crc_begin(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
        crc_table[0][i] = crc;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++)
            crc_table[t][i] = crc_table[t - 1][i] >> 8 ^ crc_table[0][crc_table[t - 1][i] & 255];
    crc_choose();
}
