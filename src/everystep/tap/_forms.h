/* Payload put at its place: as it is, or without the flags of NCCL's LL and LL128 protocols. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { RAW, LL, LL128, FORMS };

#define LL_LINE 16
#define LL128_LINE 128
#define LL128_SLICE 2048
#define LL128_SLICE_DATA 1920

/* Where each u64 of a slice goes, in u64 of the slice's data; -1: it is a flag. */
static int16_t ll128_place[LL128_SLICE / 8];

static void forms_begin(void)
{
    for (int w = 0; w < LL128_SLICE / 8; w++) {
        int g = w / 64, lane = w / 2 % 32, b = w % 2, to;
        if (lane % 8 != 7)
            to = g % 2 ? 2 * (30 * (g - 1) + 32 + lane - lane / 8) + b : 2 * (30 * g + lane) + b;
        else if (b)
            to = -1;
        else
            to = g % 2 ? 2 * (30 * (g - 1) + lane) + 1 : 2 * (30 * g + lane);
        ll128_place[w] = (int16_t)to;
    }
}

/* Bytes that so many bytes of the wire become. */
static uint64_t placed_bytes(int form, uint64_t wire)
{
    switch (form) {
    case LL: return (wire + LL_LINE - 1) / LL_LINE * (LL_LINE / 2);
    case LL128: return (wire + LL128_SLICE - 1) / LL128_SLICE * LL128_SLICE_DATA;
    default: return wire;
    }
}

/* Lines of data, flag, data, flag. Gives whether every flag is `flag`. */
static int place_ll(uint8_t *to, const uint8_t *from, size_t length, uint32_t flag)
{
    size_t at = 0;
    uint32_t wrong = 0;
#if defined(__SSE2__)
    const __m128i expected = _mm_set1_epi32((int)flag);
    __m128i differs = _mm_setzero_si128();
    for (; length - at >= 32; at += 32) {
        __m128 first = _mm_loadu_ps((const float *)(from + at));
        __m128 second = _mm_loadu_ps((const float *)(from + at + 16));
        __m128i flags = _mm_castps_si128(_mm_shuffle_ps(first, second, _MM_SHUFFLE(3, 1, 3, 1)));
        _mm_storeu_ps((float *)(to + at / 2), _mm_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0)));
        differs = _mm_or_si128(differs, _mm_xor_si128(flags, expected));
    }
    wrong = _mm_movemask_epi8(_mm_cmpeq_epi32(differs, _mm_setzero_si128())) != 0xffff;
#endif
    for (; length - at >= LL_LINE; at += LL_LINE) {
        uint32_t line[4];
        memcpy(line, from + at, LL_LINE);
        wrong |= (line[1] ^ flag) | (line[3] ^ flag);
        line[1] = line[2];
        memcpy(to + at / 2, line, 8);
    }
    return !wrong;
}

/* `to` is where the message begins, `at` the offset of `from` on the wire. */
static int place_ll128(uint8_t *to, uint64_t at, const uint8_t *from, size_t length, uint64_t flag)
{
    uint64_t wrong = 0;
    for (size_t i = 0; i < length; i += 8) {
        uint64_t word, where = at + i;
        memcpy(&word, from + i, 8);
        int place = ll128_place[where % LL128_SLICE / 8];
        if (place < 0)
            wrong |= word ^ flag;
        else
            memcpy(to + where / LL128_SLICE * LL128_SLICE_DATA + (size_t)place * 8, &word, 8);
    }
    return !wrong;
}

/* The flag of the first line; 0 where there is no whole line. */
static uint64_t first_flag(int form, const uint8_t *from, size_t length)
{
    uint32_t narrow = 0;
    uint64_t wide = 0;
    if (form == LL && length >= LL_LINE)
        memcpy(&narrow, from + 4, 4), wide = narrow;
    else if (form == LL128 && length >= LL128_LINE)
        memcpy(&wide, from + LL128_LINE - 8, 8);
    return wide;
}

/* Put the bytes at offset `at` of a message's wire to their place; `to` is where its placed payload
begins, and must have room for them. Gives 0 where lines are cut or flags are not `flag`: then the
bytes that were written are of no use. */
static int place(int form, uint8_t *to, uint64_t at, const uint8_t *from, size_t length,
                 uint64_t flag)
{
    switch (form) {
    case LL:
        return !(length % LL_LINE || at % LL_LINE) && place_ll(to + at / 2, from, length, (uint32_t)flag);
    case LL128:
        return !(length % LL128_LINE || at % LL128_LINE) && place_ll128(to, at, from, length, flag);
    default:
        memcpy(to + at, from, length);
        return 1;
    }
}
