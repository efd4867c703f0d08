// Rung 3 for whatever else there is: any strides, rows of any length. softmax_fused_columns.cu is faster where rows lie
// side by side.
//
// A block takes LANES neighboring rows, a lane each, and walks along their columns with several threads a row.
// Lanes read neighboring addresses wherever neighboring rows lie side by side; where columns do instead, tiles
// are turned over in shared memory, on the way in, on the way out, or both. Each thread keeps an online
// (max, sum) of its columns, and the row is read a second time for the output. The online softmax is that of
// Milakov & Gimelshein 2018, arXiv:1805.02867.
//
// Macros beside those of common.cuh:
//   LANES               rows a block, a power of two up to 32
//   TURN_IN, TURN_OUT   1: the columns of the input (of the output) lie side by side, its rows don't
// and those of fused_scores.cuh.

#define WIDE 1

#include "common.cuh"
#include "fused_scores.cuh"
#include "fused_team.cuh"

constexpr int kThreads = 256;
constexpr int kSharing = kThreads / LANES;  // threads that share a row
constexpr int kEach = 8;                    // columns of a tile that one thread takes
constexpr int kColumns = kSharing * kEach;  // columns of a tile

typedef Acc Tile[kColumns][LANES + 1];  // one more than LANES, so that a column of it lies in different banks

// Copies a tile between shared and global memory, neighboring threads at neighboring columns.
template <class Copy>
__device__ __forceinline__ void for_each_in_tile(const Layout& layout, long long first_row, long long base, Copy copy) {
    for (int i = threadIdx.x; i < kColumns * LANES; i += kThreads) {
        const int c = i % kColumns, r = i / kColumns;
        if (base + c < layout.cols && first_row + r < layout.rows) copy(c, r);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    softmax_fused_strided(const In* x, Out* out, SCORES_PARAMETERS Layout layout) {
    const Scores scores = SCORES_ARGUMENTS;
    const Scale scale = scores.abs_scale();
    __shared__ Tile tile;
    __shared__ Partial partials[kSharing][LANES];
    const int lane = threadIdx.x % LANES, mine = threadIdx.x / LANES;

    const long long step = (long long)gridDim.x * LANES;
    for (long long first = (long long)blockIdx.x * LANES; first < layout.rows; first += step) {
        const bool in_range = first + lane < layout.rows;
        const In* in = layout.x_row(x, in_range ? first + lane : first);
        Out* to = layout.out_row(out, in_range ? first + lane : first);
        const Screen<false> screen = scores.screen<false>(in_range ? first + lane : first, layout.cols);

        // This thread's columns of the tile that begins at `base`; -inf where there is none.
        auto read = [&](long long base, Acc(&values)[kEach]) {
            if constexpr (TURN_IN) {
                __syncthreads();
                for_each_in_tile(layout, first, base, [&](int c, int r) {
                    tile[c][r] = to_acc(layout.x_row(x, first + r)[(base + c) * layout.x_col]);
                });
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int c = mine + i * kSharing;
                values[i] = lowest(Acc());
                if (in_range && base + c < layout.cols)
                    values[i] =
                        screen.apply(TURN_IN ? tile[c][lane] : to_acc(in[(base + c) * layout.x_col]), base + c);
            }
        };

        Partial partial = Partial::empty();
        Acc lost = 0;  // compensated: a thread may have any number of columns
        for (long long base = 0; base < layout.cols; base += kColumns) {
            Acc values[kEach];
            read(base, values);
            Acc max = partial.max;
#pragma unroll
            for (int i = 0; i < kEach; ++i) max = fmax(max, values[i]);
            const Acc factor = rescale(partial.max, max, scale);
            const Term term(max, scale);
            Acc sum = 0;
#pragma unroll
            for (int i = 0; i < kEach; ++i) sum += term(values[i]);
            partial = {max, partial.sum * factor};
            lost *= factor;
            add(partial.sum, lost, sum);
        }

        partials[mine][lane] = partial;
        for (int half = kSharing / 2; half > 0; half /= 2) {
            __syncthreads();
            if (mine < half) partials[mine][lane] = merge(partials[mine][lane], partials[mine + half][lane], scale);
        }
        __syncthreads();
        const Finish finish(partials[0][lane], scale);

        for (long long base = 0; base < layout.cols; base += kColumns) {
            Acc values[kEach];
            read(base, values);
            if constexpr (TURN_OUT) __syncthreads();
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int c = mine + i * kSharing;
                if constexpr (TURN_OUT)
                    tile[c][lane] = finish(values[i]);
                else if (in_range && base + c < layout.cols)
                    from_acc(to[(base + c) * layout.inner], finish(values[i]));
            }
            if constexpr (TURN_OUT) {
                __syncthreads();
                for_each_in_tile(layout, first, base, [&](int c, int r) {
                    from_acc(layout.out_row(out, first + r)[(base + c) * layout.inner], tile[c][r]);
                });
            }
        }
        __syncthreads();  // the next rows overwrite what a slower thread may still be reading
    }
}
