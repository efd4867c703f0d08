// Between rungs 2 and 3, parallel: one block a row as before, but the whole block reduces, by a tree of shuffles
// within each warp and one over the warps. Still three passes over the row: the max, the sum, the output; the
// second and third find it in the cache if it is short enough.
//
// What is left to gain: two of the three passes, by the online softmax and by keeping the row in registers.

#include "common.cuh"

struct Max {
    static __device__ Acc identity() { return lowest(Acc()); }
    static __device__ Acc of(Acc a, Acc b) { return fmax(a, b); }
};
struct Sum {
    static __device__ Acc identity() { return 0; }
    static __device__ Acc of(Acc a, Acc b) { return a + b; }
};

template <class Op> __device__ Acc reduce_warp(Acc value) {
    for (int distance = 16; distance > 0; distance /= 2)
        value = Op::of(value, __shfl_xor_sync(0xffffffff, value, distance));
    return value;
}

// Every thread of the block gets the result.
template <class Op> __device__ Acc reduce_block(Acc value) {
    __shared__ Acc partial[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = reduce_warp<Op>(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = reduce_warp<Op>(lane < warps ? partial[lane] : Op::identity());
    __syncthreads();  // partial is free again
    return value;
}

extern "C" __global__ void softmax_parallel(const In* x, Out* out, Layout layout) {
    for (long long row = blockIdx.x; row < layout.rows; row += gridDim.x) {
        const In* in = layout.x_row(x, row);
        Out* to = layout.out_row(out, row);

        Acc max = lowest(Acc());
        for (long long c = threadIdx.x; c < layout.cols; c += blockDim.x)
            max = fmax(max, to_acc(in[c * layout.x_col]));
        const Acc shift = shift_for(reduce_block<Max>(max));

        Acc sum = 0;
        for (long long c = threadIdx.x; c < layout.cols; c += blockDim.x)
            sum += exponential(to_acc(in[c * layout.x_col]) - shift);
        sum = reduce_block<Sum>(sum);

        for (long long c = threadIdx.x; c < layout.cols; c += blockDim.x)
            from_acc(to[c * layout.inner], normalize(to_acc(in[c * layout.x_col]) - shift, sum));
    }
}
