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
row's edge, are read and written one by one.

With a scale (SCALED) x's sign is flipped where the scale is negative, and differences to the maximum are multiplied
by its magnitude. What a mask (MASKED) or causality (CAUSAL) drops becomes -inf once it is read, and what lies
behind a tile's last kept column isn't read.

With OVERLAP the next launch may start before this one ends; nothing is touched before ``begin`` has waited for the
one before. PACKED elements of half types stay in registers as they were read, and are unpacked for each step.

Nothing tests for infinities: NaN or +inf in a row makes its sum NaN, nothing but -inf makes the sum
NaN or 0 and its results 0 / 0, and so they all come out NaN.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton knows no starred tuples)
import triton
import triton.language as tl


@triton.jit
def exp(x, PRECISE: tl.constexpr, scale=None):
    """e**(scale * x) for x <= 0 and scale > 0, where None is 1; subnormal results become 0.

    scale * log2(e) * x is rounded before exp2, an error that grows with it: PRECISE makes up for it.
    """
    if scale is None:
        factor = 1.4426950408889634  # log2(e), and what float32 loses of it
        rest = 1.925963033500581e-08
    else:
        factor = scale * 1.4426950408889634
        rest = tl.fma(scale, 1.925963033500581e-08, tl.fma(scale, 1.4426950408889634, -factor))
    if x.dtype == tl.float64:
        return tl.exp(x) if scale is None else tl.exp(x * scale)
    elif PRECISE:
        if scale is None:
            x = tl.where(x < -150.0, -150.0, x)  # 0 in float32; from an infinite x a NaN would arise below
        rounded = x * factor
        lost = tl.fma(x, rest, tl.fma(x, factor, -rounded))
        if scale is not None:
            lost = tl.where(rounded < -216.0, 0.0, lost)  # likewise; no finite x stands for -inf at every scale
        power = tl.exp2(rounded)
        return tl.fma(power, lost * 0.6931471805599453, power)
    else:  # tl.exp would spend three more instructions on subnormal results
        return tl.exp2(x * factor)


@triton.jit
def below(x, maximum, scale=None):
    """x - maximum, or half of that where there is a scale, which is twice the caller's then."""
    return x - maximum if scale is None else x * 0.5 - maximum * 0.5


@triton.jit
def power(x, maximum, PRECISE: tl.constexpr, scale=None):
    """e**(x - maximum), the difference scaled."""
    return exp(below(x, maximum, scale), PRECISE, scale)


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
def let_successor_start(OVERLAP: tl.constexpr):
    """Let the stream's next launch start, whose programs wait in ``begin`` for this one's end all the same.

    Where is a matter of measuring: behind a tile's loads, or those of the first pass (bench/NOTES.md).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin(PARTS: tl.constexpr, CLUSTER: tl.constexpr, OVERLAP: tl.constexpr, SHORT: tl.constexpr = False):
    """This program's block of rows, and its part of them; waits until memory may be touched.

    SHORT: it has so little to do that the next launch is let start here.
    """
    if CLUSTER and PARTS > 1:
        enter_cluster()
    if SHORT:
        let_successor_start(OVERLAP)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0).to(tl.int64)
    return program // PARTS, program % PARTS


@triton.jit
def locate(block, outer, inner, ROWS: tl.constexpr, WITHIN: tl.constexpr):
    """A block's rows as steps along outer and along inner, and which exist; (ROWS, 1), or scalars for a single row.

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
    return o, i, exists


@triton.jit
def find_rows(block, outer, cols, inner, x_outer, x_inner, ROWS: tl.constexpr, WITHIN: tl.constexpr):
    """Where a block's rows start in x and in out, and which exist."""
    o, i, exists = locate(block, outer, inner, ROWS, WITHIN)
    return o * x_outer + i * x_inner, o * (cols * inner) + i, exists


@triton.jit
def find_mask_rows(
    mask, first, block, outer, inner, m_col, m_inner, m_0, m_1, m_2, m_3, n_1, n_2, n_3,
    ROWS: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    """Where column ``first`` of a block's rows lies in the mask.

    Its axes have strides m_0 to m_3 and, but for the slowest, extents n_1 to n_3. They span outer if there is
    an m_inner, the only stride over inner; else both.
    """
    o, i, _ = locate(block, outer, inner, ROWS, WITHIN)
    if m_inner is None:
        row = o * inner + i
        start = first * m_col
    else:
        row = o
        start = i * m_inner + first * m_col
    start += row % n_3 * m_3
    row = row // n_3
    start += row % n_2 * m_2
    row = row // n_2
    return mask + (start + row % n_1 * m_1 + row // n_1 * m_0)


@triton.jit
def find_kept_end(block, outer, cols, ROWS: tl.constexpr):
    """How many columns causality keeps, a row's first ones."""
    o, _, _ = locate(block, outer, 1, ROWS, False)
    return o % cols + 1


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
def find_share(end, part, VECTOR: tl.constexpr, PARTS: tl.constexpr):
    """A part's first column, and how many it has: whole lines of 128 bytes."""
    share = tl.cdiv(tl.cdiv(end, PARTS), 8 * VECTOR) * (8 * VECTOR) if PARTS > 1 else end
    first = part * share if PARTS > 1 else 0
    return first, clamp(end - first, share)


@triton.jit
def find_tile(
    start, end, lead, exists, col,
    VECTOR: tl.constexpr, COLS: tl.constexpr, WITHIN: tl.constexpr, PEEL: tl.constexpr,
):  # fmt: skip
    """Which elements there are of a row's tile that starts at that column, in whole vectors."""
    count = clamp(end - start, COLS)
    there = exists & (col < (count if WITHIN else count // VECTOR * VECTOR))  # WITHIN: vectors lie along inner
    if PEEL:
        there = there & (col >= tl.where((start == 0) & (lead > 0), VECTOR, 0))
    return there


@triton.jit
def load(pointers, there, POLICY: tl.constexpr, ANYTHING: tl.constexpr = False, absent=float("-inf")):
    """Elements; those that aren't there are ``absent``, or, where the caller sees to them, ANYTHING."""
    if there is None:
        return tl.load(pointers, eviction_policy=POLICY)
    elif ANYTHING:
        return tl.load(pointers, mask=there, eviction_policy=POLICY)
    else:
        return tl.load(pointers, mask=there, other=absent, eviction_policy=POLICY)


@triton.jit
def unpack(x):
    """In the dtype of the arithmetic: float32, or float64 for float64."""
    return x.to(tl.float64 if x.dtype == tl.float64 else tl.float32)


@triton.jit
def load_kept(mask, start, there, inside, SHARED: tl.constexpr = False):
    """Which elements are ``inside`` and kept by the mask, either None where there is none."""
    kept = inside
    if mask is not None:
        if SHARED and inside is not None:
            there = there & inside
        kept = (tl.load(mask + start) if there is None else tl.load(mask + start, mask=there, other=0)) != 0
        if inside is not None:
            kept = kept & inside
    return kept


@triton.jit
def read(
    x, mask, start, there, inside, sign,
    POLICY: tl.constexpr, PACKED: tl.constexpr = False, SHARED: tl.constexpr = False,
):  # fmt: skip
    """Elements as they count: with the sign of the scale, and -inf where they are absent, not inside or masked out.

    SHARED: some of those there are a neighboring row's, which aren't inside.
    """
    # What is absent is -inf behind the flip, not before it.
    values = load(x, there, POLICY, SHARED or sign is not None)
    kept = load_kept(mask, start, there, inside, SHARED)
    if sign is not None and there is not None:
        kept = there if kept is None else kept & there
    if not PACKED:
        values = unpack(values)
    if sign is not None:
        WIDE: tl.constexpr = tl.int64 if values.dtype == tl.float64 else tl.int32
        BITS: tl.constexpr = tl.int16 if PACKED else WIDE
        flip = (sign >> 16 if PACKED else sign).to(BITS)
        values = (values.to(BITS, bitcast=True) ^ flip).to(values.dtype, bitcast=True)
    return values if kept is None else tl.where(kept, values, float("-inf"))


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
def tile_columns(ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr, PIECES: tl.constexpr):
    """The columns of a program's first tile, where each of its pieces has TILES of them."""
    col = columns(COLS, ROWS * PIECES)
    if PIECES > 1:
        col += tl.arange(0, PIECES)[:, None] * (TILES * COLS)
    return col


@triton.jit
def sign_of(scale):
    """The bit of its sign."""
    BITS: tl.constexpr = tl.int64 if scale.dtype == tl.float64 else tl.int32
    LOWEST: tl.constexpr = -(2**63) if scale.dtype == tl.float64 else -(2**31)
    return scale.to(BITS, bitcast=True) & LOWEST


@triton.jit
def merge(maxima, totals, ROWS: tl.constexpr, PRECISE: tl.constexpr, scale=None):
    """The maximum and sum of whole rows, from those of their parts."""
    maximum = max_of_lines(maxima, ROWS)
    return maximum, sum_of_lines(totals * power(maxima, maximum, PRECISE, scale), ROWS)


@triton.jit
def enter_cluster():
    """Tell the cluster's other programs that this one has started, so that they may write to it."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; // dummy $0",
        "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def merge_over_cluster(
    maximum, total, part, PARTS: tl.constexpr, PIECES: tl.constexpr, PRECISE: tl.constexpr, scale=None
):
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
        sums += totals[i] * power(maxima[i], row_maximum, PRECISE, scale)
    return row_maximum, tl.sum(sums, 0)


@triton.jit
def normalize(x, maximum, total, LOG: tl.constexpr, PRECISE: tl.constexpr, scale=None):
    """The result, from the row's maximum and its sum of exponentials."""
    if LOG:
        difference = below(x, maximum, scale)
        return (difference if scale is None else difference * scale) - tl.log(total)
    else:
        return power(x, maximum, PRECISE, scale) * (1.0 / total)


@triton.jit
def softmax_tile(
    x, out, mask, scale, outer, cols, inner, x_outer, x_col, x_inner,
    m_col, m_inner, m_0, m_1, m_2, m_3, n_1, n_2, n_3,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr,
    PIECES: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, POLICY: tl.constexpr, OVERLAP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Softmax of rows of at most PARTS * PIECES * TILES * COLS columns.

    Either ROWS or PIECES is 1, and PIECES the number of warps where it isn't. EVEN: the tiles cover the input
    exactly. POLICY: of the L2 cache, for what is read.
    """
    LINES: tl.constexpr = ROWS * PIECES
    # Several rows read the vectors that they share with neighbors whole, which is safe: allocations have a multiple
    # of 16 bytes. For one row it takes fewer instructions to read those elements one by one.
    SHARED_VECTORS: tl.constexpr = PEEL and ROWS > 1
    PRECISE: tl.constexpr = out.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    # Not -inf, so that x - maximum is no NaN where only -inf has been seen.
    LOWEST: tl.constexpr = -1.7976931348623157e308 if ACC == tl.float64 else -3.4028234663852886e38  # noqa: SIM300
    SHORT: tl.constexpr = TILES == 1 and PARTS == 1
    block, part = begin(PARTS, True, OVERLAP, SHORT)
    x_start, out_start, exists = find_rows(block, outer, cols, inner, x_outer, x_inner, ROWS, WITHIN)
    x_row, out_row, lead = find_lead(x + x_start, out + out_start, VECTOR, PEEL)
    sign = sign_of(scale) if SCALED else None
    scale = 2.0 * tl.abs(scale) if SCALED else None  # for differences of halves, which can't overflow
    mask_row = None
    if MASKED:
        mask_row = find_mask_rows(
            mask, -lead, block, outer, inner, m_col, m_inner, m_0, m_1, m_2, m_3, n_1, n_2, n_3, ROWS, WITHIN
        )

    # This part's columns, counted from where the row's first vector starts.
    end = lead + cols
    first, count = find_share(end, part, VECTOR, PARTS)
    whole = count // VECTOR * VECTOR if PEEL else count  # behind it are edges
    start = tl.where(part == 0, tl.cdiv(lead, VECTOR) * VECTOR, 0) if PEEL else 0
    x_part = x_row + first * x_col
    out_part = out_row + first * inner
    mask_part = mask_row + first * m_col if MASKED else None
    kept_end = lead + find_kept_end(block, outer, cols, ROWS) if CAUSAL else end
    stop = clamp(kept_end - first, count) if CAUSAL else count  # behind it nothing counts
    stop_whole = tl.minimum(tl.cdiv(stop, VECTOR) * VECTOR, whole) if CAUSAL else whole

    col = tile_columns(ROWS, COLS, TILES, PIECES)
    values = ()
    for tile in tl.static_range(TILES):
        at = tile * COLS + col
        if SHARED_VECTORS:
            vectors = tl.cdiv(stop, VECTOR) * VECTOR
            inside = (col >= lead - tile * COLS) & (col < stop - tile * COLS)
            there = exists & (col < vectors - tile * COLS)
        else:
            inside = col < stop - tile * COLS if CAUSAL else None
            there = None if EVEN else exists & (col < stop_whole - tile * COLS)
            if PEEL and tile == 0:
                there = there & (col >= start)
        tile_values = read(
            x_part + at * x_col, mask_part, at * m_col, there, inside, sign, POLICY, PACKED, SHARED_VECTORS
        )
        values = values + (tile_values,)
    if PEEL:
        edge, edge_there = find_edge(lead, end, part, VECTOR, ROWS)
        edge_there = exists & edge_there
        inside = edge < kept_end if CAUSAL else None
        edge_values = read(
            x_row + edge, mask_row, edge * m_col, edge_there, inside, sign, POLICY, False, SHARED_VECTORS
        )
    if not SHORT:
        let_successor_start(OVERLAP)

    maxima = unpack(values[0])
    for tile in tl.static_range(1, TILES):
        maxima = tl.maximum(maxima, unpack(values[tile]))
    maximum = max_of_lines(maxima, LINES)
    if PIECES > 1:
        maximum = tl.maximum(maximum, LOWEST)
    if PEEL and not SHARED_VECTORS:
        edge_maximum = tl.maximum(tl.max(edge_values, 0), LOWEST)
        edge_total = tl.sum(power(edge_values, edge_maximum, PRECISE, scale), 0)
        maximum = tl.maximum(maximum, edge_maximum)
    zero = (cols >> 62).to(tl.int16)
    terms = ()
    totals = tl.zeros((COLS,) if LINES == 1 else (LINES, COLS), ACC)
    for tile in tl.static_range(TILES):
        term = power(unpack(forget(values[tile], zero, PACKED)), maximum, PRECISE, scale)
        totals += term
        terms = terms + (term,)
    total = sum_of_lines(totals, LINES)
    if PEEL and not SHARED_VECTORS:
        edge_total *= power(edge_maximum, maximum, PRECISE, scale)
        total += edge_total if PIECES == 1 else tl.where(tl.arange(0, PIECES)[:, None] == 0, edge_total, 0.0)

    row_maximum = maximum
    if PARTS > 1:
        row_maximum, total = merge_over_cluster(maximum, total, part, PARTS, PIECES, PRECISE, scale)
    elif PIECES > 1:
        row_maximum = tl.max(maximum)
        total = tl.sum(total * power(maximum, row_maximum, PRECISE, scale))
    factor = 1.0 / total
    if PIECES > 1 and not PACKED:
        factor *= power(maximum, row_maximum, PRECISE, scale)

    for tile in tl.static_range(TILES):
        at = tile * COLS + col
        there = None if EVEN else exists & (col < whole - tile * COLS)
        if PEEL and tile == 0:
            there = there & (col >= start)
        tile_values = unpack(forget(values[tile], zero + zero, PACKED))
        if LOG:
            result = normalize(tile_values, row_maximum, total, LOG, PRECISE, scale)
        elif PACKED:
            result = power(tile_values, row_maximum, PRECISE, scale) * factor
        else:
            result = terms[tile] * factor
        tl.store(out_part + at * inner, result, mask=there, cache_modifier=".cs")
    if PEEL:
        result = normalize(edge_values, row_maximum, total, LOG, PRECISE, scale)  # the end is another part's
        tl.store(out_row + edge, result, mask=edge_there, cache_modifier=".cs")


@triton.jit
def softmax_long(
    x, out, partials, mask, scale, outer, cols, inner, x_outer, x_col, x_inner,
    m_col, m_inner, m_0, m_1, m_2, m_3, n_1, n_2, n_3,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
    PEEL: tl.constexpr, PARTS: tl.constexpr, SCAN: tl.constexpr, WRITE: tl.constexpr, OVERLAP: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Softmax of rows of any length.

    SCAN and WRITE say whether this launch makes the first and second pass; ``partials`` carries each part's
    maximum and sum from one launch to the other; (rows, PARTS, 2).
    """
    PRECISE: tl.constexpr = out.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    LOWEST: tl.constexpr = -1.7976931348623157e308 if ACC == tl.float64 else -3.4028234663852886e38  # noqa: SIM300
    block, part = begin(PARTS, False, OVERLAP)
    x_start, out_start, exists = find_rows(block, outer, cols, inner, x_outer, x_inner, ROWS, WITHIN)
    x_row, out_row, lead = find_lead(x + x_start, out + out_start, VECTOR, PEEL)
    sign = sign_of(scale) if SCALED else None
    scale = 2.0 * tl.abs(scale) if SCALED else None  # for differences of halves, which can't overflow
    mask_row = None
    if MASKED:
        mask_row = find_mask_rows(
            mask, -lead, block, outer, inner, m_col, m_inner, m_0, m_1, m_2, m_3, n_1, n_2, n_3, ROWS, WITHIN
        )

    end = lead + cols
    most = tl.cdiv(cols + (VECTOR - 1 if PEEL else 0), COLS)
    steps = tl.cdiv(most, PARTS)
    first = part * steps
    last = tl.minimum(first + steps, most)
    stop = lead + find_kept_end(block, outer, cols, ROWS) if CAUSAL else end  # behind it nothing counts
    stop_whole = tl.minimum(tl.cdiv(stop, VECTOR) * VECTOR, end) if CAUSAL else end
    col = columns(COLS, ROWS)
    if PEEL:
        edge, edge_there = find_edge(lead, end, part, VECTOR, ROWS)
        edge_there = exists & edge_there
        edge_inside = edge < stop if CAUSAL else None
        edge_values = read(x_row + edge, mask_row, edge * m_col, edge_there, edge_inside, sign, "evict_first")

    if SCAN:
        maxima = tl.full((COLS,) if ROWS == 1 else (ROWS, COLS), LOWEST, ACC)
        totals = tl.zeros((COLS,) if ROWS == 1 else (ROWS, COLS), ACC)
        last_read = tl.minimum(last, tl.cdiv(tl.max(stop) if ROWS > 1 else stop, COLS)) if CAUSAL else last
        for step in range(first, last_read):
            start = step * COLS
            there = find_tile(start, stop_whole, lead, exists, col, VECTOR, COLS, WITHIN, PEEL)
            inside = col < stop - start if CAUSAL else None
            at = start + col
            values = read(x_row + at * x_col, mask_row, at * m_col, there, inside, sign, "evict_last")
            higher = tl.maximum(maxima, values)
            totals = totals * power(maxima, higher, PRECISE, scale) + power(values, higher, PRECISE, scale)
            maxima = higher
        maximum, total = merge(maxima, totals, ROWS, PRECISE, scale)
        if PEEL:
            higher = tl.maximum(maximum, max_of_lines(edge_values, ROWS))
            total *= power(maximum, higher, PRECISE, scale)
            total += sum_of_lines(power(edge_values, higher, PRECISE, scale), ROWS)
            maximum = higher
    let_successor_start(OVERLAP)

    if PARTS > 1:  # a row's partials lie together, and each is a maximum and a sum
        row = block if ROWS == 1 else block * ROWS + tl.arange(0, ROWS)[:, None]
        partials += row * (2 * PARTS)
    if not WRITE:
        tl.store(partials + part * 2, maximum)
        tl.store(partials + part * 2 + 1, total)
    if not SCAN:
        pairs = partials + columns(PARTS, ROWS) * 2
        maximum, total = merge(tl.load(pairs), tl.load(pairs + 1), ROWS, PRECISE, scale)

    if WRITE:
        for step in range(first, last):
            step = first + last - 1 - step  # backwards: the row's end is still in the L2 cache
            start = step * COLS
            there = find_tile(start, end, lead, exists, col, VECTOR, COLS, WITHIN, PEEL)
            counting = find_tile(start, stop_whole, lead, exists, col, VECTOR, COLS, WITHIN, PEEL)
            inside = col < stop - start if CAUSAL else None
            at = start + col
            values = read(x_row + at * x_col, mask_row, at * m_col, counting, inside, sign, "evict_first")
            result = normalize(values, maximum, total, LOG, PRECISE, scale)
            tl.store(out_row + at * inner, result, mask=there, cache_modifier=".cs")
        if PEEL:
            result = normalize(edge_values, maximum, total, LOG, PRECISE, scale)
            tl.store(out_row + edge, result, mask=edge_there, cache_modifier=".cs")


@triton.jit
def gradient(y, dy, total, scale, kept, LOG: tl.constexpr, PRECISE: tl.constexpr):
    """dx, from the row's sum of dy * y, or for log-softmax of dy; scale and kept are None where there is none."""
    dx = dy - exp(y, PRECISE) * total if LOG else y * (dy - total)
    if scale is not None:
        dx *= scale
    return dx if kept is None else tl.where(kept, dx, 0.0)


@triton.jit
def product(y, dy, kept, LOG: tl.constexpr):
    """What an element adds to the row's sum."""
    if LOG:
        return dy
    else:
        return dy * y if kept is None else tl.where(kept, dy * y, 0.0)


@triton.jit
def softmax_backward_tile(
    y, out, dy, mask, scale, outer, cols, inner, m_col, m_inner, m_0, m_1, m_2, m_3, n_1, n_2, n_3,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr,
    PIECES: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The gradient for rows of at most PARTS * PIECES * TILES * COLS columns; all arrays are contiguous.

    Nothing is read with a policy: if all of it were the first to leave the L2 cache, what others have left there
    would stay.
    """
    LINES: tl.constexpr = ROWS * PIECES
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    SHORT: tl.constexpr = TILES == 1 and PARTS == 1
    block, part = begin(PARTS, True, OVERLAP, SHORT)
    _, row, exists = find_rows(block, outer, cols, inner, 0, 0, ROWS, WITHIN)
    first, count = find_share(cols, part, VECTOR, PARTS)
    start = row + first * inner
    mask_part = None
    if MASKED:
        mask_part = find_mask_rows(
            mask, first, block, outer, inner, m_col, m_inner, m_0, m_1, m_2, m_3, n_1, n_2, n_3, ROWS, WITHIN
        )
    kept_end = find_kept_end(block, outer, cols, ROWS) if CAUSAL else cols
    stop = clamp(kept_end - first, count) if CAUSAL else count  # behind it nothing counts
    stop_whole = tl.minimum(tl.cdiv(stop, VECTOR) * VECTOR, count) if CAUSAL else count

    col = tile_columns(ROWS, COLS, TILES, PIECES)
    ys = ()
    dys = ()
    kepts = ()
    for tile in tl.static_range(TILES):
        at = tile * COLS + col
        there = None if EVEN else exists & (col < count - tile * COLS)
        counting = exists & (col < stop_whole - tile * COLS) if CAUSAL else there
        inside = col < stop - tile * COLS if CAUSAL else None
        ys = ys + (load(y + start + at * inner, counting, "", absent=0.0),)
        # Log-softmax sums them all.
        dys = dys + (load(dy + start + at * inner, there if LOG else counting, "", absent=0.0),)
        if MASKED or CAUSAL:
            kepts = kepts + (load_kept(mask_part, at * m_col, counting, inside),)
    if not SHORT:
        let_successor_start(OVERLAP)

    zero = (cols >> 62).to(tl.int16)
    totals = tl.zeros((COLS,) if LINES == 1 else (LINES, COLS), ACC)
    for tile in tl.static_range(TILES):
        kept = kepts[tile] if MASKED or CAUSAL else None
        y_tile = unpack(forget(ys[tile], zero, PACKED))
        totals += product(y_tile, unpack(forget(dys[tile], zero, PACKED)), kept, LOG)
    total = sum_of_lines(totals, LINES)
    if PARTS > 1:
        _, total = merge_over_cluster(tl.zeros((PIECES, 1), ACC), total, part, PARTS, PIECES, PRECISE)
    elif PIECES > 1:
        total = tl.sum(total)
    for tile in tl.static_range(TILES):
        at = start + (tile * COLS + col) * inner
        there = None if EVEN else exists & (col < count - tile * COLS)
        kept = kepts[tile] if MASKED or CAUSAL else None
        y_tile = unpack(forget(ys[tile], zero + zero, PACKED))
        dy_tile = unpack(forget(dys[tile], zero + zero, PACKED))
        dx = gradient(y_tile, dy_tile, total, scale if SCALED else None, kept, LOG, PRECISE)
        tl.store(out + at, dx, mask=there, cache_modifier=".cs")


@triton.jit
def softmax_backward_long(
    y, out, dy, mask, scale, outer, cols, inner, m_col, m_inner, m_0, m_1, m_2, m_3, n_1, n_2, n_3,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The gradient for rows of any length, in two passes; all arrays are contiguous."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    block, _ = begin(1, False, OVERLAP)
    _, row, exists = find_rows(block, outer, cols, inner, 0, 0, ROWS, WITHIN)
    mask_row = None
    if MASKED:
        mask_row = find_mask_rows(
            mask, 0, block, outer, inner, m_col, m_inner, m_0, m_1, m_2, m_3, n_1, n_2, n_3, ROWS, WITHIN
        )
    stop = find_kept_end(block, outer, cols, ROWS) if CAUSAL else cols  # behind it nothing counts
    stop_whole = tl.minimum(tl.cdiv(stop, VECTOR) * VECTOR, cols) if CAUSAL else cols
    summed = cols  # by log-softmax
    if CAUSAL and not LOG:
        summed = tl.max(stop) if ROWS > 1 else stop

    col = columns(COLS, ROWS)
    totals = tl.zeros((COLS,) if ROWS == 1 else (ROWS, COLS), ACC)
    for step in range(tl.cdiv(summed, COLS)):
        start = step * COLS
        there = find_tile(start, cols if LOG else stop_whole, 0, exists, col, VECTOR, COLS, WITHIN, False)
        at = start + col
        dy_tile = unpack(load(dy + row + at * inner, there, "evict_last", absent=0.0))
        if LOG:
            totals += dy_tile
        else:
            y_tile = unpack(load(y + row + at * inner, there, "evict_last", absent=0.0))
            kept = load_kept(mask_row, at * m_col, there, col < stop - start if CAUSAL else None)
            totals += product(y_tile, dy_tile, kept, LOG)
    let_successor_start(OVERLAP)
    total = sum_of_lines(totals, ROWS)
    tiles = tl.cdiv(cols, COLS)
    for step in range(tiles):
        step = tiles - 1 - step  # backwards: the row's end is still in the L2 cache
        start = step * COLS
        there = find_tile(start, cols, 0, exists, col, VECTOR, COLS, WITHIN, False)
        counting = find_tile(start, stop_whole, 0, exists, col, VECTOR, COLS, WITHIN, False)
        at = start + col
        y_tile = unpack(load(y + row + at * inner, counting, "evict_first", absent=0.0))
        dy_tile = unpack(load(dy + row + at * inner, counting, "evict_first", absent=0.0))
        kept = load_kept(mask_row, at * m_col, counting, col < stop - start if CAUSAL else None)
        dx = gradient(y_tile, dy_tile, total, scale if SCALED else None, kept, LOG, PRECISE)
        tl.store(out + row + at * inner, dx, mask=there, cache_modifier=".cs")
