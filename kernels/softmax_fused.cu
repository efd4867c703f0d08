// Rung 3, fused: the row is read once, kept on the chip, and written once.
//
// A team of threads shares a row: some lanes of a warp for short rows, a block for longer ones, a cluster of
// blocks for the longest. Each thread holds its part in registers and, past that, in slots of shared memory of
// its own; what the chip can't hold is read a second time. Every thread takes the max of its part, every warp
// the sum relative to its own max, and the partials (max, sum) merge upward as in the online softmax.
//
// What is gained over the rung before: one read instead of three, wide accesses, and all loads in flight at once.
//
// Rows are contiguous here; softmax_fused_strided.cu has the rest. Macros beside those of common.cuh:
//   TEAM       lanes that share a row, a power of two up to 32; 0: the whole block
//   CLUSTER    blocks that share a row
//   VECTORS    packs of WIDE elements that a thread holds in registers
//   SHARED     1: it may hold `shared_vectors` more in shared memory
//   STREAMED   1: there is more than the team can hold, which is read a second time
//   WIDE       elements a pack: 16 bytes of input, or 1
//   CONGRUENT  1: where packs of the output are aligned, so are those of the input
//   THREADS, BLOCKS   most threads a block, fewest blocks a multiprocessor: the register budget

#include "common.cuh"
#include "fused_memory.cuh"
#include "fused_team.cuh"

constexpr int kLanes = TEAM ? TEAM : 32;
// Elements outside the vectors of a row that one thread may have to take.
constexpr int kSingles = kWide == 1 ? 0 : TEAM ? (2 * (kWide - 1) + kLanes - 1) / kLanes : 1;
// Terms stay in registers where that takes no more of them; half types are stored packed and exponentiated twice.
constexpr bool kKeepTerms = !LOG && (sizeof(In) == sizeof(Acc) || VECTORS * kWide <= 32);

__device__ __forceinline__ Acc max_of(const Pack<In>& pack, Acc max) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) max = fmax(max, to_acc(pack.at[i]));
    return max;
}

__device__ __forceinline__ Acc sum_of(const Pack<In>& pack, Acc shift) {
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < kWide; ++i) sum += exponential(to_acc(pack.at[i]) - shift);
    return sum;
}

// The online update of Milakov & Gimelshein, algorithm 3, a pack at a time.
__device__ __forceinline__ void take_online(Partial& partial, const Pack<In>& pack) {
    const Acc max = max_of(pack, partial.max);
    partial.sum = partial.sum * rescale(partial.max, max) + sum_of(pack, shift_for(max));
    partial.max = max;
}

__device__ __forceinline__ Pack<Out> finish_pack(const Finish& finish, const Pack<In>& pack) {
    Pack<Out> result;
#pragma unroll
    for (int i = 0; i < kWide; ++i) from_acc(result.at[i], finish(to_acc(pack.at[i])));
    return result;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    kernel(const In* x, Out* out, Layout layout, int shared_vectors) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Partial warp_slots[32];
    Pack<In>* slots = reinterpret_cast<Pack<In>*>(memory) + threadIdx.x;
#if CLUSTER > 1
    __shared__ Partial block_slots[CLUSTER];
    const uint part = block_in_cluster();
    cluster_arrive();  // a block that hasn't started can't be written to: waited for before that is done
#else
    const uint part = 0;
#endif
    wait_for_predecessor();

    // Several short rows a block, one row a block, or one row a cluster.
    const int lane = threadIdx.x % kLanes;
    const int member = TEAM ? lane : threadIdx.x;
    const int members = TEAM ? kLanes : blockDim.x;
    const long long row = TEAM ? ((long long)blockIdx.x * blockDim.x + threadIdx.x) / kLanes : blockIdx.x / CLUSTER;
    const bool in_range = row < layout.rows;
    const In* in = x + (in_range ? row : 0) * layout.x_outer;
    Out* to = out + (in_range ? row : 0) * layout.cols;
    const Span span(in, to, layout.cols);

    // This block's vectors of the row: whole lines, so that no two blocks read the same one.
    const uint share = CLUSTER > 1 ? (span.vectors + CLUSTER * 8 - 1) / (CLUSTER * 8) * 8 : span.vectors;
    const uint begin = min(part * share, span.vectors);
    const uint count = in_range ? min(share, span.vectors - begin) : 0;
    const In* in_part = in + span.head + (long long)begin * kWide;
    Out* to_part = to + span.head + (long long)begin * kWide;

    // Of these, each warp holds a contiguous run: DRAM likes that better than a stride of the whole block.
    const uint held = VECTORS + (SHARED ? shared_vectors : 0);
    const uint first = (TEAM ? 0 : threadIdx.x / 32 * held * 32) + lane;
    const int left = int(count) - int(first);  // the thread has its vector v if v * kLanes < left
    const In* in_run = in_part + (long long)first * kWide;
    Out* to_run = to_part + (long long)first * kWide;

    Pack<In> packs[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) packs[v].at[i] = lowest(In());
        load(packs[v], in_run + v * kLanes * kWide, v * kLanes < left);
    }
    if constexpr (SHARED)
        for (int v = 0; v < shared_vectors; ++v)
            if ((VECTORS + v) * 32 < left)
                load_async(slots + v * blockDim.x, in_run + (VECTORS + v) * 32 * kWide);
    Acc singles[kSingles + 1];
    const bool has_singles = kSingles && part == 0 && in_range;
#pragma unroll
    for (int s = 0; s < kSingles; ++s) {
        const long long at = span.single(member + s * kLanes);
        singles[s] = has_singles && at >= 0 ? to_acc(in[at]) : lowest(Acc());
    }
    let_successor_start();

    // The max of what this thread holds; then, online, the max and the sum of what it doesn't.
    Partial mine = Partial::empty();
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) mine.max = max_of(packs[v], mine.max);
#pragma unroll
    for (int s = 0; s < kSingles; ++s) mine.max = fmax(mine.max, singles[s]);
    if constexpr (SHARED) {
        wait_for_async();
        for (int v = 0; v < shared_vectors; ++v)
            if ((VECTORS + v) * 32 < left) mine.max = max_of(slots[v * blockDim.x], mine.max);
    }
    if constexpr (STREAMED)
        for (uint at = held * members + member; at < count; at += members) {
            Pack<In> pack;
            load(pack, in_part + (long long)at * kWide, true);
            take_online(mine, pack);
        }

    // The warp's max (or the short row's), and the sum relative to it.
    Partial partial;
    partial.max = max_over_lanes<kLanes>(mine.max);
    const Acc shift = shift_for(partial.max);
    Acc sum = STREAMED ? mine.sum * rescale(mine.max, partial.max) : Acc(0);
    Acc terms[kKeepTerms ? VECTORS * kWide : 1];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if constexpr (!kKeepTerms) keep_packed(packs[v]);
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
            const Acc term = exponential(to_acc(packs[v].at[i]) - shift);
            sum += term;
            if constexpr (kKeepTerms) terms[v * kWide + i] = term;
        }
    }
#pragma unroll
    for (int s = 0; s < kSingles; ++s) sum += exponential(singles[s] - shift);
    if constexpr (SHARED)
        for (int v = 0; v < shared_vectors; ++v)
            if ((VECTORS + v) * 32 < left) sum += sum_of(slots[v * blockDim.x], shift);
    partial.sum = sum_over_lanes<kLanes>(sum);

    const Acc own_max = partial.max;
    if constexpr (!TEAM) partial = merge_over_block(partial, warp_slots);
#if CLUSTER > 1
    cluster_wait();  // every block has started
    partial = merge_over_cluster(partial, block_slots);
#endif
    const Finish finish(partial);

    const Acc term_factor = rescale(own_max, partial.max) * finish.factor;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (v * kLanes >= left) continue;
        if constexpr (kKeepTerms) {
            Pack<Out> result;
#pragma unroll
            for (int i = 0; i < kWide; ++i) from_acc(result.at[i], terms[v * kWide + i] * term_factor);
            store(to_run + v * kLanes * kWide, result);
        } else {
            keep_packed(packs[v]);
            store(to_run + v * kLanes * kWide, finish_pack(finish, packs[v]));
        }
    }
    if constexpr (SHARED)
        for (int v = 0; v < shared_vectors; ++v)
            if ((VECTORS + v) * 32 < left)
                store(to_run + (VECTORS + v) * 32 * kWide, finish_pack(finish, slots[v * blockDim.x]));
    if constexpr (STREAMED)
        for (uint at = held * members + member; at < count; at += members) {
            Pack<In> pack;
            load(pack, in_part + (long long)at * kWide, true);
            store(to_part + (long long)at * kWide, finish_pack(finish, pack));
        }
#pragma unroll
    for (int s = 0; s < kSingles; ++s) {
        const long long at = span.single(member + s * kLanes);
        if (has_singles && at >= 0) from_acc(to[at], finish(singles[s]));
    }
}
