"""The softmax kernels in Triton; read it top to bottom. Importing it imports Triton.

The input is seen as ``outer x cols x inner`` with a stride each, and a program works on ROWS rows:

* ``softmax_tile``: rows that fit in a tile of COLS columns are read once and written once;
* ``softmax_long``: others go tile by tile, in a pass for maximum and sum together (online softmax) and
  a pass to write. The passes can also be two launches with PIECES programs a row, for inputs with too
  few rows to fill a GPU.

What the compiler may know of alignment comes with the arguments. Rows that start anywhere are peeled
(PEEL): a body that starts on a 16-byte boundary and has whole vectors only, and an edge of the few
columns on either side of it. So two tiles make a row, and most steps come twice.

Nothing tests for infinities: NaN or +inf in a row makes its sum NaN, nothing but -inf makes the sum
NaN or 0 and its results 0 / 0, and so they all come out NaN.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def exp(x, PRECISE: tl.constexpr):
    """e**x for x <= 0. ``tl.exp`` rounds x * log2(e) before exp2, an error that grows with abs(x)."""
    if PRECISE:
        x = tl.where(x < -150.0, -150.0, x)  # 0 in float32; from an infinite x a NaN would arise below
        rounded = x * 1.4426950408889634
        lost = tl.fma(x, 1.925963033500581e-08, tl.fma(x, 1.4426950408889634, -rounded))
        power = tl.exp2(rounded)
        return tl.fma(power, lost * 0.6931471805599453, power)
    else:
        return tl.exp(x)


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
        exists = tl.full((1, 1), True, tl.int1)
    return o * x_outer + i * x_inner, o * (cols * inner) + i, exists


@triton.jit
def align(row):
    """The first 16-byte boundary at or after each address."""
    boundary = ((row.to(tl.int64) + 15) // 16 * 16).to(row.dtype)
    return tl.multiple_of(boundary, 16 if row.type.is_ptr() else (16, 16))


@triton.jit
def find_body(x_row, out_row, cols, PEEL: tl.constexpr):
    """Where each row's body starts in x and out, and how many columns come before it and belong to it."""
    if PEEL:
        ITEMSIZE: tl.constexpr = out_row.dtype.element_ty.primitive_bitwidth // 8
        VECTOR: tl.constexpr = 16 // ITEMSIZE
        head = tl.minimum((align(out_row).to(tl.int64) - out_row.to(tl.int64)) // ITEMSIZE, cols)
        return align(x_row), align(out_row), head, (cols - head) // VECTOR * VECTOR
    else:
        return x_row, out_row, 0, cols


@triton.jit
def find_edge(head, body, cols, out_row):
    """The columns outside the body, less than a vector on either side, and which of them exist."""
    VECTOR: tl.constexpr = 128 // out_row.dtype.element_ty.primitive_bitwidth
    lane = tl.arange(0, 2 * VECTOR)[None, :]
    before = lane < VECTOR
    col = tl.where(before, lane, head + body + lane - VECTOR)
    return col, tl.where(before, lane < head, col < cols)


@triton.jit
def load(pointers, mask, POLICY: tl.constexpr):
    """Elements in the dtype of the arithmetic: float32, or float64 for float64. Absent ones are -inf."""
    ACC: tl.constexpr = tl.float64 if pointers.dtype.element_ty == tl.float64 else tl.float32
    if mask is None:
        return tl.load(pointers, eviction_policy=POLICY).to(ACC)
    else:
        return tl.load(pointers, mask=mask, other=float("-inf"), eviction_policy=POLICY).to(ACC)


@triton.jit
def normalize(shifted, total, LOG: tl.constexpr, PRECISE: tl.constexpr):
    """The result, from x - maximum and the sum of exponentials."""
    if LOG:
        return shifted - tl.log(total)
    else:
        return exp(shifted, PRECISE) * (1.0 / total)


@triton.jit
def softmax_tile(
    x, out, outer, cols, inner, x_outer, x_col, x_inner,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PEEL: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Softmax of rows of at most COLS columns, edges apart. EVEN: the tiles cover the input exactly."""
    PRECISE: tl.constexpr = out.dtype.element_ty == tl.float32
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    block = tl.program_id(0).to(tl.int64)
    x_start, out_start, exists = find_rows(block, outer, cols, inner, x_outer, x_inner, ROWS, WITHIN)
    x_row = x + x_start
    out_row = out + out_start
    x_body, out_body, head, body = find_body(x_row, out_row, cols, PEEL)

    col = tl.arange(0, COLS)[None, :]
    mask = None if EVEN else exists & (col < body)
    values = load(x_body + col * x_col, mask, "evict_first")
    maximum = tl.max(values, 1, keep_dims=True)
    if PEEL:
        edge_col, edge_mask = find_edge(head, body, cols, out_row)
        edge_mask = exists & edge_mask
        edge = load(x_row + edge_col, edge_mask, "evict_first")
        maximum = tl.maximum(maximum, tl.max(edge, 1, keep_dims=True))

    total = tl.sum(exp(values - maximum, PRECISE), 1, keep_dims=True)
    if PEEL:
        total += tl.sum(exp(edge - maximum, PRECISE), 1, keep_dims=True)

    result = normalize(values - maximum, total, LOG, PRECISE)
    tl.store(out_body + col * inner, result, mask=mask, cache_modifier=".cs")
    if PEEL:
        result = normalize(edge - maximum, total, LOG, PRECISE)
        tl.store(out_row + edge_col, result, mask=edge_mask, cache_modifier=".cs")


@triton.jit
def softmax_long(
    x, out, partials, outer, cols, inner, x_outer, x_col, x_inner,
    LOG: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PEEL: tl.constexpr, PIECES: tl.constexpr, SCAN: tl.constexpr, WRITE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Softmax of rows of any length. SCAN and WRITE: whether this launch makes the first and second pass.

    ``partials`` carries each piece's maximum and sum from one launch to the other; (rows, PIECES, 2).
    """
    PRECISE: tl.constexpr = out.dtype.element_ty == tl.float32
    ACC: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    # Not -inf, so that x - maximum is no NaN where only -inf has been seen.
    LOWEST: tl.constexpr = -1.7976931348623157e308 if ACC == tl.float64 else -3.4028234663852886e38  # noqa: SIM300
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    program = tl.program_id(0).to(tl.int64)
    block = program // PIECES
    piece = program % PIECES
    x_start, out_start, exists = find_rows(block, outer, cols, inner, x_outer, x_inner, ROWS, WITHIN)
    x_row = x + x_start
    out_row = out + out_start
    x_body, out_body, head, body = find_body(x_row, out_row, cols, PEEL)

    tiles = tl.cdiv(tl.cdiv(cols, COLS), PIECES)
    first = piece * tiles
    last = tl.minimum(first + tiles, tl.cdiv(cols, COLS))
    col = tl.arange(0, COLS)[None, :]
    edge_end = tl.where(piece == 0, cols, 0)  # a row's first piece has its edge

    if SCAN:
        maxima = tl.full((ROWS, COLS), LOWEST, ACC)
        totals = tl.zeros((ROWS, COLS), ACC)
        for tile in range(first, last):
            start = tile * COLS
            mask = exists & (start + col < body)
            values = load(x_body + start * x_col + col * x_col, mask, "evict_last")
            gap = values - maxima
            smaller = exp(-tl.abs(gap), PRECISE)
            totals = tl.where(gap > 0, totals * smaller + 1, totals + smaller)
            maxima = tl.maximum(maxima, values)
        maximum = tl.max(maxima, 1, keep_dims=True)
        if PEEL:
            edge_col, edge_mask = find_edge(head, body, cols, out_row)
            edge_mask = exists & edge_mask & (edge_col < edge_end)
            edge = load(x_row + edge_col, edge_mask, "evict_last")
            maximum = tl.maximum(maximum, tl.max(edge, 1, keep_dims=True))
        total = tl.sum(totals * exp(maxima - maximum, PRECISE), 1, keep_dims=True)
        if PEEL:
            total += tl.sum(exp(edge - maximum, PRECISE), 1, keep_dims=True)

    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    if not WRITE:
        tl.store(partials + (row * PIECES + piece) * 2, maximum)
        tl.store(partials + (row * PIECES + piece) * 2 + 1, total)
    if not SCAN:
        at = partials + (row * PIECES + tl.arange(0, PIECES)[None, :]) * 2
        maxima = tl.load(at)
        maximum = tl.max(maxima, 1, keep_dims=True)
        total = tl.sum(tl.load(at + 1) * exp(maxima - maximum, PRECISE), 1, keep_dims=True)

    if WRITE:
        for step in range(first, last):
            start = (first + last - 1 - step) * COLS  # backwards: the row's end is still in the L2 cache
            mask = exists & (start + col < body)
            values = load(x_body + start * x_col + col * x_col, mask, "evict_first")
            result = normalize(values - maximum, total, LOG, PRECISE)
            tl.store(out_body + start * inner + col * inner, result, mask=mask, cache_modifier=".cs")
        if PEEL:
            edge_col, edge_mask = find_edge(head, body, cols, out_row)
            edge_mask = exists & edge_mask & (edge_col < edge_end)
            edge = load(x_row + edge_col, edge_mask, "evict_first")
            result = normalize(edge - maximum, total, LOG, PRECISE)
            tl.store(out_row + edge_col, result, mask=edge_mask, cache_modifier=".cs")
