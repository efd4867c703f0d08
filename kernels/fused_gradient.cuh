#pragma once
// The arithmetic of softmax's gradient, from y, the output, and dy, the gradient of what follows:
//
//   softmax       dx = y (dy - sum(dy y))
//   log-softmax   dx = dy - exp(y) sum(dy)
//
// both times the scale, and 0 for elements that a mask or causality keeps out (fused_scores.cuh).

#include "fused_scores.cuh"

// What an element adds to the sum. One that is kept out still has its dy in log-softmax's, as in PyTorch.
__device__ __forceinline__ Acc term(Acc y, Acc dy, bool counts) {
    if constexpr (LOG) return dy;
    return counts ? dy * y : Acc(0);
}
__device__ __forceinline__ Acc gradient(Acc y, Acc dy, Acc sum, bool counts, const Scores& scores) {
    const Acc dx = LOG ? dy - exponential(y) * sum : y * (dy - sum);
#if SCORES
    return counts ? dx * scores.scale : Acc(0);
#else
    return dx;
#endif
}
