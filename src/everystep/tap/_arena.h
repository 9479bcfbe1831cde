/* Blocks of powers of two out of one piece of memory: a buddy allocator.

All books are kept outside of the memory itself, so that nothing is touched before it holds data.
*/

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define UNIT_BYTES 1024
#define ORDERS 32
#define NONE UINT32_MAX
#define IS_FREE 0x80

typedef struct {
    uint32_t units;
    uint32_t free_orders;    /* bit k: a block of 2^k units is free */
    uint32_t first[ORDERS];  /* the free blocks of each order, as a list */
    uint32_t *next, *before; /* per unit */
    uint8_t *state;          /* of the block that begins there: its order, and IS_FREE */
} arena;

static void arena_unlink(arena *a, uint32_t unit, int order)
{
    uint32_t next = a->next[unit], before = a->before[unit];
    if (before == NONE)
        a->first[order] = next;
    else
        a->next[before] = next;
    if (next != NONE)
        a->before[next] = before;
    if (a->first[order] == NONE)
        a->free_orders &= ~(1u << order);
    a->state[unit] = 0;
}

static void arena_link(arena *a, uint32_t unit, int order)
{
    a->next[unit] = a->first[order];
    a->before[unit] = NONE;
    if (a->first[order] != NONE)
        a->before[a->first[order]] = unit;
    a->first[order] = unit;
    a->free_orders |= 1u << order;
    a->state[unit] = (uint8_t)(order | IS_FREE);
}

static int arena_order(uint64_t nbytes)
{
    int order = 0;
    while ((uint64_t)UNIT_BYTES << order < nbytes)
        order++;
    return order;
}

/* The unit at which a block of 2^order units begins; NONE: there is none. */
static uint32_t arena_take(arena *a, int order)
{
    if (order >= ORDERS || !(a->free_orders >> order))
        return NONE;
    int found = order + __builtin_ctz(a->free_orders >> order);
    uint32_t unit = a->first[found];
    arena_unlink(a, unit, found);
    while (found > order) {
        found--;
        arena_link(a, unit + (1u << found), found);
    }
    a->state[unit] = (uint8_t)order;
    return unit;
}

static void arena_give(arena *a, uint32_t unit)
{
    int order = a->state[unit];
    for (; order < ORDERS - 1; order++) {
        uint32_t buddy = unit ^ 1u << order;
        if (buddy >= a->units || a->state[buddy] != (order | IS_FREE))
            break;
        arena_unlink(a, buddy, order);
        a->state[unit > buddy ? unit : buddy] = 0;
        unit &= ~(1u << order);
    }
    arena_link(a, unit, order);
}

/* `units` must be a power of two. */
static int arena_begin(arena *a, uint32_t units)
{
    a->units = units;
    a->free_orders = 0;
    for (int k = 0; k < ORDERS; k++)
        a->first[k] = NONE;
    a->next = malloc(units * sizeof *a->next);
    a->before = malloc(units * sizeof *a->before);
    a->state = calloc(units, 1);
    if (!a->next || !a->before || !a->state)
        return 0;
    arena_link(a, 0, __builtin_ctz(units));
    return 1;
}

static void arena_end(arena *a)
{
    free(a->next);
    free(a->before);
    free(a->state);
}
