#pragma once
// How rung 3 moves data: 16 bytes a thread and instruction wherever both rows allow it.

#include "common.cuh"

// Elements moved by one instruction: 16 bytes of input, or 1 where short rows lie at any alignment.
constexpr int kWide = WIDE;

// WIDE elements as they lie in memory.
template <class T> union __align__(kWide > 1 ? 16 : sizeof(T)) Pack {
    T at[kWide];
    uint words[sizeof(T) * kWide / 4 + 1 - (kWide > 1)];  // unused where kWide is 1
};

// 16 bytes at once, in assembly: left to itself the compiler splits some of these accesses, and branches around
// loads instead of predicating them.
__device__ __forceinline__ void load_16(uint* words, const void* from, bool wanted) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n"
        "  @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(from), "r"(int(wanted))
        : "memory");
}
__device__ __forceinline__ void store_16(void* to, const uint* words) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

// A thread outside the row keeps what it has.
__device__ __forceinline__ void load(Pack<In>& pack, const In* from, bool wanted) {
    if constexpr (kWide > 1 && CONGRUENT) {
        load_16(pack.words, from, wanted);
    } else if (wanted) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) pack.at[i] = from[i];
    }
}

__device__ __forceinline__ void store(Out* to, const Pack<Out>& pack) {
    if constexpr (kWide == 1) {
        *to = pack.at[0];
    } else {
#pragma unroll
        for (int i = 0; i < int(sizeof(pack) / 4); i += 4) store_16(reinterpret_cast<uint*>(to) + i, pack.words + i);
    }
}

__device__ __forceinline__ Pack<In> read_slot(const Pack<In>* slot) {
    Pack<In> pack;
    if constexpr (kWide > 1) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3])
                     : "r"(uint(__cvta_generic_to_shared(slot)))
                     : "memory");
        return pack;
    }
    return *slot;
}

// Makes the compiler unpack again what it would rather keep unpacked, in twice the registers: `zero` is a zero that
// it can't know.
__device__ __forceinline__ void keep_packed(Pack<In>& pack, uint zero) {
    if constexpr (sizeof(In) == 2 && kWide > 1 && VECTORS >= 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pack.words[i] ^= zero;
    }
}

#if __CUDA_ARCH__ >= 800
// The larger of each of two pairs of a half type.
__device__ __forceinline__ uint max_of_pairs(half, uint a, uint b) {
    uint larger;
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
__device__ __forceinline__ uint max_of_pairs(bfloat16, uint a, uint b) {
    uint larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
#endif

// From global straight into a slot of shared memory that only this thread uses: no barrier is needed, only
// wait_for_groups before the thread reads it.
__device__ __forceinline__ void load_async(Pack<In>* slot, const In* from) {
#if __CUDA_ARCH__ >= 800
    if constexpr (kWide > 1 && CONGRUENT) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint(__cvta_generic_to_shared(slot))), "l"(from)
                     : "memory");
        return;
    }
#endif
    load(*slot, from, true);
}
// Closes a group of loads; wait_for_groups waits for all but the last `LATER` groups.
__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int LATER> __device__ __forceinline__ void wait_for_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#endif
}

// Programmatic dependent launch: until the kernel before it in the stream has ended and its writes can be seen,
// this one may start but not touch memory. Nothing happens in an ordinary launch.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Where a row's packs begin and end. A block peels to a whole line of 128 bytes, so that no two warps touch one
// line; lanes of a warp peel to a pack. The elements before and behind are taken one by one.
constexpr int kPeel = TEAM || kWide == 1 ? kWide : 128 / int(CONGRUENT ? sizeof(In) : sizeof(Out));

struct Span {
    int head, tail;
    uint vectors;

    __device__ Span(const In* row, const Out* out_row, long long cols) {
        const uint at = uint(CONGRUENT ? address_t(row) / sizeof(In) : address_t(out_row) / sizeof(Out));
        head = int(min((long long)((kPeel - at % kPeel) % kPeel), cols));
        vectors = uint((cols - head) / kWide);
        tail = int((cols - head) % kWide);
    }
    // Where the i-th of the single elements is, or -1 if there are fewer.
    __device__ long long single(int i) const {
        return i < head ? i : i < head + tail ? i + (long long)vectors * kWide : -1;
    }
};
