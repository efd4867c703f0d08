// The gradient of softmax and log-softmax (fused_gradient.cuh): y and dy are read once, dx is written once.
//
// A team of threads shares a row, as in softmax_fused.cu: lanes of a warp, a block or a cluster of blocks. Each thread
// holds its packs of y and dy in registers. Only the sum is to be agreed on; it travels as a Partial with max 0. Rows
// are contiguous, and lie in y, dy and dx alike. Macros beside those of common.cuh (IN is y's and dy's type, OUT dx's):
//   TEAM       lanes that share a row, a power of two up to 32; 0: the whole block
//   CLUSTER    blocks of a cluster that share a row; 1: no cluster
//   VECTORS    packs of y, and of dy, that a thread holds in registers
//   STREAMED   1: there is more than the team can hold, which is read a second time
//   WIDE       elements a pack: 16 bytes of input
//   THREADS, BLOCKS   most threads a block, fewest blocks a multiprocessor: the register budget
// and those of fused_scores.cuh.

#include "common.cuh"
#include "fused_gradient.cuh"
#include "fused_memory.cuh"
#include "fused_team.cuh"

constexpr int kLanes = TEAM ? TEAM : 32;
// Elements outside the packs of a row that one thread may have to take.
constexpr int kSingles = TEAM ? (2 * (kWide - 1) + kLanes - 1) / kLanes : 1;

// Packs of y and dy at one column; absent ones are zeros, which change no sum.
struct Pair {
    Pack<In> y, dy;
    Keep keep;

    __device__ __forceinline__ void load_from(const In* y_row, const In* dy_row, long long col, bool exists,
                                              const Screen<false>& screen) {
#pragma unroll
        for (int i = 0; i < int(sizeof(y) / 4); ++i) y.words[i] = dy.words[i] = 0;
        const bool counts = exists && screen.reaches(col);
        load(y, y_row + col, counts);
        load(dy, dy_row + col, LOG ? exists : counts);
        keep = screen.keep(col, counts);
    }
    __device__ __forceinline__ Acc sum(long long col, const Screen<false>& screen) const {
        Acc found = 0;
#pragma unroll
        for (int i = 0; i < kWide; ++i)
            found += term(element(y, i), element(dy, i), screen.counts(keep, col, i));
        return found;
    }
    __device__ __forceinline__ void store_gradient(Out* to, Acc sum, long long col, const Screen<false>& screen,
                                                   const Scores& scores) const {
        Pack<Out> result;
        fill(result, [&](int i) {
            return gradient(element(y, i), element(dy, i), sum, screen.counts(keep, col, i), scores);
        });
        store(to + col, result);
    }
};

template <class Others>
__device__ __forceinline__ void gradient_of_part(const In* y, const In* dy, Out* dx, const Layout& layout,
                                                 const Scores& scores, long long row, uint part, uint parts,
                                                 Others& others) {
    __shared__ Partial warp_slots[32];
    const uint zero = uint(layout.rows >> 62);  // see keep_packed
    const int lane = threadIdx.x % kLanes;
    const int member = TEAM ? lane : threadIdx.x;
    const int members = TEAM ? kLanes : blockDim.x;
    const bool in_range = row < layout.rows;
    const long long start = (in_range ? row : 0) * layout.cols;
    y += start, dy += start, dx += start;
    const Span<TEAM ? kWide : kLine> span(y, dx, layout.cols);
    const Screen<false> screen = scores.screen<false>(in_range ? row : 0, layout.cols);

    // This block's packs of the row: whole lines; and of these, each warp holds a contiguous run.
    const uint share = CLUSTER > 1 ? (span.vectors + parts * 8 - 1) / (parts * 8) * 8 : span.vectors;
    const uint begin = min(part * share, span.vectors);
    const uint count = in_range ? min(share, span.vectors - begin) : 0;
    const uint first = (TEAM ? 0 : threadIdx.x / 32 * VECTORS * 32) + lane;
    const int left = int(count) - int(first);  // the thread has its pack v if v * kLanes < left
    const long long at = span.head + (long long)begin * kWide, run = at + (long long)first * kWide;

    Pair pairs[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        pairs[v].load_from(y, dy, run + v * kLanes * kWide, v * kLanes < left, screen);
    const bool has_singles = part == 0 && in_range && (span.head || span.tail);
    Acc single_y[kSingles], single_dy[kSingles];
    long long singles[kSingles];
    bool counts[kSingles];
#pragma unroll
    for (int s = 0; s < kSingles; ++s) {
        singles[s] = has_singles ? span.single(member + s * kLanes) : -1;
        single_y[s] = singles[s] >= 0 ? to_acc(y[singles[s]]) : Acc(0);
        single_dy[s] = singles[s] >= 0 ? to_acc(dy[singles[s]]) : Acc(0);
        counts[s] = singles[s] >= 0 && screen.counts(singles[s]);
    }
    let_successor_start();

    Acc sum = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) sum += pairs[v].sum(run + v * kLanes * kWide, screen);
#pragma unroll
    for (int s = 0; s < kSingles; ++s) sum += term(single_y[s], single_dy[s], counts[s]);
    if constexpr (STREAMED) {
        Acc lost = 0;  // any number of them: compensated
        for (uint p = VECTORS * members + member; p < count; p += members) {
            Pair pair;
            pair.load_from(y, dy, at + (long long)p * kWide, true, screen);
            add(sum, lost, pair.sum(at + (long long)p * kWide, screen));
        }
    }
    sum = sum_over_lanes<kLanes>(sum);
    if constexpr (!TEAM) sum = sum_over_block(sum, warp_slots);
    sum = others.merge({Acc(0), sum}).sum;

#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        keep_packed(pairs[v].y, zero);
        keep_packed(pairs[v].dy, zero);
        if (v * kLanes < left) pairs[v].store_gradient(dx, sum, run + v * kLanes * kWide, screen, scores);
    }
    if constexpr (STREAMED) {
        for (uint p = VECTORS * members + member; p < count; p += members) {
            Pair pair;
            pair.load_from(y, dy, at + (long long)p * kWide, true, screen);
            pair.store_gradient(dx, sum, at + (long long)p * kWide, screen, scores);
        }
    }
#pragma unroll
    for (int s = 0; s < kSingles; ++s)
        if (singles[s] >= 0)
            from_acc(dx[singles[s]], gradient(single_y[s], single_dy[s], sum, counts[s], scores));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_backward(const In* y, Out* dx, const In* dy, SCORES_PARAMETERS Layout layout) {
    const Scores scores = SCORES_ARGUMENTS;
#if CLUSTER > 1
    __shared__ Partial block_slots[CLUSTER];
    Cluster others(block_slots, scores.abs_scale());
    const uint part = block_in_cluster(), parts = CLUSTER;
#else
    Alone others;
    constexpr uint part = 0, parts = 1;
#endif
    wait_for_predecessor();
    const long long row = TEAM ? ((long long)blockIdx.x * blockDim.x + threadIdx.x) / kLanes : blockIdx.x / parts;
    gradient_of_part(y, dy, dx, layout, scores, row, part, parts, others);
}
