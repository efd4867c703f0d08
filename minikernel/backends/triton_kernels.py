"""The softmax kernels in Triton; read it top to bottom. Importing it imports Triton.

The input is seen as ``outer x cols x inner`` with a stride each, and a program works on ROWS rows:

* ``softmax_tile``: rows that fit in TILES tiles are read once and written once. A tile is ROWS rows of COLS
  columns; or, where a program's warps share a row, PIECES pieces of it, one a warp. Maximum and sum are those
  of a piece first, which takes no barrier, and then merged. PARTS programs may share a row, as a cluster,
  whose blocks run at the same time and can write into one another's shared memory;
* ``softmax_long``: others go tile by tile, in a pass for maximum and sum together (online softmax) and
  a pass to write. The passes can also be two launches with PARTS programs a row, for inputs with too
  few rows to fill a GPU that has no clusters.

``softmax_backward_tile`` and ``softmax_backward_long`` do the same for the gradient. Its inputs, y and dy, lie like
its output, and what is agreed on is a sum alone.

What the compiler may know of alignment comes with the arguments: VECTOR neighbors take one access. Rows that
start anywhere are peeled (PEEL): their columns are counted from the 16-byte boundary at or before their start,
so that accesses are of whole vectors, and the few elements that share a vector with a neighboring row, the
row's edge, are written one by one.

Nothing tests for infinities: NaN or +inf in a row makes its sum NaN, nothing but -inf makes the sum
NaN or 0 and its results 0 / 0, and so they all come out NaN.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton knows no starred tuples)
import triton
import triton.language as tl


@triton.jit
def exp(x, PRECISE: tl.constexpr):
    """e**x for x <= 0; subnormal results become 0.

    x * log2(e) is rounded before exp2, an error that grows with abs(x): PRECISE makes up for it.
    """
    if x.dtype == tl.float64:
        return tl.exp(x)
    elif PRECISE:
        x = tl.where(x < -150.0, -150.0, x)  # 0 in float32; from an infinite x a NaN would arise below
        rounded = x * 1.4426950408889634
        lost = tl.fma(x, 1.925963033500581e-08, tl.fma(x, 1.4426950408889634, -rounded))
        power = tl.exp2(rounded)
        return tl.fma(power, lost * 0.6931471805599453, power)
    else:  # tl.exp would spend three more instructions on subnormal results
        return tl.exp2(x * 1.4426950408889634)


@triton.jit
def columns(COLS: tl.constexpr, LINES: tl.constexpr):
    """0 to COLS - 1; (1, COLS), or (COLS,) for a single line, whose maximum and sum are scalars then."""
    return tl.arange(0, COLS) if LINES == 1 else tl.arange(0, COLS)[None, :]


@triton.jit
def max_of_lines(tile, LINES: tl.constexpr):
    return tl.max(tile, 0) if LINES == 1 else tl.max(tile, 1, keep_dims=True)


@triton.jit
def sum_of_lines(tile, LINES: tl.constexpr):
    return tl.sum(tile, 0) if LINES == 1 else tl.sum(tile, 1, keep_dims=True)


@triton.jit
def find_rows(block, outer, cols, inner, x_outer, x_inner, ROWS: tl.constexpr, WITHIN: tl.constexpr):
    """Where a block's rows start in x and in out, and which exist; (ROWS, 1), or scalars for a single row.

    Rows are numbered across outer and inner; WITHIN starts a new block with each step of outer, so that
    the rows of a block are neighbors along inner.
    """
    lane = 0 if ROWS == 1 else tl.arange(0, ROWS)[:, None]
    if WITHIN:
        blocks = tl.cdiv(inner, ROWS)
        o = block // blocks
        i = block % blocks * ROWS + lane
        exists = i < inner
    else:
        row = block * ROWS + lane
        o = row // inner
        i = row % inner
        exists = row < outer * inner
    if ROWS == 1:
        exists = tl.full((1,), True, tl.int1)
    return o * x_outer + i * x_inner, o * (cols * inner) + i, exists


@triton.jit
def find_lead(x_row, out_row, VECTOR: tl.constexpr, PEEL: tl.constexpr):
    """The 16-byte boundaries at or before the rows' starts in x and out, and how many elements before."""
    if PEEL:
        lead = (out_row.to(tl.int64) // (16 // VECTOR) % VECTOR).to(tl.int32)
        if out_row.type.is_block():
            return tl.multiple_of(x_row - lead, (16, 16)), tl.multiple_of(out_row - lead, (16, 16)), lead
        else:
            return tl.multiple_of(x_row - lead, 16), tl.multiple_of(out_row - lead, 16), lead
    else:
        return x_row, out_row, 0


@triton.jit
def find_edge(lead, end, part, VECTOR: tl.constexpr, ROWS: tl.constexpr):
    """The columns that share a vector with a neighboring row, and which exist; a row's first part takes them."""
    lane = columns(2 * VECTOR, ROWS)
    after = lane >= VECTOR
    col = lane + tl.where(after, end // VECTOR * VECTOR - VECTOR, 0)
    first = tl.where(part == 0, tl.where(lead > 0, lead, VECTOR), VECTOR)
    return col, ((lane >= first) & (lane < VECTOR)) | (after & (col < tl.where(part == 0, end, 0)))


@triton.jit
def load(pointers, mask, POLICY: tl.constexpr, ANYTHING: tl.constexpr = False):
    """Elements; absent ones are -inf, or, where the caller sees to them, ANYTHING."""
    if mask is None:
        return tl.load(pointers, eviction_policy=POLICY)
    elif ANYTHING:
        return tl.load(pointers, mask=mask, eviction_policy=POLICY)
    else:
        return tl.load(pointers, mask=mask, other=float("-inf"), eviction_policy=POLICY)


@triton.jit
def unpack(x):
    """In the dtype of the arithmetic: float32, or float64 for float64."""
    return x.to(tl.float64 if x.dtype == tl.float64 else tl.float32)


@triton.jit
def forget(values, zero, PACKED: tl.constexpr):
    """The same values of a half type, so that the compiler unpacks them again: it doesn't know that zero is 0."""
    if not PACKED:
        return values
    else:
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [values, zero], dtype=values.dtype, is_pure=True, pack=2
        )


@triton.jit
def clamp(n, most):
    """A count between 0 and ``most``, in 32 bits."""
    return tl.maximum(tl.minimum(n, most), 0).to(tl.int32)


@triton.jit
def merge(maxima, totals, ROWS: tl.constexpr, PRECISE: tl.constexpr):
    """The maximum and sum of whole rows, from those of their parts."""
    maximum = max_of_lines(maxima, ROWS)
    return maximum, sum_of_lines(totals * exp(maxima - maximum, PRECISE), ROWS)


@triton.jit
def enter_cluster():
    """Tell the cluster's other programs that this one has started, so that they may write to it."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; // dummy $0",
        "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def merge_over_cluster(maximum, total, part, PARTS: tl.constexpr, PIECES: tl.constexpr, PRECISE: tl.constexpr):
    """The maximum and sum of a row, from those of the pieces of all PARTS programs; (PIECES, 1) each.

    Each program has a slot for every piece in its shared memory, and each writes its pieces to all: so what it
    reads after the barrier is its own, and it may end without being missed. Triton has no words for that.
    """
    WIDE: tl.constexpr = maximum.dtype == tl.float64
    BYTES: tl.constexpr = 16 if WIDE else 8
    SLOTS: tl.constexpr = PARTS * PIECES
    slots = tl.inline_asm_elementwise(
        f"{{ .shared .align 16 .b8 slots[{SLOTS * BYTES}]; mov.u32 $0, slots; }}",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    mine = slots + (part * PIECES + tl.arange(0, PIECES)).to(tl.int32) * BYTES
    tl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; // dummy $0",
        "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    # Every lane of a piece's warp has its maximum and sum: lane i writes to program i.
    tl.inline_asm_elementwise(
        f"""{{
            .reg .u32 lane, there;
            .reg .pred writes;
            mov.u32 lane, %laneid;
            setp.lt.u32 writes, lane, {PARTS};
            @writes mapa.shared::cluster.u32 there, $1, lane;
            @writes st.shared::cluster.v2.{"f64" if WIDE else "f32"} [there], {{$2, $3}};
            mov.u32 $0, 0;
        }}""",
        "=r,r,d,d,~{memory}" if WIDE else "=r,r,f,f,~{memory}",
        [mine, tl.max(maximum, 1), tl.max(total, 1)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; // dummy $0",
        "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip

    lane = tl.arange(0, 32)  # so that each warp reads them all and needs no other
    maxima = ()
    totals = ()
    for first in tl.static_range(0, SLOTS, 32):
        slot = first + lane
        slot_maximum, slot_total = tl.inline_asm_elementwise(
            "ld.shared.v2.f64 {$0, $1}, [$2];" if WIDE else "ld.shared.v2.f32 {$0, $1}, [$2];",
            "=d,=d,r,~{memory}" if WIDE else "=f,=f,r,~{memory}",
            [slots + tl.minimum(slot, SLOTS - 1) * BYTES],
            dtype=(maximum.dtype, maximum.dtype), is_pure=False, pack=1,
        )  # fmt: skip
        maxima = maxima + (slot_maximum,)
        totals = totals + (tl.where(slot < SLOTS, slot_total, 0.0),)
    higher = maxima[0]
    for i in tl.static_range(1, len(maxima)):
        higher = tl.maximum(higher, maxima[i])
    row_maximum = tl.max(higher, 0)
    sums = tl.zeros((32,), maximum.dtype)
    for i in tl.static_range(len(maxima)):
        sums += totals[i] * exp(maxima[i] - row_maximum, PRECISE)
    return row_maximum, tl.sum(sums, 0)


@triton.jit
def normalize(x, maximum, total, LOG: tl.constexpr, PRECISE: tl.constexpr):
    """The result, from the row's maximum and its sum of exponentials."""
    if LOG:
        return x - maximum - tl.log(total)
    else:
        return exp(x - maximum, PRECISE) * (1.0 / total)


@triton.jit
def softmax_tile(
    x, out, outer, cols, inner, x_outer, x_col, x_inner,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr,
    PIECES: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Softmax of rows of at most PARTS * PIECES * TILES * COLS columns.

    Either ROWS or PIECES is 1, and PIECES the number of warps where it isn't. EVEN: the tiles cover the input
    exactly. PACKED: elements of a half type stay in registers as they were read, twice as many, and each step
    unpacks them again.
    """
    LINES: tl.constexpr = ROWS * PIECES
    # Several rows read the vectors that they share with neighbors whole, which is safe: allocations have a multiple
    # of 16 bytes. For one row it takes fewer instructions to read those elements one by one.
    SHARED_VECTORS: tl.constexpr = PEEL and ROWS > 1
    PRECISE: tl.constexpr = out.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    # Not -inf, so that x - maximum is no NaN where only -inf has been seen.
    LOWEST: tl.constexpr = -1.7976931348623157e308 if ACC == tl.float64 else -3.4028234663852886e38  # noqa: SIM300
    if PARTS > 1:
        enter_cluster()
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    program = tl.program_id(0).to(tl.int64)
    block = program // PARTS
    part = program % PARTS
    x_start, out_start, exists = find_rows(block, outer, cols, inner, x_outer, x_inner, ROWS, WITHIN)
    x_row, out_row, lead = find_lead(x + x_start, out + out_start, VECTOR, PEEL)

    # This part's columns, counted from where the row's first vector starts: whole lines of 128 bytes.
    end = lead + cols
    share = tl.cdiv(tl.cdiv(end, PARTS), 8 * VECTOR) * (8 * VECTOR) if PARTS > 1 else end
    first = part * share if PARTS > 1 else 0
    count = clamp(end - first, share)
    whole = count // VECTOR * VECTOR if PEEL else count  # behind it are edges
    start = tl.where(part == 0, tl.cdiv(lead, VECTOR) * VECTOR, 0) if PEEL else 0
    x_part = x_row + first * x_col
    out_part = out_row + first * inner

    col = columns(COLS, LINES)
    if PIECES > 1:
        col += tl.arange(0, PIECES)[:, None] * (TILES * COLS)
    values = ()
    for tile in tl.static_range(TILES):
        at = tile * COLS + col
        if SHARED_VECTORS:
            vectors = tl.cdiv(count, VECTOR) * VECTOR
            inside = (col >= lead - tile * COLS) & (col < count - tile * COLS)
            read = load(x_part + at * x_col, exists & (col < vectors - tile * COLS), "evict_first", True)
            read = tl.where(inside, read, float("-inf"))
        else:
            mask = None if EVEN else exists & (col < whole - tile * COLS)
            if PEEL and tile == 0:
                mask = mask & (col >= start)
            read = load(x_part + at * x_col, mask, "evict_first")
        values = values + (read if PACKED else unpack(read),)
    if PEEL:
        edge, edge_mask = find_edge(lead, end, part, VECTOR, ROWS)
        edge_mask = exists & edge_mask
        edge_values = unpack(load(x_row + edge, edge_mask, "evict_first", SHARED_VECTORS))

    maxima = unpack(values[0])
    for tile in tl.static_range(1, TILES):
        maxima = tl.maximum(maxima, unpack(values[tile]))
    maximum = max_of_lines(maxima, LINES)
    if PIECES > 1:
        maximum = tl.maximum(maximum, LOWEST)
    if PEEL and not SHARED_VECTORS:
        edge_maximum = tl.maximum(tl.max(edge_values, 0), LOWEST)
        edge_total = tl.sum(exp(edge_values - edge_maximum, PRECISE), 0)
        maximum = tl.maximum(maximum, edge_maximum)
    zero = (cols >> 62).to(tl.int16)
    terms = ()
    totals = tl.zeros((COLS,) if LINES == 1 else (LINES, COLS), ACC)
    for tile in tl.static_range(TILES):
        term = exp(unpack(forget(values[tile], zero, PACKED)) - maximum, PRECISE)
        totals += term
        terms = terms + (term,)
    total = sum_of_lines(totals, LINES)
    if PEEL and not SHARED_VECTORS:
        edge_total *= exp(edge_maximum - maximum, PRECISE)
        total += edge_total if PIECES == 1 else tl.where(tl.arange(0, PIECES)[:, None] == 0, edge_total, 0.0)

    row_maximum = maximum
    if PARTS > 1:
        row_maximum, total = merge_over_cluster(maximum, total, part, PARTS, PIECES, PRECISE)
    elif PIECES > 1:
        row_maximum = tl.max(maximum)
        total = tl.sum(total * exp(maximum - row_maximum, PRECISE))
    factor = 1.0 / total
    if PIECES > 1 and not PACKED:
        factor *= exp(maximum - row_maximum, PRECISE)

    for tile in tl.static_range(TILES):
        at = tile * COLS + col
        mask = None if EVEN else exists & (col < whole - tile * COLS)
        if PEEL and tile == 0:
            mask = mask & (col >= start)
        if LOG:
            result = unpack(values[tile]) - row_maximum - tl.log(total)
        elif PACKED:
            result = exp(unpack(forget(values[tile], zero + zero, PACKED)) - row_maximum, PRECISE) * factor
        else:
            result = terms[tile] * factor
        tl.store(out_part + at * inner, result, mask=mask, cache_modifier=".cs")
    if PEEL:
        result = normalize(edge_values, row_maximum, total, LOG, PRECISE)  # the end is another part's
        tl.store(out_row + edge, result, mask=edge_mask, cache_modifier=".cs")


@triton.jit
def softmax_long(
    x, out, partials, outer, cols, inner, x_outer, x_col, x_inner,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr,
    VECTOR: tl.constexpr, PEEL: tl.constexpr, PARTS: tl.constexpr, SCAN: tl.constexpr, WRITE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Softmax of rows of any length, TILES tiles at a time.

    SCAN and WRITE say whether this launch makes the first and second pass; ``partials`` carries each part's
    maximum and sum from one launch to the other; (rows, PARTS, 2).
    """
    PRECISE: tl.constexpr = out.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    LOWEST: tl.constexpr = -1.7976931348623157e308 if ACC == tl.float64 else -3.4028234663852886e38  # noqa: SIM300
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    program = tl.program_id(0).to(tl.int64)
    block = program // PARTS
    part = program % PARTS
    x_start, out_start, exists = find_rows(block, outer, cols, inner, x_outer, x_inner, ROWS, WITHIN)
    x_row, out_row, lead = find_lead(x + x_start, out + out_start, VECTOR, PEEL)

    end = lead + cols
    most = tl.cdiv(cols + (VECTOR - 1 if PEEL else 0), COLS * TILES)
    steps = tl.cdiv(most, PARTS)
    first = part * steps
    last = tl.minimum(first + steps, most)
    col = columns(COLS, ROWS)

    if SCAN:
        maxima = tl.full((COLS,) if ROWS == 1 else (ROWS, COLS), LOWEST, ACC)
        totals = tl.zeros((COLS,) if ROWS == 1 else (ROWS, COLS), ACC)
        for step in range(first, last):
            higher = maxima
            values = ()
            for tile in tl.static_range(TILES):
                start = (step * TILES + tile) * COLS
                count = clamp(end - start, COLS)
                vectors = tl.cdiv(count, VECTOR) * VECTOR
                mask = exists & (col < vectors)
                tile_values = unpack(load(x_row + start * x_col + col * x_col, mask, "evict_last", PEEL))
                if PEEL:
                    inside = (col < count) & (col >= tl.where(start == 0, lead, 0))
                    tile_values = tl.where(inside, tile_values, float("-inf"))
                higher = tl.maximum(higher, tile_values)
                values = values + (tile_values,)
            totals *= exp(maxima - higher, PRECISE)
            for tile in tl.static_range(TILES):
                totals += exp(values[tile] - higher, PRECISE)
            maxima = higher
        maximum = max_of_lines(maxima, ROWS)
        total = sum_of_lines(totals * exp(maxima - maximum, PRECISE), ROWS)

    if PARTS > 1:  # a row's partials lie together, and each is a maximum and a sum
        row = block if ROWS == 1 else block * ROWS + tl.arange(0, ROWS)[:, None]
        partials += row * (2 * PARTS)
    if not WRITE:
        tl.store(partials + part * 2, maximum)
        tl.store(partials + part * 2 + 1, total)
    if not SCAN:
        at = partials + columns(PARTS, ROWS) * 2
        maximum, total = merge(tl.load(at), tl.load(at + 1), ROWS, PRECISE)

    if WRITE:
        for step in range(first, last):
            for tile in tl.static_range(TILES):
                # Backwards: the row's end is still in the L2 cache.
                start = ((first + last - 1 - step) * TILES + tile) * COLS
                count = clamp(end - start, COLS)
                vectors = count // VECTOR * VECTOR
                mask = exists & (col < vectors)
                if PEEL:
                    mask = mask & (col >= tl.where((start == 0) & (lead > 0), VECTOR, 0))
                values = unpack(load(x_row + start * x_col + col * x_col, mask, "evict_first"))
                result = normalize(values, maximum, total, LOG, PRECISE)
                tl.store(out_row + start * inner + col * inner, result, mask=mask, cache_modifier=".cs")
        if PEEL:
            edge, edge_mask = find_edge(lead, end, part, VECTOR, ROWS)
            edge_mask = exists & edge_mask
            result = normalize(unpack(load(x_row + edge, edge_mask, "evict_first")), maximum, total, LOG, PRECISE)
            tl.store(out_row + edge, result, mask=edge_mask, cache_modifier=".cs")


@triton.jit
def gradient(y, dy, total, LOG: tl.constexpr, PRECISE: tl.constexpr):
    """dx, from the row's sum of dy * y, or for log-softmax of dy."""
    if LOG:
        return dy - exp(y, PRECISE) * total
    else:
        return y * (dy - total)


@triton.jit
def softmax_backward_tile(
    y, out, dy, outer, cols, inner,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr,
    PIECES: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The gradient for rows of at most PARTS * PIECES * TILES * COLS columns; all arrays are contiguous."""
    LINES: tl.constexpr = ROWS * PIECES
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    if PARTS > 1:
        enter_cluster()
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    program = tl.program_id(0).to(tl.int64)
    block = program // PARTS
    part = program % PARTS
    _, start, exists = find_rows(block, outer, cols, inner, 0, 0, ROWS, WITHIN)
    share = tl.cdiv(tl.cdiv(cols, PARTS), 8 * VECTOR) * (8 * VECTOR) if PARTS > 1 else cols
    first = part * share if PARTS > 1 else 0
    count = clamp(cols - first, share)
    start += first * inner

    col = columns(COLS, LINES)
    if PIECES > 1:
        col += tl.arange(0, PIECES)[:, None] * (TILES * COLS)
    ys = ()
    dys = ()
    for tile in tl.static_range(TILES):
        at = start + (tile * COLS + col) * inner
        mask = None if EVEN else exists & (col < count - tile * COLS)
        if mask is None:
            ys = ys + (tl.load(y + at, eviction_policy="evict_first"),)
            dys = dys + (tl.load(dy + at, eviction_policy="evict_first"),)
        else:
            ys = ys + (tl.load(y + at, mask=mask, other=0.0, eviction_policy="evict_first"),)
            dys = dys + (tl.load(dy + at, mask=mask, other=0.0, eviction_policy="evict_first"),)

    totals = tl.zeros((COLS,) if LINES == 1 else (LINES, COLS), ACC)
    for tile in tl.static_range(TILES):
        term = unpack(dys[tile])
        totals += term if LOG else term * unpack(ys[tile])
    total = sum_of_lines(totals, LINES)
    if PARTS > 1:
        _, total = merge_over_cluster(tl.zeros((PIECES, 1), ACC), total, part, PARTS, PIECES, PRECISE)
    elif PIECES > 1:
        total = tl.sum(total)
    for tile in tl.static_range(TILES):
        at = start + (tile * COLS + col) * inner
        mask = None if EVEN else exists & (col < count - tile * COLS)
        dx = gradient(unpack(ys[tile]), unpack(dys[tile]), total, LOG, PRECISE)
        tl.store(out + at, dx, mask=mask, cache_modifier=".cs")


@triton.jit
def softmax_backward_long(
    y, out, dy, outer, cols, inner,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The gradient for rows of any length, in two passes; all arrays are contiguous."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0).to(tl.int64)
    _, start, exists = find_rows(block, outer, cols, inner, 0, 0, ROWS, WITHIN)
    col = columns(COLS, ROWS)
    totals = tl.zeros((COLS,) if ROWS == 1 else (ROWS, COLS), ACC)
    for first in range(0, cols, COLS):
        at = start + (first + col) * inner
        mask = exists & (col < clamp(cols - first, COLS))
        term = unpack(tl.load(dy + at, mask=mask, other=0.0, eviction_policy="evict_last"))
        if not LOG:
            term *= unpack(tl.load(y + at, mask=mask, other=0.0, eviction_policy="evict_last"))
        totals += term
    total = sum_of_lines(totals, ROWS)
    for step in range(0, cols, COLS):
        first = (cols - 1) // COLS * COLS - step  # backwards: the row's end is still in the L2 cache
        at = start + (first + col) * inner
        mask = exists & (col < clamp(cols - first, COLS))
        y_tile = unpack(tl.load(y + at, mask=mask, other=0.0, eviction_policy="evict_first"))
        dy_tile = unpack(tl.load(dy + at, mask=mask, other=0.0, eviction_policy="evict_first"))
        tl.store(out + at, gradient(y_tile, dy_tile, total, LOG, PRECISE), mask=mask, cache_modifier=".cs")
