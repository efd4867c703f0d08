// Rung 1, naive: one thread a row, three passes over global memory.
//
// Neighboring threads read addresses a whole row apart, so most of each 32-byte sector that arrives is thrown
// away, and with few rows most of the chip has nothing to do. The honest baseline.

#include "common.cuh"

extern "C" __global__ void softmax_naive(const In* x, Out* out, Layout layout) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x; row < layout.rows; row += step) {
        const In* in = layout.x_row(x, row);
        Out* to = layout.out_row(out, row);

        Acc max = lowest(Acc());
        for (long long c = 0; c < layout.cols; ++c) max = fmax(max, to_acc(in[c * layout.x_col]));
        const Acc shift = shift_for(max);

        Acc sum = 0, lost = 0;  // compensated: thousands of terms one by one would lose digits
        for (long long c = 0; c < layout.cols; ++c)
            add(sum, lost, exponential(to_acc(in[c * layout.x_col]) - shift));

        for (long long c = 0; c < layout.cols; ++c)
            from_acc(to[c * layout.inner], normalize(to_acc(in[c * layout.x_col]) - shift, sum));
    }
}
