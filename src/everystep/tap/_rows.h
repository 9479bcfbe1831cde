/* The rows of pieces.py that more than one extension reads, and numbers in network order. */

#ifndef EVERYSTEP_TAP_ROWS_H
#define EVERYSTEP_TAP_ROWS_H

#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

typedef struct { u64 at; int64_t time_ns; u32 captured, length; } frame_row;

typedef struct {
    u64 at;
    u32 frame, length, captured, header, source, destination, sequence, acknowledgement;
    u16 source_port, destination_port, window;
    u8 flags, protocol;
} packet_row;

_Static_assert(sizeof(frame_row) == 24 && sizeof(packet_row) == 48, "rows have no holes");

static inline u32 big32(const u8 *p)
{
    return (u32)p[0] << 24 | (u32)p[1] << 16 | (u32)p[2] << 8 | p[3];
}

#endif
