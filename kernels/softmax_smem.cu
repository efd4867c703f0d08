// Rung 2, shared memory: one block a row; the threads load the row together, so that a warp reads neighboring
// addresses, and everything after that works on chip.
//
// What is left to gain: both reductions are done by thread 0 alone while the others wait, and the row must fit
// in one block's shared memory.

#include "common.cuh"

extern "C" __global__ void softmax_smem(const In* x, Out* out, Layout layout) {
    extern __shared__ __align__(16) char memory[];
    In* row_values = reinterpret_cast<In*>(memory);
    __shared__ Acc shift, sum;

    for (long long row = blockIdx.x; row < layout.rows; row += gridDim.x) {
        const In* in = layout.x_row(x, row);
        Out* to = layout.out_row(out, row);

        for (long long c = threadIdx.x; c < layout.cols; c += blockDim.x)
            row_values[c] = in[c * layout.x_col];
        __syncthreads();

        if (threadIdx.x == 0) {
            Acc max = lowest(Acc());
            for (long long c = 0; c < layout.cols; ++c) max = fmax(max, to_acc(row_values[c]));
            shift = shift_for(max);
            Acc total = 0, lost = 0;  // compensated, as in rung 1
            for (long long c = 0; c < layout.cols; ++c)
                add(total, lost, exponential(to_acc(row_values[c]) - shift));
            sum = total;
        }
        __syncthreads();

        for (long long c = threadIdx.x; c < layout.cols; c += blockDim.x)
            from_acc(to[c * layout.inner], normalize(to_acc(row_values[c]) - shift, sum));
        __syncthreads();  // the next row overwrites what a slower thread may still be reading
    }
}
