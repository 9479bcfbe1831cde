"""The layout of an all-reduce, found out from the lengths of its messages.

Nothing tells a listener how NCCL cut a buffer but the chunks themselves: all of a loop have one
size, but for the last, which is what is left, and those after it, which are empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from everystep.tap.schedule import (
    MAX_COUNT,
    Extent,
    Protocol,
    Schedule,
    Shape,
    ceil,
    data_bytes,
    interleaved,
    slice_elements,
    up,
    walk_interleaved,
    wire_bytes,
)


def inferred(
    shape: Shape,
    protocol: Protocol,
    ring_index: int,
    lengths: Sequence[Sequence[int | None]],
    max_chunk_bytes: int,
    *,
    contiguous: bool,
    count: int | None = None,
    is_fine: bool = False,
) -> set[Schedule]:
    """The all-reduces that may begin with messages of these lengths: more than one where the
    lengths do not tell how the buffer was cut.

    `lengths` has per channel the bytes on the wire, None where a message was not seen. Every chunk
    must be of the size of its loop, or the remainder. The size must be what NCCL chooses, unless
    `count`, the elements of the buffer, is known: then the chunks must add up to it. `is_fine`:
    chunks of contiguous parts are multiples of 16 bytes, as since 2.22.
    """
    loops = _loops(shape, protocol, ring_index, lengths, max_chunk_bytes // shape.element_bytes)
    if not loops:
        return set()
    most = max_chunk_bytes // shape.element_bytes
    # full loops alone may be an all-reduce only where its size is known: more may be part of it
    least = len(loops) if count is None else 1
    if count is not None and not contiguous:
        least = ceil(count, len(lengths) * shape.ranks * most)
        del loops[least:]
    for used in range(len(loops), least - 1, -1):
        if not contiguous:
            laid = _lay_interleaved(shape, protocol, loops[:used], most, count)
            found = set() if laid is None else {laid}
        else:
            grains = _grains(shape, protocol, is_fine=is_fine)
            if protocol == "LL128":
                found = _one_part(shape, loops[:used], most, count, grains)
            else:
                laid = _lay_contiguous(shape, protocol, loops[:used], most, count, grains)
                found = set() if laid is None else {laid}
        if found:
            return found
    return set()


Sizes = list[list[int | None]]
"""Elements per channel and chunk, of one loop; None where the messages of a chunk were lost."""


def _loops(
    shape: Shape,
    protocol: Protocol,
    ring_index: int,
    lengths: Sequence[Sequence[int | None]],
    largest: int,
) -> list[Sizes]:
    """The loops that the lengths could be, up to the first that is not full."""
    per_loop = shape.ring_steps * (2 if protocol == "Simple" else 1)
    loops: list[Sizes] = []
    for at in range(0, min(map(len, lengths)) - per_loop + 1, per_loop):
        sizes = [
            _chunks(shape, protocol, ring_index, channel[at : at + per_loop]) for channel in lengths
        ]
        whole = [chunks for chunks in sizes if chunks is not None]
        known = [size for chunks in whole for size in chunks if size is not None]
        if len(whole) < len(sizes) or max(known, default=0) not in range(1, largest + 1):
            break
        loops.append(whole)
        if min(known) < largest:
            break
    return loops


def _filled(sizes: Sequence[int | None], size: int) -> list[int] | None:
    """The sizes of neighbouring chunks: all full up to one that is shorter, and empty after it.

    None where it cannot be known how short a lost one was: the shorter one must have been seen.
    """
    if None in sizes and all(seen in (None, size) for seen in sizes):
        return None
    found: list[int] = []
    for place, seen in enumerate(sizes):
        rest = [other for other in sizes[place + 1 :] if other is not None]
        if seen is not None:
            found.append(seen)
        elif any(other > 0 for other in rest):
            found.append(size)
        elif found and found[-1] < size:
            found.append(0)
        else:
            return None
    return found


def _chunks(
    shape: Shape, protocol: Protocol, ring_index: int, lengths: Sequence[int | None]
) -> list[int | None] | None:
    """Elements of each chunk, from the messages of one channel in one loop."""
    e = shape.element_bytes
    found: dict[int, int] = {}
    for step in range(shape.ring_steps):
        if protocol == "Simple":
            first, second = lengths[2 * step : 2 * step + 2]
            if first is None or second is None:
                continue
            elements = (first + second) // e
            if first != min(slice_elements(elements, e), elements) * e:
                return None
        else:
            length = lengths[step]
            if length is None:
                continue
            if length % (16 if protocol == "LL" else 2048):
                return None
            elements = data_bytes(protocol, length) // e
        if found.setdefault(shape.chunk(ring_index, step), elements) != elements:
            return None
    return [found.get(chunk) for chunk in range(shape.ranks)]


def _lay_interleaved(
    shape: Shape, protocol: Protocol, loops: list[Sizes], largest: int, count: int | None
) -> Schedule | None:
    channels = len(loops[0])
    size = max(known for chunks in loops[-1] for known in chunks if known is not None)
    last = loops[-1]
    if protocol == "Simple":
        order = [last[b][c] for b in range(channels) for c in range(shape.ranks)]
    else:
        order = [last[b][c] for c in range(shape.ranks) for b in range(channels)]
    filled = _filled(order, size)
    if filled is None and count is None:
        return None
    total = count
    if total is None:
        seen = (len(loops) - 1) * channels * shape.ranks * largest + sum(filled or [])
        total = _trimmed(protocol, shape, seen)
    if total <= 0 or total > MAX_COUNT:
        return None
    for lawful in interleaved(shape, protocol, total, channels, largest * shape.element_bytes):
        if _agree(lawful, loops):
            return lawful
    if count is None or any(None in chunks for loop in loops for chunks in loop):
        return None
    rest = total - (len(loops) - 1) * channels * shape.ranks * largest
    if not _is_grained(shape, protocol, rest, channels, size, largest):
        return None
    sizes = [largest] * (len(loops) - 1) + [size]
    laid = walk_interleaved(shape, protocol, total, channels, largest, sizes)
    return laid if _agree(laid, loops) else None


def _is_grained(
    shape: Shape, protocol: Protocol, rest: int, channels: int, size: int, largest: int
) -> bool:
    """Whether any number of threads that NCCL may be set to use gives chunks of this size."""
    e = shape.element_bytes
    share = channels * shape.ranks
    for threads in range(32, 1025, 32):
        grain = threads * (60 // e) // 2 if protocol == "LL128" else threads * 8 // e
        if protocol == "Simple":
            lawful = up(min(largest, ceil(rest, share)), grain)
        else:
            lawful = min(largest, ceil(rest, share * grain) * grain)
        if size in (lawful, min(lawful, rest)):
            return True
    return False


def _lay_contiguous(
    shape: Shape,
    protocol: Protocol,
    loops: list[Sizes],
    largest: int,
    count: int | None,
    grains: set[int],
) -> Schedule | None:
    """NCCL 2.20 and later: channel after channel, each in loops of k*M elements."""
    owns = []
    for chunks in loops[-1]:
        filled = _filled(chunks, max((s for s in chunks if s is not None), default=0))
        if filled is None:
            return None
        owns.append((len(loops) - 1) * shape.ranks * largest + sum(filled))
    total = count if count is not None else _trimmed(protocol, shape, sum(owns))
    if total <= 0 or total > MAX_COUNT:
        return None
    channels = []
    at = 0
    for channel, own in enumerate(owns):
        part = [loop[channel] for loop in loops]
        if channel == len(owns) - 1:
            own = total - at
        size = max(known for known in part[-1] if known is not None)
        if count is None and all(known == largest for known in part[-1]):
            return None  # this channel may go on for another loop
        if not _is_cut(shape, own, size, len(part), largest, grains):
            return None
        sizes = [largest] * (len(part) - 1) + [size]
        walked = walk_interleaved(shape, "Simple", own, 1, largest, sizes) if own > 0 else None
        if walked is None:
            return None
        channels.append(
            tuple(tuple((at + a, at + b) for a, b in loop) for loop in walked.channels[0])
        )
        at += own
    laid = Schedule(shape, protocol, total, tuple(channels))
    return laid if at == total and _agree(laid, loops) else None


def _one_part(
    shape: Shape, loops: list[Sizes], largest: int, count: int | None, grains: set[int]
) -> set[Schedule]:
    """The same for LL128, which hides how long a part is: only a buffer of known size on one
    channel can be laid, by each known rule that gives what was seen."""
    if count is None or len(loops[0]) > 1:
        return set()
    rest = count - (len(loops) - 1) * shape.ranks * largest
    found: dict[tuple[Extent, ...], Schedule] = {}  # by what is not empty
    for grain in sorted(grains) if rest > 0 else ():
        sizes = [largest] * (len(loops) - 1) + [min(largest, up(ceil(rest, shape.ranks), grain))]
        laid = walk_interleaved(shape, "LL128", count, 1, largest, sizes)
        if _agree(laid, loops):
            chunks = [chunk for loop in laid.channels[0] for chunk in loop if chunk[0] < chunk[1]]
            found.setdefault(tuple(chunks), laid)
    return {*found.values()}


def _is_cut(shape: Shape, own: int, size: int, loops: int, largest: int, grains: set[int]) -> bool:
    """Whether a channel's part would be cut into chunks of this size, by any of the known rules."""
    rest = own - (loops - 1) * shape.ranks * largest
    lawful = [min(largest, up(ceil(rest, shape.ranks), grain)) for grain in grains]
    return size in lawful or (size == rest and any(law >= rest for law in lawful))


def _grains(shape: Shape, protocol: Protocol, *, is_fine: bool) -> set[int]:
    """Elements of which a chunk is a multiple: since 2.22 16 bytes, before by threads."""
    e = shape.element_bytes
    if is_fine:
        return {16 // e}
    if protocol == "Simple":
        return {16 // e, 4096 // e}
    unit, number = (8, 32) if protocol == "LL" else (480, 1)
    return {16 // e} | {unit * number * warps // e for warps in range(1, 33)}


def _trimmed(protocol: Protocol, shape: Shape, seen: int) -> int:
    """Elements that are there for certain: the tail of the last LL128 slice is undefined data.

    An LL line that is not full hides at most 7 bytes; it is taken as full.
    """
    if protocol == "LL128":
        return seen - 1920 // shape.element_bytes + 1
    return seen


def _agree(laid: Schedule, loops: list[Sizes]) -> bool:
    """Whether the chunks are the whole buffer, and on the wire as they were seen."""
    e = laid.shape.element_bytes
    extents = [chunk for loops_ in laid.channels for chunks in loops_ for chunk in chunks]
    if sum(stop - start for start, stop in extents) != laid.count:
        return False
    if any(len(parts) != len(loops) for parts in laid.channels):
        return False
    for channel, parts in enumerate(laid.channels):
        for loop, chunks in enumerate(parts):
            for (start, stop), seen in zip(chunks, loops[loop][channel], strict=True):
                if seen is None:
                    continue
                wire = wire_bytes(laid.protocol, (stop - start) * e)
                if wire != wire_bytes(laid.protocol, seen * e):
                    return False
    return True
