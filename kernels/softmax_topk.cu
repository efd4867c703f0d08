// The k largest of each row's softmax and where they are: the row is read once, and only k results are written.
//
// A warp, a block or a cluster of blocks shares a row. Each warp streams its part in chunks and keeps two things of
// it: the online softmax's (max, sum), as in softmax_fused.cu, and a list of the k best elements so far, the j-th in
// lane j. A chunk is looked into only if its max reaches the list's k-th; then its best elements are moved to the list
// one by one until they no longer do. So that the first chunk doesn't cost each warp k moves, the block agrees on a
// bound first: of the maxes of at least k groups of elements, the k-th largest is reached by k elements. In the end the
// lists are merged: in a block by the rank of each candidate, in a cluster by taking the best of the lists' heads k
// times.
//
// Elements are compared as integers that are ordered as they are, then by index: the lower comes first. Macros beside
// those of common.cuh:
//   TEAM       32: each warp has a row of its own, of one chunk; 0: the whole block shares one
//   CLUSTER    blocks of a cluster that share a row; 1: no cluster
//   VECTORS    packs of a chunk that a lane takes
//   STREAMED   1: there may be more than one chunk a warp
//   HELD       entries of the list that a lane holds: 1 for k up to 32, 2 for more
//   WIDE       elements a pack: 16 bytes of input, or 1 where a row's elements aren't neighbors
//   THREADS, BLOCKS   most threads a block, fewest blocks a multiprocessor: the register budget

#include "common.cuh"
#include "fused_memory.cuh"
#include "fused_team.cuh"

constexpr uint kAll = 0xffffffff;
constexpr int kElements = VECTORS * kWide;
constexpr int kMostGroups = 128;  // of reached_by_k: a power of two, up to twice the most k

template <class T> struct KeyOf { typedef uint type; };
template <> struct KeyOf<double> { typedef unsigned long long type; };
typedef KeyOf<Acc>::type Key;
constexpr Key kSign = Key(1) << (sizeof(Key) * 8 - 1);

__device__ __forceinline__ Key bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ Key bits_of(double x) { return __double_as_longlong(x); }
__device__ __forceinline__ float from_bits(uint bits) { return __uint_as_float(bits); }
__device__ __forceinline__ double from_bits(unsigned long long bits) { return __longlong_as_double(bits); }

// Keys are ordered as the numbers are, and -0 is 0. No number has key 0: that is nothing's, and one NaN's.
__device__ __forceinline__ Key key_of(Acc x) {
    const Key bits = bits_of(x);
    return bits == kSign ? kSign : bits & kSign ? ~bits : bits | kSign;
}
__device__ __forceinline__ Acc value_of(Key key) { return from_bits(key & kSign ? key ^ kSign : ~key); }

struct __align__(2 * sizeof(Key)) Candidate {
    Key key;
    uint index;

    static __device__ Candidate nothing() { return {0, kAll}; }
    __device__ __forceinline__ bool before(const Candidate& other) const {
        return key > other.key || (key == other.key && index < other.index);
    }
    __device__ __forceinline__ Candidate of_lane(int lane) const {
        return {__shfl_sync(kAll, key, lane), __shfl_sync(kAll, index, lane)};
    }
    __device__ __forceinline__ Candidate of_lane_below() const {
        return {__shfl_up_sync(kAll, key, 1), __shfl_up_sync(kAll, index, 1)};
    }
};

__device__ __forceinline__ uint max_over_warp(uint value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(kAll, value);
#else
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value = max(value, __shfl_xor_sync(kAll, value, distance));
    return value;
#endif
}
__device__ __forceinline__ unsigned long long max_over_warp(unsigned long long value) {
    const uint high = max_over_warp(uint(value >> 32));
    return (unsigned long long)high << 32 | max_over_warp(uint(value >> 32) == high ? uint(value) : 0);
}
__device__ __forceinline__ uint min_over_warp(uint value) { return ~max_over_warp(~value); }

// The best of one candidate a lane.
__device__ __forceinline__ Candidate best_over_warp(Candidate mine) {
    const Key key = max_over_warp(mine.key);
    return {key, min_over_warp(mine.key == key ? mine.index : kAll)};
}

// The best that a warp has seen, in order.
struct List {
    Candidate held[HELD];         // the j-th is lane j % 32's held[j / 32]
    Candidate bound = {1, kAll};  // the k largest are all before it, or it is the k-th of the list itself

    __device__ List() {
#pragma unroll
        for (int h = 0; h < HELD; ++h) held[h] = Candidate::nothing();
    }
    __device__ __forceinline__ void insert(Candidate candidate, int k) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = HELD - 1; h >= 0; --h) {
            Candidate previous = held[h].of_lane_below();
            if (h > 0) {
                const Candidate below = held[max(h - 1, 0)].of_lane(31);
                if (lane == 0) previous = below;
            }
            const bool is_first = h == 0 && lane == 0;
            if (!held[h].before(candidate)) held[h] = is_first || previous.before(candidate) ? candidate : previous;
        }
        const Candidate last = held[HELD - 1].of_lane((k - 1) % 32);
        if (last.before(bound)) bound = last;
    }
    // N elements a lane; key 0 stands for none. No more than k of them come before the bound at their turn.
    template <int N, class IndexOf>
    __device__ __forceinline__ void take(Key (&keys)[N], int k, IndexOf index_of) {
#pragma unroll 1
        while (true) {
            const Key key = max_over_warp(max_of_keys(keys));
            if (key < bound.key) break;
            int at = N;
#pragma unroll
            for (int e = N - 1; e >= 0; --e)
                if (keys[e] == key) at = e;
            const uint index = at < N ? index_of(at) : kAll;
            const Candidate best = {key, min_over_warp(index)};
            if (!best.before(bound)) break;
            insert(best, k);
            if (index != best.index) at = N;
#pragma unroll
            for (int e = 0; e < N; ++e)
                if (at == e) keys[e] = 0;
        }
    }
    template <int N> static __device__ __forceinline__ Key max_of_keys(const Key (&keys)[N]) {
        Key found = 0;
#pragma unroll
        for (int e = 0; e < N; ++e) found = max(found, keys[e]);
        return found;
    }
#if CLUSTER > 1
    // The best of the lists of a cluster's blocks: k times the best of the heads.
    __device__ __forceinline__ void take_heads(const Candidate* lists, int k) {
        const int lane = threadIdx.x % 32;
        const Candidate* of_lane = lists + lane * k;
        int at = 0;
        Candidate head = lane < CLUSTER ? of_lane[0] : Candidate::nothing();
#pragma unroll 1
        for (int j = 0; j < k; ++j) {
            const Candidate best = best_over_warp(head);
#pragma unroll
            for (int h = 0; h < HELD; ++h)
                if (j == lane + h * 32) held[h] = best;
            if (lane < CLUSTER && head.index == best.index) head = ++at < k ? of_lane[at] : Candidate::nothing();
        }
    }
#endif
    // Adds what there is of the k best to an array in shared memory, in no order; `count` is how many that has.
    __device__ __forceinline__ void append_to(Candidate* array, uint* count, int k) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const uint there = __ballot_sync(kAll, lane + h * 32 < k && held[h].key);
            uint at = 0;
            if (lane == 0 && there) at = atomicAdd(count, __popc(there));
            at = __shfl_sync(kAll, at, 0);
            if (there >> lane & 1) array[at + lane] = held[h];  // they are a list's first: no gaps
        }
    }
};

// The k best of candidates in any order, each with its place among them.
template <class Use>
__device__ __forceinline__ void for_each_of_best(const Candidate* candidates, int count, int k, Use use) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const Candidate own = candidates[i];
        int rank = 0;
#pragma unroll 4
        for (int other = 0; other < count; ++other) rank += candidates[other].before(own);
        if (rank < k) use(rank, own);
    }
}

// A chunk's elements are taken together: one rescaling serves them all.
template <int N>
__device__ __forceinline__ void take(Running<STREAMED>& running, const Acc (&values)[N], Acc max_of_values) {
    const Acc max = fmax(running.partial.max, max_of_values);
    running.raise_max(max);
    const Term term(max, Scale());
    Acc sum = 0;
#pragma unroll
    for (int e = 0; e < N; ++e) sum += term.roughly(values[e]);
    running.add_terms(sum);
}

// A key that at least k elements reach, from the best of each thread's: the k-th largest of the maxes of groups of
// neighboring lanes. There are k groups and more, as blocks have 64 threads and more.
__device__ __forceinline__ Key reached_by_k(Key mine, int k) {
    __shared__ Key maxes[kMostGroups], found;
    int lanes = 32;
    while (lanes > 1 && int(blockDim.x) / lanes < 2 * k) lanes /= 2;
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        mine = max(mine, __shfl_xor_sync(kAll, mine, distance));
    const int groups = blockDim.x / lanes, group = threadIdx.x;
    if (threadIdx.x % lanes == 0) maxes[threadIdx.x / lanes] = mine;
    __syncthreads();
    if (group < groups) {
        const Key own = maxes[group];
        int rank = 0;
#pragma unroll 4
        for (int g = 0; g < groups; ++g) rank += maxes[g] > own || (maxes[g] == own && g < group);
        if (rank == k - 1) found = own;
    }
    __syncthreads();
    return found;
}

// Where a row's results go, and what makes them of elements.
struct Results {
    Out* out;
    long long* indices;
    long long inner;
    Partial row_partial;
    Finish finish;

    __device__ Results(Out* all, long long* all_indices, const Layout& layout, long long row, int k, Partial partial)
        : inner(layout.inner), row_partial(partial), finish(partial, Scale()) {
        const long long first = inner == 1 ? row * k : row / inner * k * inner + row % inner;
        out = all + first, indices = all_indices + first;
    }
    __device__ void write(int j, Acc y, uint index) const {
        from_acc(out[j * inner], y);
        indices[j * inner] = index;
    }
    __device__ void write(int j, Candidate candidate) const {
        write(j, finish(value_of(candidate.key)), candidate.index);
    }
    // A row with NaN or +inf, or of nothing but -inf, has no order: NaN, one a thread, and true.
    __device__ bool write_undefined(int j, int k, int threads) const {
        if (row_partial.sum > 0) return false;
        for (; j < k; j += threads) write(j, 0 / row_partial.sum, j);
        return true;
    }
};

#if CLUSTER > 1
__device__ __forceinline__ void store_in_block(uint there, uint value) {
    store_in_block(there, __uint_as_float(value));
}
__device__ __forceinline__ void store_in_block(uint there, unsigned long long value) {
    store_in_block(there, __longlong_as_double(value));
}
__device__ __forceinline__ void store_in_first_block(Candidate* to, Candidate candidate) {
    store_in_block(in_block(&to->key, 0), candidate.key);
    store_in_block(in_block(&to->index, 0), candidate.index);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_topk(const In* x, Out* out, long long* indices, Layout layout, int k) {
#if CLUSTER > 1
    cluster_arrive_first();
    const uint part = block_in_cluster();
#else
    const uint part = 0;
#endif
    const int lane = threadIdx.x % 32, warp = TEAM ? 0 : threadIdx.x / 32, warps = TEAM ? 1 : blockDim.x / 32;
    extern __shared__ __align__(16) char memory[];
    [[maybe_unused]] __shared__ Partial warp_slots[32], block_slots[CLUSTER];
    __shared__ uint count;
    // What this block's warps have found, and in a cluster's first block what all its blocks have.
    [[maybe_unused]] Candidate *candidates = reinterpret_cast<Candidate*>(memory), *lists = candidates + warps * k;
    if (threadIdx.x == 0) count = 0;
    wait_for_predecessor();
    const long long row = TEAM ? ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32 : blockIdx.x / CLUSTER;
    if (row >= layout.rows) return;
    const In* in = layout.x_row(x, row);
    const long long stride = kWide == 1 ? layout.x_col : 1;
    const Span<kWide> span(in, out, layout.cols);

    // This block's packs of the row, whole lines, of which its warps take chunks in turn.
    const uint share = CLUSTER > 1 ? (span.vectors + CLUSTER * 8 - 1) / (CLUSTER * 8) * 8 : span.vectors;
    const uint begin = min(part * share, span.vectors), end = min(begin + share, span.vectors);
    const uint step = warps * VECTORS * 32;
    uint at = begin + warp * VECTORS * 32 + lane;
    auto load_chunk = [&](Pack<In>* packs, uint from) {
        const In* first = in + (span.head + (long long)from * kWide) * stride;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            packs[v] = empty_pack();
            load(packs[v], first + v * 32 * kWide * stride, from + v * 32 < end);
        }
    };

    Pack<In> next[VECTORS];
    load_chunk(next, at);
    // The elements outside the packs, one a lane.
    const bool has_singles = kWide > 1 && part == 0 && warp == 0 && (span.head || span.tail);
    const int single = has_singles ? int(span.single(lane)) : -1;
    const Acc single_value = single >= 0 ? to_acc(in[single]) : lowest(Acc());

    Running<STREAMED> running{Scale()};
    List list;
    auto take_chunk = [&](const Pack<In>* packs, bool is_first) {
        Acc values[kElements], max_of_values = lowest(Acc());
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            values[e] = element(packs[e / kWide], e % kWide);
            max_of_values = fmax(max_of_values, values[e]);
        }
        take(running, values, max_of_values);
        // Subnormals count as 0 on both sides; and a bound that is no number is NaN, which stops nothing.
        if (!is_first && !__any_sync(kAll, !(max_of_values < value_of(list.bound.key)))) return;
        Key keys[kElements];
#pragma unroll
        for (int e = 0; e < kElements; ++e) keys[e] = at + e / kWide * 32 < end ? key_of(values[e]) : 0;
        if (!TEAM && is_first) list.bound.key = max(list.bound.key, reached_by_k(List::max_of_keys(keys), k));
        list.take(keys, k, [&](int e) { return span.head + (at + e / kWide * 32) * kWide + e % kWide; });
    };
    if constexpr (TEAM) {
        let_successor_start();
        take_chunk(next, true);
    } else {
        // All warps take a first chunk, even one that is empty: they agree on a bound there.
        bool is_first = true;
#pragma unroll 1
        do {
            Pack<In> packs[VECTORS];
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) packs[v] = next[v];
            load_chunk(next, at + step);
            if (at + step - lane >= end) let_successor_start();
            take_chunk(packs, is_first);
            is_first = false;
            at += step;
        } while (at - lane < end);
    }
    if (has_singles) {
        running.take(single_value);
        Key keys[1] = {single >= 0 ? key_of(single_value) : 0};
        list.take(keys, k, [&](int) { return uint(single); });
    }

    Partial row_partial = merge_over_lanes<32>(running.partial, Scale());
    if constexpr (!TEAM) {
        list.append_to(candidates, &count, k);
        row_partial = merge_over_block(row_partial, warp_slots, Scale());
    }
#if CLUSTER > 1
    // Each block's k best go to the first block, in order.
    cluster_wait();
    Candidate* list_of_part = lists + part * k;
    for_each_of_best(candidates, count, k,
                     [&](int rank, Candidate best) { store_in_first_block(list_of_part + rank, best); });
    for (int j = count + threadIdx.x; j < k; j += blockDim.x)
        store_in_first_block(list_of_part + j, Candidate::nothing());
    if (threadIdx.x == 0) {
        store_in_block(in_block(&block_slots[part].max, 0), row_partial.max);
        store_in_block(in_block(&block_slots[part].sum, 0), row_partial.sum);
    }
    cluster_arrive();
    cluster_wait();
    if (part || warp) return;
    row_partial = merge_list(CLUSTER, Scale(), [&](int i) { return block_slots[i]; });
    list.take_heads(lists, k);
#endif
    const Results results(out, indices, layout, row, k, row_partial);
    const bool by_lanes = TEAM || CLUSTER > 1;
    if (results.write_undefined(by_lanes ? lane : threadIdx.x, k, by_lanes ? 32 : blockDim.x)) return;
    if constexpr (by_lanes) {
#pragma unroll
        for (int h = 0; h < HELD; ++h)
            if (lane + h * 32 < k) results.write(lane + h * 32, list.held[h]);
    } else
        for_each_of_best(candidates, count, k, [&](int rank, Candidate best) { results.write(rank, best); });
}
