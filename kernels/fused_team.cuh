#pragma once
// The online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867): the max and sum that one thread finds (Running, by
// algorithm 3), and how the threads that share a row agree on theirs, across lanes, warps and blocks (section 3.1).

#include "common.cuh"

#ifndef SCORES
#define SCORES 0
#endif

// The difference from a max, times what the kernel takes as a scale (fused_scores.cuh), if it does. Behind the
// subtraction the scale costs no accuracy; and halves, whose difference takes twice the scale, can't overflow.
struct Scale {
#if SCORES
    Acc twice;
    __device__ __forceinline__ Acc operator()(Acc x, Acc shift) const {
        return fma(x, Acc(0.5), Acc(-0.5) * shift) * twice;
    }
#else
    __device__ __forceinline__ Acc operator()(Acc x, Acc shift) const { return x - shift; }
#endif
};

// What is known of a part of a row: its max, and the sum of exp(x - max). A part that is empty, or saw nothing
// but -inf, has sum 0 and contributes nothing.
struct Partial {
    Acc max, sum;
    static __device__ Partial empty() { return {lowest(Acc()), Acc(0)}; }
};

// Where input and output are a half type, powers of 2 serve: 2^(x factor - shift factor), with the factor log2(e),
// takes one fused multiply-add where exp(x - shift) takes two instructions. What rounding does to the second product is
// the same for all terms and the sum, as long as it's rounded by itself (__fmul_rn). Past 65536 it would be too much;
// but there neighbors are hundreds apart, so that the terms are 0 and 1 at any factor, and 1 rounds nothing.
constexpr bool kBase2 = sizeof(In) == 2 && sizeof(Out) == 2 && !LOG && !SCORES;
constexpr float kLog2e = 1.44269504f;

template <class T> __device__ __forceinline__ float scale_for(T, float) { return kLog2e; }
__device__ __forceinline__ float scale_for(bfloat16, float shift) { return fabsf(shift) <= 65536.0f ? kLog2e : 1.0f; }

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// exp(x - shift) for a row's x, the difference scaled.
struct Term {
    Acc shift, factor;
    Scale scale;

    __device__ __forceinline__ Term(Acc max, Scale scale) : scale(scale) {
        shift = shift_for(max);
        if constexpr (kBase2) {
            factor = scale_for(In(), shift);
            shift = -__fmul_rn(shift, factor);
        }
    }
    __device__ __forceinline__ Acc operator()(Acc x) const {
        if constexpr (kBase2)
            return power_of_2(fmaf(x, factor, shift));
        else
            return exponential(scale(x, shift));
    }
    // For a sum only: by the hardware's exponential, whose rounded argument costs a term up to (shift - x) 2^-24 of
    // itself. In a sum that comes to less than 1e-6, as terms far below the max need a million others to matter.
    __device__ __forceinline__ Acc roughly(Acc x) const {
        if constexpr (!kBase2 && sizeof(Acc) == 4)
            return __expf(scale(x, shift));
        else
            return (*this)(x);
    }
};

// The factor that turns terms relative to one max into terms relative to a larger one.
__device__ __forceinline__ Acc rescale(Acc from_max, Acc to_max, Scale scale) {
    if constexpr (kBase2) {
        const Term to(to_max, scale);
        return power_of_2(__fmul_rn(from_max, to.factor) + to.shift);
    } else
        return exponential(scale(from_max, shift_for(to_max)));
}

__device__ __forceinline__ Partial merge(Partial a, Partial b, Scale scale) {
    const Acc max = fmax(a.max, b.max);
    return {max, a.sum * rescale(a.max, max, scale) + b.sum * rescale(b.max, max, scale)};
}

// What one thread knows of its part of the row. COMPENSATED: what rounding takes from the sum is given back to it, so
// that it may have any number of terms.
template <bool COMPENSATED> struct Running {
    Scale scale;
    Partial partial = Partial::empty();
    Acc lost = 0;

    __device__ __forceinline__ explicit Running(Scale scale) : scale(scale) {}
    __device__ __forceinline__ void raise_max(Acc max) {
        const Acc factor = rescale(partial.max, max, scale);
        partial = {max, partial.sum * factor};
        if constexpr (COMPENSATED) lost *= factor;
    }
    __device__ __forceinline__ void add_terms(Acc sum) {
        if constexpr (COMPENSATED)
            add(partial.sum, lost, sum);
        else
            partial.sum += sum;
    }
    __device__ __forceinline__ void take(Acc single) {
        raise_max(fmax(partial.max, single));
        add_terms(Term(partial.max, scale).roughly(single));
    }
};

// From x to the output, once the whole row's max and sum are known.
struct Finish {
    Term term;
    Acc factor;  // softmax: term(x) * factor; log-softmax: x - shift, scaled, - factor

    __device__ Finish(Partial row, Scale scale) : term(row.max, scale), factor(LOG ? log(row.sum) : 1 / row.sum) {}
    __device__ Acc operator()(Acc x) const {
        return LOG ? term.scale(x, term.shift) - factor : term(x) * factor;
    }
};

template <int N> __device__ __forceinline__ Acc max_over_lanes(Acc value) {
#pragma unroll
    for (int distance = N / 2; distance > 0; distance /= 2)
        value = fmax(value, __shfl_xor_sync(0xffffffff, value, distance));
    return value;
}
template <int N> __device__ __forceinline__ Acc sum_over_lanes(Acc value) {
#pragma unroll
    for (int distance = N / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffff, value, distance);
    return value;
}

// Each of N neighboring lanes brings a partial and gets them all merged: the max first, then one rescaling each,
// which takes fewer exponentials than merging pair by pair.
template <int N> __device__ __forceinline__ Partial merge_over_lanes(Partial mine, Scale scale) {
    const Acc max = max_over_lanes<N>(mine.max);
    return {max, sum_over_lanes<N>(mine.sum * rescale(mine.max, max, scale))};
}

// `read(i)` for i < count, merged by a warp; all its lanes get the result.
template <class Read> __device__ __forceinline__ Partial merge_list(int count, Scale scale, Read read) {
    const int lane = threadIdx.x % 32;
    Partial mine = lane < count ? read(lane) : Partial::empty();
#pragma unroll 1
    for (int i = lane + 32; i < count; i += 32) mine = merge(mine, read(i), scale);
    return merge_over_lanes<32>(mine, scale);
}

// Across all warps of the block: each warp's lane 0 leaves its result in `slots`, which has a place a warp, and
// after one barrier every warp reads them all. A field of `slots` may be used once.
__device__ __forceinline__ Partial merge_over_block(Partial of_warp, Partial* slots, Scale scale) {
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = of_warp;
    __syncthreads();
    return merge_list(blockDim.x / 32, scale, [&](int i) { return slots[i]; });
}
__device__ __forceinline__ Acc max_over_block(Acc of_warp, Partial* slots) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) slots[threadIdx.x / 32].max = of_warp;
    __syncthreads();
    return max_over_lanes<32>(lane < blockDim.x / 32 ? slots[lane].max : lowest(Acc()));
}
__device__ __forceinline__ Acc sum_over_block(Acc of_warp, Partial* slots) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) slots[threadIdx.x / 32].sum = of_warp;
    __syncthreads();
    return sum_over_lanes<32>(lane < blockDim.x / 32 ? slots[lane].sum : Acc(0));
}

// Who else has a part of the row: nobody.
struct Alone {
    __device__ Partial merge(Partial mine) { return mine; }
};

#if defined(CLUSTER) && CLUSTER > 1
__device__ __forceinline__ uint block_in_cluster() {
    uint rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Says only that this block has started.
__device__ __forceinline__ void cluster_arrive_first() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where `mine`, a variable in this block's shared memory, lies in that of another block of the cluster.
__device__ __forceinline__ uint in_block(const void* mine, int block) {
    uint there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(uint(__cvta_generic_to_shared(mine))), "r"(block));
    return there;
}
__device__ __forceinline__ void store_in_block(uint there, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
__device__ __forceinline__ void store_in_block(uint there, double value) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"(value) : "memory");
}

// The other blocks of the cluster. Each writes its partial into every other's shared memory, so that after the barrier
// all reads are local and a block may exit without being missed.
struct Cluster {
    Partial* slots;  // shared; one a block
    Scale scale;

    __device__ Cluster(Partial* slots, Scale scale) : slots(slots), scale(scale) {
        cluster_arrive_first();  // a block that hasn't started can't be written to: merge waits
    }
    __device__ Partial merge(Partial mine) {
        cluster_wait();
        if (threadIdx.x < CLUSTER) {
            Partial* slot = slots + block_in_cluster();
            store_in_block(in_block(&slot->max, threadIdx.x), mine.max);
            store_in_block(in_block(&slot->sum, threadIdx.x), mine.sum);
        }
        cluster_arrive();
        cluster_wait();
        return merge_list(CLUSTER, scale, [&](int i) { return slots[i]; });
    }
};
#endif

#if defined(GRID) && GRID
// The other blocks of the grid that share the row: all must be running, which a cooperative launch guarantees.
struct Grid {
    Partial* partials;  // in global memory; one a block
    uint parts;         // neighboring blocks that share a row
    Scale scale;

    __device__ Partial merge(Partial mine) {
        __shared__ Partial merged;
        if (threadIdx.x == 0) partials[blockIdx.x] = mine;
        wait_for_all();
        const volatile Partial* row = partials + blockIdx.x / parts * parts;
        auto read = [&](int i) { return Partial{row[i].max, row[i].sum}; };
        if (parts <= 32) return merge_list(parts, scale, read);
        // Where so many blocks share the row, one warp reads for its block: if all did, they'd queue for the same few
        // lines of the L2 cache.
        if (threadIdx.x < 32) {
            const Partial found = merge_list(parts, scale, read);
            if (threadIdx.x == 0) merged = found;
        }
        __syncthreads();
        return merged;
    }

    // As in CUDA's cooperative groups (cooperative_groups/details/driver_abi.h), the driver passes the address of a
    // counter for each cooperative launch in two registers. The counter's top bit flips once every block has come,
    // which leaves it ready again.
    __device__ static void wait_for_all() {
        __syncthreads();
        if (threadIdx.x == 0) {
            uint high, low;
            asm("mov.u32 %0, %%envreg1;" : "=r"(high));
            asm("mov.u32 %0, %%envreg2;" : "=r"(low));
            const address_t counter = (address_t(high) << 32 | low) + sizeof(uint);
            const uint arrival = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
            uint before, now;
            asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;"
                         : "=r"(before)
                         : "l"(counter), "r"(arrival)
                         : "memory");
            do {
                asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
            } while (((before ^ now) & 0x80000000u) == 0);
        }
        __syncthreads();
    }
};
#endif
