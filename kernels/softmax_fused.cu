// Rung 3, fused: the row is read once, kept on the chip, and written once.
//
// A team of threads shares a row: some lanes of a warp for short rows, a block for longer ones, a cluster of
// blocks or the whole grid for the longest. Each thread holds its part in registers and, past that, in slots of
// shared memory of its own; what the chip can't hold is read a second time. Where one block holds a row in
// registers, it takes the max and then the sum. Longer rows take the online softmax: each thread finds (max, sum)
// of its part as its loads arrive, and these partials merge upward.
//
// What is gained over the rung before: one read instead of three, wide accesses, and all loads in flight at once.
//
// Rows are contiguous here; softmax_fused_strided.cu has the rest. Macros beside those of common.cuh:
//   TEAM       lanes that share a row, a power of two up to 32; 0: the whole block
//   CLUSTER    blocks of a cluster that share a row; 1: no cluster
//   GRID       1: all blocks run at once, and gridDim.x / rows of them share each row
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
// Elements outside the packs of a row that one thread may have to take.
constexpr int kSingles = kWide == 1 ? 0 : TEAM ? (2 * (kWide - 1) + kLanes - 1) / kLanes : 1;
// The loads into shared memory come in groups, so that work on the first starts before the last has arrived.
constexpr int kGroups = 4;
// One block holds the row in registers.
constexpr bool kResident = CLUSTER == 1 && !GRID && !SHARED && !STREAMED;
// Then the terms stay there too, unless a half type's would take twice the room; others are computed twice.
constexpr bool kKeepTerms = kResident && !LOG && (sizeof(In) == sizeof(Acc) || VECTORS * kWide <= 32);
// Packs that are summed together, relative to one max: few, so that the work starts as the first arrive.
constexpr int kChunk = sizeof(In) == 2 ? 2 : 4;

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
    softmax_fused(const In* x, Out* out,
#if GRID
                  Partial* scratch,
#endif
                  Layout layout, int shared_vectors) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Partial warp_slots[32];
    Pack<In>* slots = reinterpret_cast<Pack<In>*>(memory) + threadIdx.x;
#if CLUSTER > 1
    __shared__ Partial block_slots[CLUSTER];
    const uint parts = CLUSTER, part = block_in_cluster();
    cluster_arrive();  // a block that hasn't started can't be written to: waited for before that is done
#elif GRID
    const uint parts = gridDim.x / uint(layout.rows), part = blockIdx.x % parts;
#else
    const uint parts = 1, part = 0;
#endif
    wait_for_predecessor();

    // Several short rows a block, one row a block, or one row several blocks.
    const int lane = threadIdx.x % kLanes;
    const int member = TEAM ? lane : threadIdx.x;
    const int members = TEAM ? kLanes : blockDim.x;
    const long long row = TEAM ? ((long long)blockIdx.x * blockDim.x + threadIdx.x) / kLanes : blockIdx.x / parts;
    const bool in_range = row < layout.rows;
    const In* in = x + (in_range ? row : 0) * layout.x_outer;
    Out* to = out + (in_range ? row : 0) * layout.cols;
    const Span span(in, to, layout.cols);

    // This block's vectors of the row: whole lines, so that no two blocks read the same one.
    const uint share = CLUSTER > 1 || GRID ? (span.vectors + parts * 8 - 1) / (parts * 8) * 8 : span.vectors;
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
    const int group = (shared_vectors + kGroups - 1) / kGroups;
    if constexpr (SHARED)
        for (int g = 0; g < kGroups; ++g) {
            for (int v = g * group; v < min(shared_vectors, (g + 1) * group); ++v)
                if ((VECTORS + v) * 32 < left)
                    load_async(slots + v * blockDim.x, in_run + (VECTORS + v) * 32 * kWide);
            end_group();
        }
    Acc singles[kSingles + 1];
    const bool has_singles = kSingles && part == 0 && in_range;
#pragma unroll
    for (int s = 0; s < kSingles; ++s) {
        const long long at = span.single(member + s * kLanes);
        singles[s] = has_singles && at >= 0 ? to_acc(in[at]) : lowest(Acc());
    }
    let_successor_start();

    Partial row_partial;
    Acc terms[kKeepTerms ? VECTORS * kWide : 1];
    if constexpr (kResident) {
        Acc max = lowest(Acc());
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) max = max_of(packs[v], max);
#pragma unroll
        for (int s = 0; s < kSingles; ++s) max = fmax(max, singles[s]);
        max = max_over_lanes<kLanes>(max);
        row_partial.max = TEAM ? max : max_over_block(max, warp_slots);

        const Acc shift = shift_for(row_partial.max);
        Acc sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            keep_packed(packs[v]);
#pragma unroll
            for (int i = 0; i < kWide; ++i) {
                const Acc term = exponential(to_acc(packs[v].at[i]) - shift);
                sum += term;
                if constexpr (kKeepTerms) terms[v * kWide + i] = term;
            }
        }
#pragma unroll
        for (int s = 0; s < kSingles; ++s) sum += exponential(singles[s] - shift);
        sum = sum_over_lanes<kLanes>(sum);
        row_partial.sum = TEAM ? sum : sum_over_block(sum, warp_slots);
    } else {
        // What this thread holds, as it arrives; then what is too much to hold.
        Partial mine = Partial::empty();
#pragma unroll
        for (int c = 0; c < VECTORS; c += kChunk) {
            Partial chunk = Partial::empty();
#pragma unroll
            for (int v = c; v < VECTORS && v < c + kChunk; ++v) chunk.max = max_of(packs[v], chunk.max);
#pragma unroll
            for (int v = c; v < VECTORS && v < c + kChunk; ++v) {
                keep_packed(packs[v]);
                chunk.sum += sum_of(packs[v], shift_for(chunk.max));
            }
            mine = c == 0 ? chunk : merge(mine, chunk);
        }
        if constexpr (SHARED) {
            auto take_group = [&](int g) {
                for (int v = g * group; v < min(shared_vectors, (g + 1) * group); ++v)
                    if ((VECTORS + v) * 32 < left) take_online(mine, read_slot(slots + v * blockDim.x));
            };
            wait_for_groups<3>(), take_group(0);
            wait_for_groups<2>(), take_group(1);
            wait_for_groups<1>(), take_group(2);
            wait_for_groups<0>(), take_group(3);
        }
#pragma unroll
        for (int s = 0; s < kSingles; ++s)
            if (singles[s] != lowest(Acc())) mine = merge(mine, {singles[s], Acc(1)});
        if constexpr (STREAMED) {
            Acc lost = 0;  // compensated: here a thread may have any number of packs
            for (uint at = held * members + member; at < count; at += members) {
                Pack<In> pack;
                load(pack, in_part + (long long)at * kWide, true);
                const Acc max = max_of(pack, mine.max), scale = rescale(mine.max, max);
                mine = {max, mine.sum * scale};
                lost *= scale;
                add(mine.sum, lost, sum_of(pack, shift_for(max)));
            }
        }

        row_partial = merge_over_lanes<kLanes>(mine);
        if constexpr (!TEAM) row_partial = merge_over_block(row_partial, warp_slots);
#if CLUSTER > 1
        cluster_wait();  // every block has started
        row_partial = merge_over_cluster(row_partial, block_slots);
#elif GRID
        row_partial = merge_over_grid(row_partial, scratch, parts);
#endif
    }
    const Finish finish(row_partial);

#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (v * kLanes >= left) continue;
        Pack<Out> result;
        if constexpr (kKeepTerms) {
#pragma unroll
            for (int i = 0; i < kWide; ++i) from_acc(result.at[i], terms[v * kWide + i] * finish.factor);
        } else {
            keep_packed(packs[v]);
            result = finish_pack(finish, packs[v]);
        }
        store(to_run + v * kLanes * kWide, result);
    }
    if constexpr (SHARED)
        for (int v = 0; v < shared_vectors; ++v)
            if ((VECTORS + v) * 32 < left)
                store(to_run + (VECTORS + v) * 32 * kWide, finish_pack(finish, read_slot(slots + v * blockDim.x)));
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
