// softmax_backward.cu's gradient where rows lie side by side: softmax over another axis than the last.
//
// A block takes a tile: LANES packs of WIDE neighboring rows, all of their columns, which its groups of LANES threads
// take in turn. It goes through y and dy twice, for the sums and for the gradient. Macros beside those of common.cuh:
//   WIDE    elements a pack, each of another row: 16 bytes of input, or 1
//   LANES   threads side by side along the rows, a power of two up to 32

#include "common.cuh"
#include "fused_memory.cuh"

constexpr int kThreads = 256;
constexpr int kGroups = kThreads / LANES;
// Columns whose loads are in flight at once.
constexpr int kAtOnce = sizeof(Acc) == 8 ? 2 : 4;

__device__ __forceinline__ Acc term(Acc y, Acc dy) { return LOG ? dy : dy * y; }
__device__ __forceinline__ Acc gradient(Acc y, Acc dy, Acc sum) {
    return LOG ? dy - exponential(y) * sum : y * (dy - sum);
}

// take(place, y's pack, dy's pack) for a thread's columns: one of every kGroups from `first` on.
template <class Take>
__device__ __forceinline__ void for_each_column(const In* y, const In* dy, const Layout& layout, long long first,
                                                Take take) {
    for (long long base = first; base < layout.cols; base += kGroups * kAtOnce) {
        Pack<In> ys[kAtOnce], dys[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const long long at = (base + i * kGroups) * layout.inner;
            load(ys[i], y + at, base + i * kGroups < layout.cols);
            load(dys[i], dy + at, base + i * kGroups < layout.cols);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (base + i * kGroups < layout.cols) take((base + i * kGroups) * layout.inner, ys[i], dys[i]);
    }
}

// tiles: tiles side by side along the rows.
extern "C" __global__ void __launch_bounds__(kThreads)
    softmax_backward_columns(const In* y, Out* dx, const In* dy, Layout layout, int tiles) {
    __shared__ Acc partials[kGroups][LANES * kWide + 1];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    wait_for_predecessor();
    const long long blocks = layout.rows / layout.inner * tiles;
    for (long long block = blockIdx.x; block < blocks; block += gridDim.x) {  // once, but for the largest grids
        const long long row = (block % tiles * LANES + lane) * kWide;
        const bool in_range = row < layout.inner;
        const long long first = in_range ? group : layout.cols;
        const long long start = block / tiles * layout.cols * layout.inner + (in_range ? row : 0);

        Acc sums[kWide], lost[kWide];
#pragma unroll
        for (int i = 0; i < kWide; ++i) sums[i] = lost[i] = 0;
        for_each_column(y + start, dy + start, layout, first,
                        [&](long long, const Pack<In>& y_pack, const Pack<In>& dy_pack) {
#pragma unroll
                            for (int i = 0; i < kWide; ++i)
                                add(sums[i], lost[i], term(element(y_pack, i), element(dy_pack, i)));
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
        for_each_column(y + start, dy + start, layout, first,
                        [&](long long at, const Pack<In>& y_pack, const Pack<In>& dy_pack) {
                            Pack<Out> result;
                            fill(result,
                                 [&](int i) { return gradient(element(y_pack, i), element(dy_pack, i), sums[i]); });
                            store(dx + start + at, result);
                        });
        __syncthreads();  // before the next tile's partials
    }
}
