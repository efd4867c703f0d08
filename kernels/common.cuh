#pragma once
// What every rung of the ladder shares: the types, the layout of the input, and the last step.
//
// Each .cu file is compiled by itself with these macros, and needs nothing but NVRTC (no header of the toolkit):
//   IN, OUT   half | bfloat16 | float | double: type of the input and of the output
//   LOG       1: log-softmax, 0: softmax

typedef unsigned int uint;
typedef unsigned long long address_t;

// The half types are storage only: arithmetic is done in Acc<T>, float for them.
struct half { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

template <class T> struct AccOf { typedef float type; };
template <> struct AccOf<double> { typedef double type; };

typedef IN In;
typedef OUT Out;
typedef AccOf<In>::type Acc;

__device__ __forceinline__ float to_acc(half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float to_acc(bfloat16 x) { return __uint_as_float(uint(x.bits) << 16); }
__device__ __forceinline__ float to_acc(float x) { return x; }
__device__ __forceinline__ double to_acc(double x) { return x; }

__device__ __forceinline__ void from_acc(half& y, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ __forceinline__ void from_acc(bfloat16& y, float x) {
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    // Round to nearest even by hand; a NaN must not be rounded into an infinity.
    const uint bits = __float_as_uint(x);
    y.bits = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fff;
#endif
}
__device__ __forceinline__ void from_acc(float& y, float x) { y = x; }
__device__ __forceinline__ void from_acc(double& y, double x) { y = x; }

// -inf, the max of nothing.
__device__ __forceinline__ half lowest(half) { return {0xfc00}; }
__device__ __forceinline__ bfloat16 lowest(bfloat16) { return {0xff80}; }
__device__ __forceinline__ float lowest(float) { return __int_as_float(0xff800000); }
__device__ __forceinline__ double lowest(double) { return __longlong_as_double(0xfff0000000000000); }

// An input seen as outer x cols x inner with one stride each, in elements; softmax runs over cols.
// A row is one (outer, inner) pair. The output is contiguous.
struct Layout {
    long long rows, cols, inner;
    long long x_outer, x_col, x_inner;

    __device__ const In* x_row(const In* x, long long row) const {
        return inner == 1 ? x + row * x_outer : x + row / inner * x_outer + row % inner * x_inner;
    }
    __device__ Out* out_row(Out* out, long long row) const {
        return inner == 1 ? out + row * cols : out + row / inner * cols * inner + row % inner;
    }
};

// Results in a half type take the hardware's 2^x alone: its error is a thousandth of their last digit.
__device__ __forceinline__ Acc exponential(Acc x) {
    if constexpr (sizeof(Out) == 2)
        return __expf(x);
    else
        return exp(x);
}

// A sum that starts from nothing but -inf: subtracting 0 instead of -inf makes its terms 0 and not NaN.
__device__ __forceinline__ Acc shift_for(Acc max) { return max == lowest(Acc()) ? Acc(0) : max; }

// Kahan's summation: `lost` is what rounding has taken from `sum`, to be given back with the next term.
__device__ __forceinline__ void add(Acc& sum, Acc& lost, Acc term) {
    const Acc corrected = term - lost, next = sum + corrected;
    lost = (next - sum) - corrected;
    sum = next;
}

// The last step, for x less the row's max: a row of nothing but -inf has sum 0 and becomes NaN here.
__device__ __forceinline__ Acc normalize(Acc x, Acc sum) { return LOG ? x - log(sum) : exponential(x) / sum; }
