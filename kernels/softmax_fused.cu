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
//   CONGRUENT  1: input and output are in step, so that the packs of both are aligned
//   THREADS, BLOCKS   most threads a block, fewest blocks a multiprocessor: the register budget
// and those of fused_scores.cuh, for a scale, a mask and causality.
//
// What that comes to for float32 on an H200 (minikernel/backends/cuda_fused.py chooses):
//   65536 x 128      TEAM 16, VECTORS 2                             8 rows a block of 128 threads
//   32768 x 4096     TEAM 0, VECTORS 4                              a row a block of 256 threads
//   2048 x 128256    TEAM 0, CLUSTER 8, VECTORS 4, SHARED 1         a row 8 such blocks
//   8 x 1048576      TEAM 0, GRID 1, VECTORS 4, SHARED 1            a row 16 blocks of 512 threads
//
// Read it in that order: what is kResident first, the rest (Running of fused_team.cuh, clusters, the grid) after.

#include "common.cuh"
#include "fused_memory.cuh"
#include "fused_scores.cuh"
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
// Where registers are few, packs of a half type are unpacked twice.
#if __CUDA_ARCH__ >= 1000
constexpr bool kKeepPacked = !kKeepTerms && VECTORS >= 3;
#else
constexpr bool kKeepPacked = !kKeepTerms && VECTORS >= 4;
#endif
// Packs that are summed together, relative to one max: few, so that the work starts as the first arrive.
constexpr int kChunk = sizeof(In) == 2 ? 2 : 4;

// Lanes of a warp peel to a pack, a block to a whole line, so that no two warps touch one.
constexpr int kPeel = TEAM ? kWide : kLine;

template <class T> __device__ __forceinline__ Acc max_of(const Pack<T>& pack, Acc max) {
#if __CUDA_ARCH__ >= 800
    // Packs that stay packed are compared two elements at a time; others are unpacked for their sum anyway.
    if constexpr (sizeof(T) == 2 && kWide > 1 && kResident && !kKeepTerms) {
        const uint pair = max_of_pairs(T(), max_of_pairs(T(), pack.words[0], pack.words[1]),
                                       max_of_pairs(T(), pack.words[2], pack.words[3]));
        const T low = {(unsigned short)(pair & 0xffff)}, high = {(unsigned short)(pair >> 16)};
        max = fmax(fmax(max, to_acc(low)), to_acc(high));
    } else
#endif
    {
#pragma unroll
        for (int i = 0; i < kWide; ++i) max = fmax(max, element(pack, i));
    }
    return max;
}

__device__ __forceinline__ Acc sum_of(const Pack<In>& pack, const Term& term) {
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < kWide; ++i) sum += term.roughly(element(pack, i));
    return sum;
}

// Packs are taken several at a time: one rescaling serves them all.
template <int N> __device__ __forceinline__ void take(Running<STREAMED>& mine, const Pack<In>* packs) {
    Acc max = mine.partial.max;
#pragma unroll
    for (int v = 0; v < N; ++v) max = max_of(packs[v], max);
    mine.raise_max(max);
    const Term term(max, mine.scale);
    Acc sum = 0;
#pragma unroll
    for (int v = 0; v < N; ++v) sum += sum_of(packs[v], term);
    mine.add_terms(sum);
}

__device__ __forceinline__ Pack<Out> finish_pack(const Finish& finish, const Pack<In>& pack) {
    Pack<Out> result;
    fill(result, [&](int i) { return finish(element(pack, i)); });
    return result;
}

// The pack at `from`, in the row's column `col`, as the softmax is to see it.
__device__ __forceinline__ Pack<In> read_screened(const In* from, long long col, const Screen<false>& screen) {
    Pack<In> pack = empty_pack();
    const bool wanted = screen.reaches(col);
    load(pack, from, wanted);
    const Keep keep = screen.keep(col, wanted);
    if (wanted) screen.apply(pack, keep, col);
    return pack;
}

// Starts to bring the pack at `from`, in the row's column `col`, to a slot of this thread.
__device__ __forceinline__ void load_slot(Pack<In>* slot, const In* from, long long col, const Screen<false>& screen) {
    if (screen.reaches(col)) {
        load_async(slot, from);
        screen.prefetch(col);
    } else
        *slot = empty_pack();
}

// Softmax of one part of a row, or by lanes of a warp of several short rows. `others` stands for the blocks that have
// the other parts: Alone, Cluster or Grid of fused_team.cuh.
template <class Others>
__device__ __forceinline__ void softmax_of_part(const In* x, Out* out, const Layout& layout, const Scores& scores,
                                                int shared_vectors, long long row, uint part, uint parts,
                                                Others& others) {
    // Whole lines, also behind variables: otherwise each access of a warp touches one line more.
    extern __shared__ __align__(128) char memory[];
    __shared__ Partial warp_slots[32];
    Pack<In>* slots = reinterpret_cast<Pack<In>*>(memory) + threadIdx.x;
    const uint zero = uint(layout.rows >> 62);  // see keep_packed
    const int lane = threadIdx.x % kLanes;
    const int member = TEAM ? lane : threadIdx.x;
    const int members = TEAM ? kLanes : blockDim.x;
    const bool in_range = row < layout.rows;
    const In* in = x + (in_range ? row : 0) * layout.x_outer;
    Out* to = out + (in_range ? row : 0) * layout.cols;
    const Span<kPeel> span(in, to, layout.cols);
    const Screen<false> screen = scores.screen<false>(in_range ? row : 0, layout.cols);
    const Scale scale = scores.abs_scale();

    // This block's vectors of the row: whole lines, so that no two blocks read the same one.
    const uint share = CLUSTER > 1 || GRID ? (span.vectors + parts * 8 - 1) / (parts * 8) * 8 : span.vectors;
    const uint begin = min(part * share, span.vectors);
    const uint count = in_range ? min(share, span.vectors - begin) : 0;
    const long long part_col = span.head + (long long)begin * kWide;
    // Not by way of part_col: of that the compiler makes other, slower code where blocks share a row.
    const In* in_part = in + span.head + (long long)begin * kWide;
    Out* to_part = to + span.head + (long long)begin * kWide;

    // Of these, each warp holds a contiguous run: DRAM likes that better than a stride of the whole block.
    const uint held = VECTORS + (SHARED ? shared_vectors : 0);
    const uint first = (TEAM ? 0 : threadIdx.x / 32 * held * 32) + lane;
    const int left = int(count) - int(first);  // the thread has its vector v if v * kLanes < left
    const long long run_col = part_col + (long long)first * kWide;
    const In* in_run = in_part + (long long)first * kWide;
    Out* to_run = to_part + (long long)first * kWide;

    Pack<In> packs[VECTORS];
    Keep keeps[VECTORS];
    auto wanted = [&](int v) { return v * kLanes < left && screen.reaches(run_col + v * kLanes * kWide); };
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        packs[v] = empty_pack();
        load(packs[v], in_run + v * kLanes * kWide, wanted(v));
        keeps[v] = screen.keep(run_col + v * kLanes * kWide, wanted(v));
    }
    // Of its slots in shared memory, the thread fills the first few.
    const int held_slots = min(shared_vectors, max(0, (left + 31) / 32 - VECTORS));
    const int group = (shared_vectors + kGroups - 1) / kGroups;
    if constexpr (SHARED)
        for (int g = 0; g < kGroups; ++g) {
            for (int v = g * group; v < min(held_slots, (g + 1) * group); ++v)
                load_slot(slots + v * blockDim.x, in_run + (VECTORS + v) * 32 * kWide,
                          run_col + (VECTORS + v) * 32 * kWide, screen);
            end_group();
        }
    // The elements outside the packs; rows that begin and end at a pack have none.
    const bool has_singles = kSingles && part == 0 && in_range && (span.head || span.tail);
    Acc singles[kSingles + 1];
    Out* singles_to[kSingles + 1];
    if (has_singles)
#pragma unroll
        for (int s = 0; s < kSingles; ++s) {
            const long long at = span.single(member + s * kLanes);
            singles[s] = at >= 0 ? screen.apply(to_acc(in[at]), at) : lowest(Acc());
            singles_to[s] = at >= 0 ? to + at : nullptr;
        }
    let_successor_start();
    if constexpr (SCORES) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (wanted(v)) screen.apply(packs[v], keeps[v], run_col + v * kLanes * kWide);
    }

    Partial row_partial;
    Acc terms[kKeepTerms ? VECTORS * kWide : 1];
    if constexpr (kResident) {
        Acc max = lowest(Acc());
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) max = max_of(packs[v], max);
        if (has_singles)
#pragma unroll
            for (int s = 0; s < kSingles; ++s) max = fmax(max, singles[s]);
        max = max_over_lanes<kLanes>(max);
        row_partial.max = TEAM ? max : max_over_block(max, warp_slots);

        const Term term(row_partial.max, scale);
        Acc sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if constexpr (kKeepPacked) keep_packed(packs[v], zero);
#pragma unroll
            for (int i = 0; i < kWide; ++i) {
                const Acc value = term(element(packs[v], i));
                sum += value;
                if constexpr (kKeepTerms) terms[v * kWide + i] = value;
            }
        }
        if (has_singles)
#pragma unroll
            for (int s = 0; s < kSingles; ++s) sum += term(singles[s]);
        sum = sum_over_lanes<kLanes>(sum);
        row_partial.sum = TEAM ? sum : sum_over_block(sum, warp_slots);
    } else {
        // What this thread holds, as it arrives; then what is too much to hold.
        Running<STREAMED> mine(scale);
#pragma unroll
        for (int c = 0; c + kChunk <= VECTORS; c += kChunk) take<kChunk>(mine, packs + c);
        if constexpr (VECTORS % kChunk) take<VECTORS % kChunk>(mine, packs + VECTORS / kChunk * kChunk);
        if constexpr (SHARED) {
            auto take_group = [&](int g) {
                const int stop = min(held_slots, (g + 1) * group);
                int v = g * group;
                auto col = [&](int i) { return run_col + (VECTORS + v + i) * 32 * kWide; };
                auto keep_at = [&](int i) { return screen.keep(col(i), screen.reaches(col(i))); };
                // As the softmax is to see it: so it goes back to its slot.
                auto apply = [&](Pack<In>& pack, const Keep& keep, int i) {
                    if constexpr (SCORES) {
                        if (screen.reaches(col(i))) screen.apply(pack, keep, col(i));
                        slots[(v + i) * blockDim.x] = pack;
                    }
                };
                for (; v + 1 < stop; v += 2) {
                    const Keep first_keep = keep_at(0), second_keep = keep_at(1);
                    Pack<In> pair[2] = {read_slot(slots + v * blockDim.x), read_slot(slots + (v + 1) * blockDim.x)};
                    apply(pair[0], first_keep, 0);
                    apply(pair[1], second_keep, 1);
                    take<2>(mine, pair);
                }
                if (v < stop) {
                    const Keep last_keep = keep_at(0);
                    Pack<In> last = read_slot(slots + v * blockDim.x);
                    apply(last, last_keep, 0);
                    take<1>(mine, &last);
                }
            };
            wait_for_groups<3>(), take_group(0);
            wait_for_groups<2>(), take_group(1);
            wait_for_groups<1>(), take_group(2);
            wait_for_groups<0>(), take_group(3);
        }
        if (has_singles)
#pragma unroll
            for (int s = 0; s < kSingles; ++s) mine.take(singles[s]);
        if constexpr (STREAMED)
            for (uint at = held * members + member; at < count; at += members) {
                const long long offset = (long long)at * kWide;
                const Pack<In> pack = read_screened(in_part + offset, part_col + offset, screen);
                take<1>(mine, &pack);
            }

        row_partial = merge_over_lanes<kLanes>(mine.partial, scale);
        if constexpr (!TEAM) row_partial = merge_over_block(row_partial, warp_slots, scale);
        row_partial = others.merge(row_partial);
    }
    const Finish finish(row_partial, scale);

#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (v * kLanes >= left) continue;
        Pack<Out> result;
        if constexpr (kKeepTerms) {
            fill(result, [&](int i) { return terms[v * kWide + i] * finish.factor; });
        } else {
            if constexpr (kKeepPacked) keep_packed(packs[v], zero);
            result = finish_pack(finish, packs[v]);
        }
        store(to_run + v * kLanes * kWide, result);
    }
    if constexpr (SHARED) {
        Out* to_slots = to_run + VECTORS * 32 * kWide;
        int v = 0;
        for (; v + 1 < held_slots; v += 2) {  // two at a time, so that one is read while the other is computed
            const Pack<In> first = read_slot(slots + v * blockDim.x), second = read_slot(slots + (v + 1) * blockDim.x);
            store(to_slots + v * 32 * kWide, finish_pack(finish, first));
            store(to_slots + (v + 1) * 32 * kWide, finish_pack(finish, second));
        }
        if (v < held_slots) store(to_slots + v * 32 * kWide, finish_pack(finish, read_slot(slots + v * blockDim.x)));
    }
    if constexpr (STREAMED)
        for (uint at = held * members + member; at < count; at += members) {
            const long long offset = (long long)at * kWide;
            const Pack<In> pack = read_screened(in_part + offset, part_col + offset, screen);
            store(to_part + offset, finish_pack(finish, pack));
        }
    if (has_singles)
#pragma unroll
        for (int s = 0; s < kSingles; ++s)
            if (singles_to[s]) from_acc(*singles_to[s], finish(singles[s]));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_fused(const In* x, Out* out,
#if GRID
                  Partial* scratch,
#endif
                  SCORES_PARAMETERS Layout layout, int shared_vectors) {
    const Scores scores = SCORES_ARGUMENTS;
    // All wait at once, but for a cluster's word that this block has started.
#if CLUSTER > 1
    __shared__ Partial block_slots[CLUSTER];
    Cluster others(block_slots, scores.abs_scale());
    wait_for_predecessor();
    const uint part = block_in_cluster(), parts = CLUSTER;
#elif GRID
    wait_for_predecessor();
    Grid others{scratch, gridDim.x / uint(layout.rows), scores.abs_scale()};
    const uint parts = others.parts, part = blockIdx.x % parts;
#else
    wait_for_predecessor();
    Alone others;
    constexpr uint part = 0, parts = 1;
#endif
    const long long row = TEAM ? ((long long)blockIdx.x * blockDim.x + threadIdx.x) / kLanes : blockIdx.x / parts;
    softmax_of_part(x, out, layout, scores, shared_vectors, row, part, parts, others);
}
