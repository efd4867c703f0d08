"""The kernels of softmax_topk in Triton. Importing it imports Triton.

Selecting is cheap because the softmax needs maxima anyway. Each of a tile's COLS slots sees every COLS-th column of
a part of the row, and keeps the largest of these: the k slots with the largest such elements hold the k largest
elements of all. So

* ``softmax_topk_scan`` reads the row once, PARTS programs a row, for maximum and sum (online softmax) and each
  slot's largest element, and passes on the KEEP largest of those;
* ``softmax_topk_pick`` chooses among them, reads the few slots that are left again, and chooses once more.

How much work that is doesn't depend on the values. Rows of one tile need the first kernel alone.

Elements are ordered by value and then by column, smallest first, and known by both: ``rank`` makes integers of
values that compare as they do. KEEP is k, rounded up to a power of two.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton knows no starred tuples)
import triton
import triton.language as tl

from .triton_kernels import (
    begin,
    clamp,
    columns,
    exp,
    find_lead,
    let_successor_start,
    load,
    locate,
    max_of_lines,
    merge,
    sum_of_lines,
    unpack,
)


@triton.jit
def flip(bits):
    """From a float's bits to an integer that compares as the float does, and back."""
    if bits.dtype == tl.int64:
        return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank(x):
    """An integer that compares as the float does, with -0.0 == 0.0."""
    INTEGER: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    return flip(tl.where(x == 0, 0.0, x).to(INTEGER, bitcast=True))


@triton.jit
def unrank(x):
    """The float of a rank."""
    return flip(x).to(tl.float64 if x.dtype == tl.int64 else tl.float32, bitcast=True)


@triton.jit
def nothing(ranks):
    """The rank of what doesn't exist, which is lower than that of any number."""
    return tl.full((1,), -0x8000000000000000 if ranks.dtype == tl.int64 else -0x80000000, ranks.dtype)


@triton.jit
def largest(ranks, cols, ROWS: tl.constexpr, KEEP: tl.constexpr):
    """The KEEP largest along the last axis, in order; of equal ones those with the lower column."""
    if ranks.dtype == tl.int32:
        keys = tl.topk((ranks.to(tl.int64) << 32) | (cols.to(tl.int64) ^ 0xFFFFFFFF), KEEP)
        return (keys >> 32).to(tl.int32), (keys.to(tl.int32)) ^ -1
    else:  # two don't fit in a key
        place = columns(KEEP, ROWS)
        found = tl.zeros((KEEP,) if ROWS == 1 else (ROWS, KEEP), ranks.dtype)
        found_cols = found.to(tl.int32)
        for i in range(KEEP):
            best = max_of_lines(ranks, ROWS)
            best_cols = tl.where(ranks == best, cols, 0x7FFFFFFF)
            col = tl.min(best_cols, 0) if ROWS == 1 else tl.min(best_cols, 1, keep_dims=True)
            found = tl.where(place == i, best, found)
            found_cols = tl.where(place == i, col, found_cols)
            ranks = tl.where((ranks == best) & (cols == col), nothing(ranks), ranks)
        return found, found_cols


@triton.jit
def write(
    out, indices, ranks, cols, maximum, total, k, inner, exists,
    ROWS: tl.constexpr, KEEP: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """A row's results, from its maximum and its sum of exponentials."""
    place = columns(KEEP, ROWS)
    mask = exists & (place < k)
    sound = total > 0
    result = exp(unrank(ranks) - maximum, PRECISE) * (1.0 / total)
    tl.store(out + place * inner, tl.where(sound, result, float("nan")), mask=mask)
    tl.store(indices + place * inner, tl.where(sound, cols, place).to(tl.int64), mask=mask)


@triton.jit
def share_of(end, COLS: tl.constexpr, PARTS: tl.constexpr):
    """Columns of a part: whole tiles."""
    return tl.cdiv(tl.cdiv(end, PARTS), COLS) * COLS


@triton.jit
def softmax_topk_scan(
    x, out, partials, indices, outer, cols, inner, x_outer, x_col, x_inner, k,
    WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr, VECTOR: tl.constexpr,
    PEEL: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of each part, and its KEEP slots with the largest elements; TILES tiles at a time.

    ``partials`` takes pairs: (rows, PARTS, 1 + KEEP, 2), maximum and sum, then ranks and columns. Without it the
    results are written: a tile is a row then.
    """
    PRECISE: tl.constexpr = out.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    LOWEST: tl.constexpr = -1.7976931348623157e308 if ACC == tl.float64 else -3.4028234663852886e38  # noqa: SIM300
    block, part = begin(PARTS, False, OVERLAP)
    o, i, exists = locate(block, outer, inner, ROWS, WITHIN)
    x_start = o * x_outer + i * x_inner
    x_row, _, lead = find_lead(x + x_start, x + x_start, VECTOR, PEEL)

    end = lead + cols
    share = share_of(end, COLS, PARTS)
    first = part * share
    count = clamp(end - first, share)
    x_part = x_row + first * x_col
    col = columns(COLS, ROWS)
    absent = tl.where(part == 0, lead, 0)  # columns before the row's start

    best = tl.full((COLS,) if ROWS == 1 else (ROWS, COLS), float("-inf"), ACC)
    best_tile = tl.zeros((COLS,) if ROWS == 1 else (ROWS, COLS), tl.int32)
    if PEEL:
        best_tile += (col < absent).to(tl.int32)
    totals = tl.zeros((COLS,) if ROWS == 1 else (ROWS, COLS), ACC)
    for at in range(0, count, COLS * TILES):
        floor = tl.maximum(best, LOWEST)
        higher = floor
        values = ()
        for tile in tl.static_range(TILES):
            from_here = at + tile * COLS
            left = clamp(count - from_here, COLS)
            mask = exists & (col < (tl.cdiv(left, VECTOR) * VECTOR if PEEL else left))
            read = unpack(load(x_part + (from_here + col) * x_col, mask, "", PEEL))
            if PEEL:
                read = tl.where((col < left) & (col >= absent - from_here), read, float("-inf"))
            higher = tl.maximum(higher, read)
            values = values + (read,)
        totals *= exp(floor - higher, PRECISE)
        for tile in tl.static_range(TILES):
            # Errors grow with the distance to the maximum, but weigh less: in the sum they are at most 2e-6.
            totals += exp(values[tile] - higher, False)
            better = values[tile] > best
            best = tl.where(better, values[tile], best)
            best_tile = tl.where(better, at // COLS + tile, best_tile)
    let_successor_start(OVERLAP)
    floor = tl.maximum(best, LOWEST)
    maximum = max_of_lines(floor, ROWS)
    total = sum_of_lines(totals * exp(floor - maximum, PRECISE), ROWS)

    local = best_tile * COLS + col
    ranks = rank(best)
    ranks = tl.where(local < count, ranks, nothing(ranks))
    ranks, found = largest(ranks, (first - lead + local).to(tl.int32), ROWS, KEEP)
    if partials is None:
        start = o * (k * inner) + i
        write(out + start, indices + start, ranks, found, maximum, total, k, inner, exists, ROWS, KEEP, PRECISE)
    else:
        partials += ((o * inner + i) * PARTS + part) * (2 + 2 * KEEP)
        pair = columns(2, ROWS)
        both = tl.where(pair == 0, rank(maximum), flip(total.to(ranks.dtype, bitcast=True)))
        tl.store(partials + pair, both.to(tl.int64), mask=exists)
        place = columns(KEEP, ROWS) * 2 + 2
        tl.store(partials + place, ranks.to(tl.int64), mask=exists)
        tl.store(partials + place + 1, found.to(tl.int64), mask=exists)


@triton.jit
def softmax_topk_pick(
    x, out, partials, indices, outer, cols, inner, x_outer, x_col, x_inner, k,
    COLS: tl.constexpr, REACH: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr, PARTS: tl.constexpr,
    KEEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row's results, from what ``softmax_topk_scan`` found in its parts; a slot saw at most REACH columns."""
    PRECISE: tl.constexpr = out.dtype.element_ty == tl.float32
    INTEGER: tl.constexpr = tl.int64 if out.dtype.element_ty == tl.float64 else tl.int32
    row, _ = begin(1, False, OVERLAP)
    o, i, exists = locate(row, outer, inner, 1, False)
    x_start = o * x_outer + i * x_inner
    _, _, lead = find_lead(x + x_start, x + x_start, VECTOR, PEEL)
    partials += row * PARTS * (2 + 2 * KEEP)
    pairs = partials + tl.arange(0, PARTS) * (2 + 2 * KEEP)
    maxima = unrank(tl.load(pairs).to(INTEGER))
    maximum, total = merge(maxima, unrank(tl.load(pairs + 1).to(INTEGER)), 1, PRECISE)

    at = tl.arange(0, PARTS * KEEP)
    pairs = partials + at * 2 + (at // KEEP + 1) * 2
    ranks = tl.load(pairs).to(INTEGER)
    found = tl.load(pairs + 1).to(tl.int32)
    let_successor_start(OVERLAP)
    if PARTS > 1:
        ranks, found = largest(ranks, found, 1, KEEP)
    if REACH > 1:
        share = share_of(lead + cols, COLS, PARTS).to(tl.int32)
        from_lead = found + lead
        first = from_lead // share * share
        slot = (from_lead - first) % COLS
        seen = (first + slot - lead)[:, None] + tl.arange(0, REACH)[None, :] * COLS
        last = tl.minimum(first + share - lead, cols.to(tl.int32))
        mask = (ranks != nothing(ranks))[:, None] & (seen >= 0) & (seen < last[:, None])
        seen = tl.reshape(seen, (KEEP * REACH,))
        mask = tl.reshape(mask, (KEEP * REACH,))
        ranks = rank(unpack(load(x + x_start + seen * x_col, mask, "evict_first", True)))
        ranks, found = largest(tl.where(mask, ranks, nothing(ranks)), seen, 1, KEEP)
    start = o * (k * inner) + i
    write(out + start, indices + start, ranks, found, maximum, total, k, inner, exists, 1, KEEP, PRECISE)
