// softmax_backward.cu's gradient where rows lie side by side: softmax over another axis than the last.
//
// A block takes a tile: LANES packs of WIDE neighboring rows, all of their columns, which its groups of LANES threads
// take in turn. It goes through y and dy twice, for the sums and for the gradient. Macros beside those of common.cuh:
//   WIDE    elements a pack, each of another row: 16 bytes of input, or 1
//   LANES   threads side by side along the rows, a power of two up to 32
// and those of fused_scores.cuh.

#include "common.cuh"
#include "fused_gradient.cuh"
#include "fused_memory.cuh"

constexpr int kThreads = 256;
constexpr int kGroups = kThreads / LANES;
// Columns whose loads are in flight at once.
constexpr int kAtOnce = sizeof(Acc) == 8 || MASK == 1 ? 2 : 4;

// take(column, y's pack, dy's pack, the mask's) for a thread's columns: one of every kGroups from `first` on.
template <class Take>
__device__ __forceinline__ void for_each_column(const In* y, const In* dy, const Layout& layout, long long first,
                                                const Screen<true>& screen, Take take) {
    for (long long base = first; base < layout.cols; base += kGroups * kAtOnce) {
        Pack<In> ys[kAtOnce], dys[kAtOnce];
        Keep keeps[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const long long col = base + i * kGroups;
            load(ys[i], y + col * layout.inner, col < layout.cols);
            load(dys[i], dy + col * layout.inner, col < layout.cols);
            keeps[i] = screen.keep(col, col < layout.cols);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (base + i * kGroups < layout.cols) take(base + i * kGroups, ys[i], dys[i], keeps[i]);
    }
}

// tiles: tiles side by side along the rows.
extern "C" __global__ void __launch_bounds__(kThreads, sizeof(Acc) == 8 ? 2 : 1)
    softmax_backward_columns(const In* y, Out* dx, const In* dy, SCORES_PARAMETERS Layout layout, int tiles) {
    const Scores scores = SCORES_ARGUMENTS;
    __shared__ Acc partials[kGroups][LANES * kWide + 1];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    wait_for_predecessor();
    const long long blocks = layout.rows / layout.inner * tiles;
    for (long long block = blockIdx.x; block < blocks; block += gridDim.x) {  // once, but for the largest grids
        const long long row = (block % tiles * LANES + lane) * kWide;
        const bool in_range = row < layout.inner;
        const long long first = in_range ? group : layout.cols;
        const long long plane = block / tiles, start = plane * layout.cols * layout.inner + (in_range ? row : 0);
        const Screen<true> screen = scores.screen<true>(plane * layout.inner + (in_range ? row : 0), layout.cols);

        Acc sums[kWide], lost[kWide];
#pragma unroll
        for (int i = 0; i < kWide; ++i) sums[i] = lost[i] = 0;
        for_each_column(y + start, dy + start, layout, first, screen,
                        [&](long long col, const Pack<In>& y_pack, const Pack<In>& dy_pack, const Keep& keep) {
#pragma unroll
                            for (int i = 0; i < kWide; ++i)
                                add(sums[i], lost[i],
                                    term(element(y_pack, i), element(dy_pack, i), screen.counts(keep, col, i)));
                        });
#pragma unroll
        for (int i = 0; i < kWide; ++i) partials[group][lane * kWide + i] = sums[i];
        __syncthreads();
        for (int r = threadIdx.x; r < LANES * kWide; r += kThreads) {
            Acc sum = 0;
            for (int g = 0; g < kGroups; ++g) sum += partials[g][r];
            partials[0][r] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kWide; ++i) sums[i] = partials[0][lane * kWide + i];
        for_each_column(y + start, dy + start, layout, first, screen,
                        [&](long long col, const Pack<In>& y_pack, const Pack<In>& dy_pack, const Keep& keep) {
                            Pack<Out> result;
                            fill(result, [&](int i) {
                                return gradient(element(y_pack, i), element(dy_pack, i), sums[i],
                                                screen.counts(keep, col, i), scores);
                            });
                            store(dx + start + col * layout.inner, result);
                        });
        __syncthreads();  // before the next tile's partials
    }
}
