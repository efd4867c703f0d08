#pragma once
// What attention does to its scores before the softmax, fused with it: a scale, a mask, causality.
//
// Without SCORES all of this is nothing and compiles to nothing. Macros beside those of common.cuh:
//   SCORES   1: the kernel takes a scale, and perhaps the rest
//   MASK     1: and a boolean mask, read byte by byte; 2: the bytes of a pack at once
//   CAUSAL   1: row r has the columns up to r % cols, and no others

#include "common.cuh"
#include "fused_memory.cuh"
#include "fused_team.cuh"

#ifndef MASK
#define MASK 0
#endif
#ifndef CAUSAL
#define CAUSAL 0
#endif

typedef unsigned char uchar;

// A mask of one byte an element, broadcast to the input: the axes that a row's number counts over, slowest first, and
// the stride along a row, in bytes.
struct MaskLayout {
    long long extents[4], strides[4], col;

    __device__ const uchar* row(const uchar* mask, long long row) const {
#pragma unroll
        for (int axis = 3; axis > 0; --axis) {
            if (extents[axis] == 1) continue;
            mask += row % extents[axis] * strides[axis];
            row /= extents[axis];
        }
        return mask + row * strides[0];
    }
};

// The bits to flip in the i-th word of a pack to negate its elements.
__device__ __forceinline__ constexpr uint sign_bits(int i) {
    if (sizeof(In) == 8) return i % 2 ? 0x80000000 : 0;
    return sizeof(In) == 4 ? 0x80000000 : kWide == 1 ? 0x8000 : 0x80008000;
}

// -inf twice, for elements of two bytes.
__device__ __forceinline__ uint lowest_pair() {
    Pack<In> lowest_pack = empty_pack();
    return lowest_pack.words[0];
}

// A mask's bytes for a pack; nonzero keeps.
struct Keep {
#if MASK
    uint words[(kWide + 3) / 4];

    __device__ __forceinline__ bool of(int i) const { return words[i / 4] >> i % 4 * 8 & 0xff; }
    // For elements i and i + 1 of two bytes: all of their bits or none. Bytes become halves of a word, whose high bits
    // an addition sets where they aren't 0, and these fill the halves.
    __device__ __forceinline__ uint pair(int i) const {
        const uint halves = __byte_perm(words[i / 4], 0, i % 4 ? 0x4342 : 0x4140);
        uint kept;  // __byte_perm has no selector that repeats a byte's sign
        asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(kept) : "r"(halves + 0x7fff7fff));
        return kept;
    }
    // -inf for what isn't kept.
    __device__ __forceinline__ void apply(Pack<In>& pack) const {
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
            if constexpr (sizeof(In) > 2 || kWide == 1) {
                if (!of(i)) pack.at[i] = lowest(In());
            } else if (i % 2 == 0) {
                const uint kept = pair(i);
                pack.words[i / 2] = (pack.words[i / 2] & kept) | (lowest_pair() & ~kept);
            }
        }
    }
#else
    __device__ __forceinline__ bool of(int) const { return true; }
    __device__ __forceinline__ void apply(Pack<In>&) const {}
#endif
};

// What packs go through before the softmax sees them. A pack's elements are neighbors along a row, or, with ACROSS, one
// in each of neighboring rows.
template <bool ACROSS> struct Screen {
#if MASK
    const uchar* mask;
    long long step, between;  // from column to column, and from element to element of a pack
#endif
#if CAUSAL
    long long lasts[ACROSS ? kWide : 1];  // the last column of each row
#endif
#if SCORES
    bool flips;
#endif

    // Whether the i-th element of the pack at that column comes before its row's end.
    __device__ __forceinline__ bool reaches(long long col, int i) const {
#if CAUSAL
        return ACROSS ? col <= lasts[i] : col + i <= lasts[0];
#else
        return true;
#endif
    }
    // Whether any of them may.
    __device__ __forceinline__ bool reaches(long long col) const {
        bool any = reaches(col, 0);
#pragma unroll
        for (int i = 1; ACROSS && i < kWide; ++i) any |= reaches(col, i);
        return any;
    }
    // The pack's part of the mask; none of it unless it's wanted.
    __device__ __forceinline__ Keep keep(long long col, bool wanted) const {
        Keep found = {};
#if MASK
        const uchar* from = mask + col * step;
        if constexpr (MASK == 1) {
#pragma unroll
            for (int i = 0; i < kWide; ++i)
                if (wanted) found.words[i / 4] |= uint(from[i * between]) << i % 4 * 8;
        } else if (wanted) {
            if constexpr (kWide == 8) {
                const uint2 both = *reinterpret_cast<const uint2*>(from);
                found.words[0] = both.x, found.words[1] = both.y;
            } else if constexpr (kWide == 4)
                found.words[0] = *reinterpret_cast<const uint*>(from);
            else
                found.words[0] = *reinterpret_cast<const unsigned short*>(from);
        }
#endif
        return found;
    }
    // Brings it to the L2 cache.
    __device__ __forceinline__ void prefetch(long long col) const {
#if MASK
        asm volatile("prefetch.global.L2 [%0];" ::"l"(mask + col * step));
#endif
    }
    __device__ __forceinline__ bool counts(const Keep& keep, long long col, int i) const {
        return keep.of(i) && reaches(col, i);
    }
    // A single element at that column.
    __device__ __forceinline__ bool counts(long long col) const {
#if MASK
        return reaches(col, 0) && mask[col * step];
#else
        return reaches(col, 0);
#endif
    }
    // The pack at that column, negated for a negative scale, and -inf where it doesn't count.
    __device__ __forceinline__ void apply(Pack<In>& pack, const Keep& keep, long long col) const {
#if SCORES
        if (flips) {
#pragma unroll
            for (int i = 0; i < int(sizeof(pack) / 4); ++i) pack.words[i] ^= sign_bits(i);
        }
        keep.apply(pack);
        if (CAUSAL && (ACROSS || !reaches(col, kWide - 1))) {
#pragma unroll
            for (int i = 0; i < kWide; ++i)
                if (!reaches(col, i)) pack.at[i] = lowest(In());
        }
#endif
    }
    __device__ __forceinline__ Acc apply(Acc x, long long col) const {
#if SCORES
        return counts(col) ? flips ? -x : x : lowest(Acc());
#else
        return x;
#endif
    }
};

// What the kernel gets.
struct Scores {
#if SCORES
    const uchar* mask;
    Acc scale;
    MaskLayout layout;
#endif

    // Positive: a negative scale's sign goes to the elements, so that the largest is still what counts.
    __device__ __forceinline__ Scale abs_scale() const {
#if SCORES
        return {2 * (scale < 0 ? -scale : scale)};
#else
        return {};
#endif
    }
    // For a row, or with ACROSS for it and the next ones.
    template <bool ACROSS> __device__ __forceinline__ Screen<ACROSS> screen(long long row, long long cols) const {
        Screen<ACROSS> found;
#if MASK
        found.mask = layout.row(mask, row);
        found.step = layout.col;
        found.between = ACROSS ? layout.strides[3] : layout.col;
#endif
#if CAUSAL
#pragma unroll
        for (int i = 0; i < (ACROSS ? kWide : 1); ++i) found.lasts[i] = (row + i) % cols;
#endif
#if SCORES
        found.flips = scale < 0;
#endif
        return found;
    }
};

// For a kernel's signature and body.
#if SCORES
#define SCORES_PARAMETERS const uchar *given_mask, Acc given_scale, MaskLayout given_layout,
#define SCORES_ARGUMENTS {given_mask, given_scale, given_layout}
#else
#define SCORES_PARAMETERS
#define SCORES_ARGUMENTS {}
#endif
