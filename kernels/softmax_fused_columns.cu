// Rung 3 where rows lie side by side: softmax over another axis than the last, or a transposed input. The input is
// read once, kept on the chip, and written once.
//
// Neighbors in memory belong to different rows here. So a block takes a tile: neighboring rows, all of their columns
// (or its share of them, where a cluster of blocks has the tile). A thread reads packs of WIDE neighbors, one in each
// of WIDE rows, at every so many columns: `across` threads lie side by side along the rows, and `groups` of so many
// threads take columns in turn. Each thread has a (max, sum) of its columns for each of its WIDE rows. These partials
// meet across the lanes of a warp, the warps of a block and the blocks of a cluster, merged as in the online softmax of
// Milakov & Gimelshein 2018, arXiv:1805.02867.
//
//           rows ->                      32 rows of float32 by 8 threads with packs of 4; a warp has 4 groups
//   columns  0000 1111 2222 ... 7777     <- group 0: columns 0, groups, 2 groups, ...
//      |     0000 1111 2222 ... 7777     <- group 1
//      v     ...
//
// The output has its rows side by side too, except where the input is transposed (TURN): there the tile is turned over
// in shared memory on its way out, where its packs were if it can be.
//
// What a cluster can't hold, and strides that leave no packs, are left to softmax_fused_strided.cu. Macros beside
// those of common.cuh:
//   WIDE      elements a pack: 2 to 16 bytes of input
//   LANES     threads across a tile if that is less than a warp, a power of two; 32: the parameter `across`
//   CLUSTER   most blocks that share a tile; 1: no cluster
//   VECTORS   packs that a thread holds in registers
//   SHARED    1: it holds up to `shared_vectors` more in shared memory
//   TURN      1: the input is (rows, cols) with its rows side by side
//   ALIGNED   1: rows of a turned output begin at multiples of 16 bytes
//   THREADS, BLOCKS   most threads a block, fewest blocks a multiprocessor: the register budget
// and those of fused_scores.cuh, for a scale, a mask and causality.

#include "common.cuh"
#include "fused_memory.cuh"
#include "fused_scores.cuh"
#include "fused_team.cuh"

// The loads into shared memory come in groups, so that work on the first starts before the last has arrived.
constexpr int kGroups = 3;  // the waits below count on it
// Packs in registers that are taken together, relative to one max a row: few, for the same reason.
constexpr int kChunk = VECTORS % 4 == 0 ? 4 : VECTORS % 3 == 0 ? 3 : VECTORS;
static_assert(VECTORS % kChunk == 0);
// Columns in a row that a thread takes of a turned tile, so that it writes whole words.
constexpr int kRun = TURN && sizeof(Out) == 2 ? 2 : 1;
static_assert(VECTORS % kRun == 0);
// A turned tile takes the room of packs that have been read.
constexpr bool kInPlace = TURN && SHARED && sizeof(Out) <= sizeof(In);
// Neighboring elements of the turned output that one store takes.
constexpr int kUnit = TURN && ALIGNED ? 16 / sizeof(Out) : 1;

// One for each row of a pack. (A union, so that it may be left unset.)
template <class T> struct Each {
    union {
        T of[kWide];
    };
    __device__ __forceinline__ Each() {}
    __device__ __forceinline__ T& operator[](int i) { return of[i]; }
};

// A row's max and Finish::factor, as they are handed to the threads that have columns of it.
struct Total {
    Acc max, factor;
};

// kRun elements of one row of the output.
union Word {
    Out at[kRun];
    uint words[1];
};

// From a stage to the output, 16 bytes or one element.
__device__ __forceinline__ void move_unit(Out* to, const Out* from) {
    if constexpr (kUnit > 1) {
        const uint4 found = *reinterpret_cast<const uint4*>(from);
        const uint words[4] = {found.x, found.y, found.z, found.w};
        store_words<16>(to, words);
    } else
        *to = *from;
}

// `raised`, where it is less, to the pack's elements. A NaN raises nothing: it spoils the sum instead.
template <class T> __device__ __forceinline__ void raise(Pack<T>& raised, const Pack<T>& pack) {
    if constexpr (sizeof(T) > 2) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) raised.at[i] = fmax(raised.at[i], pack.at[i]);
    } else {
#if __CUDA_ARCH__ >= 800
#pragma unroll
        for (int i = 0; i < int(sizeof(pack) / 4); ++i)
            raised.words[i] = max_of_pairs(T(), raised.words[i], pack.words[i]);
#else
#pragma unroll
        for (int i = 0; i < kWide; ++i)
            if (element(pack, i) > element(raised, i)) raised.at[i] = pack.at[i];
#endif
    }
}

// The partial's sum, relative to another max.
__device__ __forceinline__ Acc sum_at(Partial partial, Acc max, Scale scale) {
    return partial.sum * rescale(partial.max, max, scale);
}

// Across the lanes of a warp that have the same rows: every LANES-th.
__device__ __forceinline__ Partial merge_over_warp(Partial mine, Scale scale) {
    Acc max = mine.max;
#pragma unroll
    for (int distance = LANES; distance < 32; distance *= 2)
        max = fmax(max, __shfl_xor_sync(0xffffffff, max, distance));
    Acc sum = LANES < 32 ? sum_at(mine, max, scale) : mine.sum;
#pragma unroll
    for (int distance = LANES; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    return {max, sum};
}

// `count` partials of one row, `step` apart, by kMergers neighboring lanes, which all get the result.
constexpr int kMergers = 8;
__device__ __forceinline__ Partial merge_column(const Partial* partials, int count, int step, Scale scale) {
    Partial mine = Partial::empty();
#pragma unroll 1
    for (int i = threadIdx.x % kMergers; i < count; i += kMergers) mine = merge(mine, partials[i * step], scale);
    return merge_over_lanes<kMergers>(mine, scale);
}

// merge_row(row, wanted) by kMergers lanes for each row of a tile. All threads take part, as lanes exchange what they
// have: those without a row do another's, unwanted.
template <class MergeRow> __device__ __forceinline__ void for_each_row(int tile_rows, MergeRow merge_row) {
#pragma unroll 1
    for (int first = 0; first < tile_rows; first += blockDim.x / kMergers) {
        const int row = first + threadIdx.x / kMergers;
        merge_row(min(row, tile_rows - 1), row < tile_rows);
    }
}

#if CLUSTER > 1
__device__ __forceinline__ uint blocks_in_cluster() {
    uint count;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
    return count;
}
#endif

// Running of fused_team.cuh for one thread's columns of kWide rows, whose packs hold an element of each.
struct RunningRows {
    Scale scale;
    Pack<In> top = empty_pack();
    Each<Acc> sums;

    __device__ __forceinline__ explicit RunningRows(Scale scale) : scale(scale) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) sums[i] = 0;
    }
    // Several packs at a time, as one rescaling serves them all: read(begin) up to read(end - 1).
    template <int UNROLL, class Read> __device__ __forceinline__ void take(int begin, int end, Read read) {
        const Pack<In> before = top;
#pragma unroll UNROLL
        for (int v = begin; v < end; ++v) raise(top, read(v));
        constexpr int kAtOnce = kWide > 4 ? 4 : kWide;  // rows: more would take too many registers
#pragma unroll
        for (int first = 0; first < kWide; first += kAtOnce) {
            Each<Term> terms;
#pragma unroll
            for (int i = first; i < first + kAtOnce; ++i) {
                terms[i] = Term(element(top, i), scale);
                sums[i] *= rescale(element(before, i), element(top, i), scale);
            }
#pragma unroll UNROLL
            for (int v = begin; v < end; ++v) {
                const Pack<In> pack = read(v);
#pragma unroll
                for (int i = first; i < first + kAtOnce; ++i) sums[i] += terms[i].roughly(element(pack, i));
            }
        }
    }
};

// Into slots of shared memory, `step` apart; `from(v)` is the v-th pack, at the column `at(v)`.
template <class From, class At>
__device__ __forceinline__ void load_slots(Pack<In>* slots, int step, int begin, int end, const Screen<true>& screen,
                                           From from, At at) {
    if constexpr (kAsync && !SCORES) {
#pragma unroll 2
        for (int v = begin; v < end; ++v) load_async(slots + v * step, from(v));
    } else {
        constexpr int kAtOnce = 32 / sizeof(Pack<In>);
        for (int v = begin; v < end; v += kAtOnce) {
            Pack<In> packs[kAtOnce];
            Keep keeps[kAtOnce];
            auto wanted = [&](int i) { return v + i < end && screen.reaches(at(v + i)); };
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                packs[i] = empty_pack();
                load(packs[i], from(v + i), wanted(i));
                keeps[i] = screen.keep(at(v + i), wanted(i));
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (wanted(i)) screen.apply(packs[i], keeps[i], at(v + i));
                if (v + i < end) slots[(v + i) * step] = packs[i];
            }
        }
    }
}

__device__ __forceinline__ Pack<Out> finish_pack(Each<Finish>& finish, const Pack<In>& pack) {
    Pack<Out> result;
    fill(result, [&](int i) { return finish[i](element(pack, i)); });
    return result;
}

// across: threads side by side along the rows. tiles: tiles side by side along the rows. share: columns of a block.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_fused_columns(const In* x, Out* out, SCORES_PARAMETERS Layout layout, int across, int tiles, int share,
                          int shared_vectors) {
    extern __shared__ __align__(16) char memory[];
#if CLUSTER > 1
    const uint parts = blocks_in_cluster(), part = block_in_cluster();
    cluster_arrive_first();  // a block that hasn't started can't be written to: waited for before that is done
#else
    const uint parts = 1, part = 0;
#endif
    const uint zero = uint(layout.rows >> 62);  // see keep_packed
    const Scores scores = SCORES_ARGUMENTS;
    const Scale scale = scores.abs_scale();
    wait_for_predecessor();

    if constexpr (LANES < 32) across = LANES;
    const int lane = threadIdx.x % across, group = threadIdx.x / across, groups = blockDim.x / across;
    const int tile_rows = across * kWide;
    // Of each row, the block has as many partials as there are warps or, if wider, groups.
    const int writers = LANES < 32 ? blockDim.x / 32 : groups;

    Pack<In>* slots = reinterpret_cast<Pack<In>*>(memory) + threadIdx.x;
    Total* totals = reinterpret_cast<Total*>(memory + (SHARED ? shared_vectors * blockDim.x * sizeof(Pack<In>) : 0));
    Partial* partials = reinterpret_cast<Partial*>(totals + tile_rows);

    const uint tile = blockIdx.x / parts, plane = TURN ? 0 : tile / uint(tiles);
    const long long tile_row = (long long)(TURN ? tile : tile % uint(tiles)) * tile_rows;
    const long long row = tile_row + lane * kWide, rows = TURN ? layout.rows : layout.inner;
    const int begin = int(part) * share;
    const int count = int(min((long long)share, max(layout.cols - begin, 0ll)));

    // The thread's v-th column is the (v % kRun)-th of its run in the (v / kRun)-th turn; it has `mine` of them.
    const int turn = groups * kRun;
    const int left = row < rows ? max(count - group * kRun, 0) : 0;
    const int mine = left / turn * kRun + min(left % turn, kRun);
    const int held_slots = SHARED ? max(mine - VECTORS, 0) : 0;
    const int first_column = begin + group * kRun;
    const In* in = x + plane * layout.x_outer + row + first_column * layout.x_col;
    Out* to = out + (TURN ? tile_row * layout.cols + begin : (plane * layout.cols + first_column) * layout.inner + row);
    const long long step = turn * layout.x_col;
    auto column = [&](int v) { return in + v / kRun * step + v % kRun * layout.x_col; };
    const Screen<true> screen = scores.screen<true>(plane * layout.inner + row, layout.cols);
    auto column_number = [&](int v) { return first_column + (long long)(v / kRun) * turn + v % kRun; };
    auto wanted = [&](int v) { return v < mine && screen.reaches(column_number(v)); };

    Pack<In> packs[VECTORS];
    Keep keeps[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        packs[v] = empty_pack();
        load(packs[v], column(v), wanted(v));
        keeps[v] = screen.keep(column_number(v), wanted(v));
    }
    const int each = (shared_vectors + kGroups - 1) / kGroups;  // packs of a group
    if constexpr (SHARED)
#pragma unroll 1
        for (int g = 0; g < kGroups; ++g) {
            load_slots(
                slots, blockDim.x, min(held_slots, g * each), min(held_slots, (g + 1) * each), screen,
                [&](int v) { return column(VECTORS + v); }, [&](int v) { return column_number(VECTORS + v); });
            end_group();
        }
    let_successor_start();
    if constexpr (SCORES) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (wanted(v)) screen.apply(packs[v], keeps[v], column_number(v));
    }

    // As the loads arrive.
    RunningRows running(scale);
#pragma unroll
    for (int c = 0; c < VECTORS; c += kChunk)
        if (c == 0 || c < mine)
            running.take<kChunk>(c, c + kChunk, [&](int v) {
                keep_packed(packs[v], zero);
                return packs[v];
            });
    if constexpr (SHARED)
#pragma unroll 1
        for (int g = 0; g < kGroups; ++g) {
            g == 0 ? wait_for_groups<2>() : g == 1 ? wait_for_groups<1>() : wait_for_groups<0>();
            const int stop = min(held_slots, (g + 1) * each);
            if (g * each < stop)
                running.take<2>(g * each, stop, [&](int v) { return read_slot(slots + v * blockDim.x); });
        }

    // Merged over the warp; then by some lanes a row over the block and the cluster.
    Each<Finish> finish;
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
        const Partial merged = merge_over_warp({element(running.top, i), running.sums[i]}, scale);
        if (CLUSTER == 1 && writers == 1)
            finish[i] = Finish(merged, scale);
        else if (LANES == 32 || threadIdx.x % 32 < LANES)
            partials[(LANES < 32 ? threadIdx.x / 32 : group) * tile_rows + lane * kWide + i] = merged;
    }
    if (CLUSTER > 1 || writers > 1) {
        __syncthreads();
#if CLUSTER > 1
        Partial* incoming = partials + writers * tile_rows;  // of all blocks
        cluster_wait();                                      // every block has started
        for_each_row(tile_rows, [&](int r, bool wanted) {
            const Partial of_block = merge_column(partials + r, writers, tile_rows, scale);
            Partial* place = incoming + part * tile_rows + r;
#pragma unroll 1
            for (int block = threadIdx.x % kMergers; wanted && block < parts; block += kMergers) {
                store_in_block(in_block(&place->max, block), of_block.max);
                store_in_block(in_block(&place->sum, block), of_block.sum);
            }
        });
        cluster_arrive();
        cluster_wait();
        const Partial* merging = incoming;
        const int to_merge = parts;
#else
        const Partial* merging = partials;
        const int to_merge = writers;
#endif
        for_each_row(tile_rows, [&](int r, bool wanted) {
            const Partial merged = merge_column(merging + r, to_merge, tile_rows, scale);
            if (wanted && threadIdx.x % kMergers == 0) totals[r] = {merged.max, Finish(merged, scale).factor};
        });
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
            const Total total = totals[lane * kWide + i];
            finish[i].term = Term(total.max, scale);
            finish[i].factor = total.factor;
        }
    }

    if constexpr (!TURN) {
        const long long out_step = groups * layout.inner;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (v < mine) {
                keep_packed(packs[v], zero);
                store(to + v * out_step, finish_pack(finish, packs[v]));
            }
        if constexpr (SHARED) {
            to += VECTORS * out_step;
            int v = 0;
            for (; v + 1 < held_slots; v += 2) {  // two at a time again
                const Pack<In> first = read_slot(slots + v * blockDim.x),
                               second = read_slot(slots + (v + 1) * blockDim.x);
                store(to + v * out_step, finish_pack(finish, first));
                store(to + (v + 1) * out_step, finish_pack(finish, second));
            }
            if (v < held_slots) store(to + v * out_step, finish_pack(finish, read_slot(slots + v * blockDim.x)));
        }
    } else {
        // Turn by turn: `turn` columns of all of the tile's rows, by way of a stage that has a row for each. Those in
        // slots come first: their stage lies where they were, as all threads have read the next turn's by then. The
        // rest take turns with two stages.
        const int tile_left = int(min((long long)tile_rows, rows - tile_row));  // rows
        const int turns = (count + turn - 1) / turn, of_slots = SHARED ? max(turns - VECTORS / kRun, 0) : 0;
        const int pitch = turn * int(sizeof(Out));  // bytes of a stage's row
        const int stage_bytes = kInPlace ? kRun * blockDim.x * int(sizeof(Pack<In>)) : pitch * tile_rows;
        char* stages = kInPlace ? memory : reinterpret_cast<char*>(partials);  // which have been merged
        const int units = turn / kUnit, unit = threadIdx.x % units, first_row = threadIdx.x / units;
        constexpr int kRounds = (kWide * kRun + kUnit - 1) / kUnit;
        // Where thread `lane` has byte `at` of a stage's row: what a warp reads or writes at a time lies in different
        // banks.
        auto swizzle = [&](int lane, int at) {
            constexpr int kBytes = 32 / LANES * int(sizeof(Word));  // of a row, that a warp writes at a time
            return at ^ (lane * (kBytes > 16 ? kBytes : 16) * min(pitch, 128) / 128 & (pitch - 1) & ~15);
        };
        auto write = [&](const Pack<In>(&run)[kRun], char* stage) {
#pragma unroll
            for (int i = 0; i < kWide; ++i) {
                Word word;
                round_to<kRun>(word.at, word.words, [&](int r) { return finish[i](element(run[r], i)); });
                char* row = stage + (i * across + lane) * pitch;
                *reinterpret_cast<Word*>(row + swizzle(lane, group * int(sizeof(Word)))) = word;
            }
        };
        constexpr int kUnrolled = ALIGNED ? kRounds : 1;
        auto move = [&](int first, const char* stage) {
            const int at = first + unit * kUnit;
            if (at >= count) return;
#pragma unroll kUnrolled
            for (int round = 0; round < kRounds; ++round) {
                const int staged = first_row + round * int(blockDim.x / units);
                const int r = staged % across * kWide + staged / across;
                const char* from = stage + staged * pitch + swizzle(staged % across, unit * kUnit * int(sizeof(Out)));
                if (staged < tile_rows && r < tile_left)
                    move_unit(to + r * layout.cols + at, reinterpret_cast<const Out*>(from));
            }
        };
        auto read_run = [&](Pack<In>(&run)[kRun], int t) {
#pragma unroll
            for (int r = 0; r < kRun; ++r) {
                const int v = t * kRun + r;
                run[r] = v < held_slots ? read_slot(slots + v * blockDim.x) : empty_pack();
            }
        };
        Pack<In> run[kRun];
        if constexpr (SHARED) {
            read_run(run, 0);
            if constexpr (kInPlace) __syncthreads();
#pragma unroll 1
            for (int t = 0; t < of_slots; ++t) {
                char* stage = stages + (kInPlace ? t : t % 2) * stage_bytes;
                write(run, stage);
                read_run(run, t + 1);
                __syncthreads();
                move((VECTORS / kRun + t) * turn, stage);
            }
        }
#pragma unroll
        for (int t = 0; t < VECTORS / kRun; ++t)
            if (t < turns) {
#pragma unroll
                for (int r = 0; r < kRun; ++r) {
                    run[r] = packs[t * kRun + r];
                    keep_packed(run[r], zero);
                }
                char* stage = stages + (of_slots + t) % 2 * stage_bytes;
                write(run, stage);
                __syncthreads();
                move(t * turn, stage);
            }
    }
}
