#pragma once
// How rung 3 moves data: packs of neighboring elements, one instruction each.
//
// Macros beside those of common.cuh:
//   WIDE        elements a pack: 1, or 2 to 16 bytes of input
//   CONGRUENT   0: the input's packs aren't aligned and are read one element at a time; those of the output always are

#include "common.cuh"

#ifndef CONGRUENT
#define CONGRUENT 1
#endif

constexpr int kWide = WIDE;
// Elements of a line of 128 bytes.
[[maybe_unused]] constexpr int kLine = kWide == 1 ? 1 : 128 / int(CONGRUENT ? sizeof(In) : sizeof(Out));
template <class T> constexpr int kPackBytes = int(sizeof(T)) * kWide;

// WIDE elements as they lie in memory, or one of 2 bytes in a word of its own.
template <class T> union __align__(kPackBytes<T> < 4 ? 4 : kPackBytes<T> < 16 ? kPackBytes<T> : 16) Pack {
    T at[kWide];
    uint words[(kPackBytes<T> + 3) / 4];
};

// Where a row's packs begin and end: the first at a multiple of PEEL elements. The elements before and behind are taken
// one by one.
template <int PEEL> struct Span {
    int head, tail;
    uint vectors;

    __device__ Span(const In* row, const Out* out_row, long long cols) {
        const uint at = uint(CONGRUENT ? address_t(row) / sizeof(In) : address_t(out_row) / sizeof(Out));
        head = int(min((long long)((PEEL - at % PEEL) % PEEL), cols));
        vectors = uint((cols - head) / kWide);
        tail = int((cols - head) % kWide);
    }
    // Where the i-th of the single elements is, or -1 if there are fewer.
    __device__ long long single(int i) const {
        return i < head ? i : i < head + tail ? i + (long long)vectors * kWide : -1;
    }
};

// Both from compute capability 8.0 on. Two elements of a half type in one word, the first in its lower half.
__device__ __forceinline__ uint round_pair(half, float first, float second) {
    uint pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ uint round_pair(bfloat16, float first, float second) {
    uint pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

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

// Its i-th element, unpacked with one instruction; i is known to the compiler.
__device__ __forceinline__ Acc element(const Pack<half>& pack, int i) { return to_acc(pack.at[i]); }
__device__ __forceinline__ Acc element(const Pack<bfloat16>& pack, int i) {
    if constexpr (kWide == 1) return to_acc(pack.at[i]);
    return __uint_as_float(i % 2 ? pack.words[i / 2] & 0xffff0000 : pack.words[i / 2] << 16);
}
__device__ __forceinline__ float element(const Pack<float>& pack, int i) { return pack.at[i]; }
__device__ __forceinline__ double element(const Pack<double>& pack, int i) { return pack.at[i]; }

__device__ __forceinline__ Pack<In> empty_pack() {
    Pack<In> pack;
    if constexpr (kPackBytes<In> < 4) pack.words[0] = 0;  // all of the word
#pragma unroll
    for (int i = 0; i < kWide; ++i) pack.at[i] = lowest(In());
    return pack;
}

// Sets COUNT neighbors to `value(0)`, `value(1)` and so on, rounded; two at a time where they are half as wide.
template <int COUNT, class T, class Value>
__device__ __forceinline__ void round_to(T* at, uint* words, Value value) {
#if __CUDA_ARCH__ >= 800
    constexpr bool kPairs = sizeof(T) == 2 && COUNT > 1;
#else
    constexpr bool kPairs = false;
#endif
    if constexpr (kPairs) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) words[i / 2] = round_pair(T(), value(i), value(i + 1));
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) from_acc(at[i], value(i));
    }
}
template <class T, class Value> __device__ __forceinline__ void fill(Pack<T>& pack, Value value) {
    round_to<kWide>(pack.at, pack.words, value);
}

// One access each, in assembly: left to itself the compiler splits some of them, and branches around loads instead
// of predicating them. A pack that isn't wanted stays as it is.
__device__ __forceinline__ void load(Pack<In>& pack, const In* from, bool wanted) {
    uint* words = pack.words;
    if constexpr (!CONGRUENT) {
        if (wanted)
#pragma unroll
            for (int i = 0; i < kWide; ++i) pack.at[i] = from[i];
    } else if constexpr (kPackBytes<In> == 16)
        asm volatile(
            "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n"
            "  @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
            : "l"(from), "r"(int(wanted))
            : "memory");
    else if constexpr (kPackBytes<In> == 8)
        asm volatile(
            "{ .reg .pred wanted; setp.ne.b32 wanted, %3, 0;\n"
            "  @wanted ld.global.v2.u32 {%0, %1}, [%2]; }"
            : "+r"(words[0]), "+r"(words[1])
            : "l"(from), "r"(int(wanted))
            : "memory");
    else if constexpr (kPackBytes<In> == 4)
        asm volatile(
            "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n"
            "  @wanted ld.global.u32 %0, [%1]; }"
            : "+r"(words[0])
            : "l"(from), "r"(int(wanted))
            : "memory");
    else  // zero-extended: a word may take it
        asm volatile(
            "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n"
            "  @wanted ld.global.u16 %0, [%1]; }"
            : "+r"(words[0])
            : "l"(from), "r"(int(wanted))
            : "memory");
}

template <int BYTES> __device__ __forceinline__ void store_words(void* to, const uint* words) {
    if constexpr (BYTES > 16) {
        store_words<16>(to, words);
        store_words<BYTES - 16>(static_cast<char*>(to) + 16, words + 4);
    } else if constexpr (BYTES == 16)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                     "r"(words[3])
                     : "memory");
    else if constexpr (BYTES == 8)
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
    else
        asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(words[0]) : "memory");
}
__device__ __forceinline__ void store(Out* to, const Pack<Out>& pack) {
    if constexpr (kWide == 1)
        *to = pack.at[0];
    else
        store_words<kPackBytes<Out>>(to, pack.words);
}

__device__ __forceinline__ Pack<In> read_slot(const Pack<In>* slot) {
    Pack<In> pack;
    const uint at = uint(__cvta_generic_to_shared(slot));
    if constexpr (sizeof(pack) == 16)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3])
                     : "r"(at)
                     : "memory");
    else if constexpr (sizeof(pack) == 8)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(pack.words[0]), "=r"(pack.words[1])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pack.words[0]) : "r"(at) : "memory");
    return pack;
}

// Makes the compiler unpack again what it would rather keep unpacked, in twice the registers: `zero` is a zero that
// it can't know.
__device__ __forceinline__ void keep_packed(Pack<In>& pack, uint zero) {
    if constexpr (sizeof(In) == 2 && kWide > 1) {
#pragma unroll
        for (int i = 0; i < int(sizeof(pack) / 4); ++i) pack.words[i] ^= zero;
    }
}

// Loads can go past the registers, but not those of two bytes.
#if __CUDA_ARCH__ >= 800
constexpr bool kAsync = CONGRUENT && kPackBytes<In> >= 4;
#else
constexpr bool kAsync = false;
#endif

// From global straight into a slot of shared memory that only this thread uses: no barrier is needed, only
// wait_for_groups before the thread reads it.
__device__ __forceinline__ void load_async(Pack<In>* slot, const In* from) {
    const uint at = uint(__cvta_generic_to_shared(slot));
    if constexpr (kAsync && kPackBytes<In> == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    else if constexpr (kAsync)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(kPackBytes<In>) : "memory");
    else {
        Pack<In> pack;
        load(pack, from, true);
        *slot = pack;
    }
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
