// The arithmetic of the quantizers, bit for bit as quantize.h has it, on the device and on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

namespace jax_qmm::quantize {

enum class Kind { kInt8, kInt8ZeroPoint, kFp8 };

// NaN where one of both is; of zeros the largest is +0, the least -0.
__host__ __device__ inline float max_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || b != b ? NAN : fmaxf(a, b);
#endif
}
__host__ __device__ inline float min_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || b != b ? NAN : fminf(a, b);
#endif
}

// The largest absolute value seen, or the distances to which values reach above and below zero; at first 0. Their bit
// patterns are ordered as unsigned integers are, NaN above infinity, so that one integer maximum reduces them.
struct Range {
  uint32_t high = 0, low = 0;
};

// Sign dropped: of NaN and of -0, all else is positive.
__host__ __device__ inline uint32_t range_bits(float magnitude) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(magnitude) & 0x7fffffff;
#else
  uint32_t bits;
  memcpy(&bits, &magnitude, 4);
  return bits & 0x7fffffff;
#endif
}

__host__ __device__ inline float range_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float magnitude;
  memcpy(&magnitude, &bits, 4);
  return magnitude;
#endif
}

// Rounds half to even and saturates; NaN gives 0, as the PTX manual has it for these conversions.
__host__ __device__ inline int round_to_int32(float x) {
#ifdef __CUDA_ARCH__
  return __float2int_rn(x);
#else
  return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : static_cast<int>(nearbyintf(x));
#endif
}

template <Kind kind>
struct Scale {
  float scale;
  int32_t zero_point = 0;

  __host__ __device__ Scale(float scale, int32_t zero_point) : scale(scale), zero_point(zero_point) {}

  __host__ __device__ explicit Scale(Range range) {
    float const high = range_float(range.high), low = range_float(range.low);
    float const steps = kind == Kind::kInt8 ? 127.0f : kind == Kind::kFp8 ? 448.0f : 255.0f;
    if constexpr (kind == Kind::kInt8ZeroPoint) {
      float const unit = high + low > FLT_MAX ? 0.5f : 1.0f;  // a range that overflows is taken by halves
      scale = (unit * high + unit * low) / (unit * steps);
    } else {
      scale = high / steps;
    }
    scale = scale < FLT_MIN ? FLT_MIN : scale;  // in this order NaN stays
    if constexpr (kind == Kind::kInt8ZeroPoint) {
      int const rounded = round_to_int32(-128.0f + low / scale);
      zero_point = rounded < -128 ? -128 : rounded > 127 ? 127 : rounded;
    }
  }
};

// IEEE division of many values by one, in three instructions each.
//
// With r = RN(1 / s), a = RN(x r) and e = RN(a s - x), the result RN(a - e r) is RN(x / s). This is Markstein's
// division, with a first approximation that may be one place further off than his: Let the mantissas be integers X, S
// in [2^23, 2^24) and Q = x / s in units of its last place. r is off by a factor 1 + d, |d| <= S 2^-48, so x r misses Q
// by at most X 2^-24 < 1 and a by less than 3/2. e is exact where |a - Q| <= 1, else off by 2^-24 of itself, so a - e r
// misses Q by less than 5 * 2^-24. The result is wrong only if a midpoint of two floats lies between. Then a is one of
// these two floats: for any other, x r misses Q by more than 1 - 5 * 2^-24, which takes S > X > 2^24 - 6, and there Q
// is nearly an integer. With t the distance from Q to the midpoint, |a - Q| is at most 1/2 + t, e is exact, and a - e r
// misses Q by at most (1/2 + t) S 2^-48. A quotient is never a midpoint, and t is at least 1 / (2 S). So to reach the
// midpoint takes S (S + 1) >= 2^48, which no S satisfies.
//
// r, a and e must not overflow or underflow for this. With s in the range below they do not, wherever |x / s| is in
// [2^-20, 2^127]. Smaller quotients come out small enough to become 0, with the sign of x: where x is a zero e is +0,
// so that a - e r keeps the sign of a. Larger ones saturate, but an infinite a must be kept from the subtraction; there
// is none where the scale comes from the values themselves.
struct Divisor {
  float value, reciprocal;
  bool quick;

  __host__ __device__ explicit Divisor(float s)
      : value(s), reciprocal(1.0f / s), quick(s >= 0x1p-80f && s <= 0x1p80f) {}

  template <bool kBounded>
  __host__ __device__ float divide_quickly(float x) const {
    float const a = x * reciprocal;
    float const e = fmaf(a, value, -x);
    float const quotient = fmaf(-e, reciprocal, a);
    return kBounded || fabsf(a) < INFINITY ? quotient : a;
  }
};

// IEEE division of many values by any one, if what overflows or is minute need only do so: both sides are multiplied by
// a power of two, and by the divisor's sign, which gives one that Divisor is quick for. Where that is not possible,
// divide_quickly<false> gives what division does: by zero it finds an infinity or NaN, and by NaN that. By an infinity,
// 0 times a value is divided by 1.
struct AnyDivisor {
  float factor;
  Divisor of;

  __host__ __device__ explicit AnyDivisor(float s)
      : factor(copysignf(power(fabsf(s)), s)), of(fabsf(s) == INFINITY ? 1.0f : power(fabsf(s)) * fabsf(s)) {}

 private:
  // Where it takes values beyond the range of floats, quotients are beyond that of 8 bits, or 0 in 8 bits.
  __host__ __device__ static float power(float size) {
    return size < 0x1p-80f ? 0x1p96f : size <= 0x1p80f ? 1.0f : size == INFINITY ? 0.0f : 0x1p-64f;
  }
};

// What `quotient` becomes before its conversion to 8 bits. Bounded is one that is less than 2^22 where it does not
// saturate: a quotient and zero point of one range, or any quotient with a zero point up to 2^21.
template <Kind kind, bool kBounded>
__host__ __device__ float shift(float quotient, float zero_point) {
  if constexpr (kind != Kind::kInt8ZeroPoint) return quotient;
  // Adding 1.5 * 2^23 rounds to an integer, without the slow conversion unit. What is added next is an integer too.
  if constexpr (kBounded) return (quotient + 0x1.8p23f) + (zero_point - 0x1.8p23f);
  return rintf(quotient) + zero_point;
}

// Rounds and saturates.
template <Kind kind>
__host__ __device__ uint8_t convert(float x) {
  if constexpr (kind == Kind::kFp8) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  } else {
    int const rounded = round_to_int32(x);
    return static_cast<uint8_t>(rounded < -128 ? -128 : rounded > 127 ? 127 : rounded);
  }
}

// Four at once, the first in the lowest byte.
template <Kind kind>
__host__ __device__ uint32_t convert(float x0, float x1, float x2, float x3) {
#ifdef __CUDA_ARCH__
  if constexpr (kind != Kind::kFp8) {
    uint32_t upper, all;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(round_to_int32(x3)), "r"(round_to_int32(x2)));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
        : "=r"(all)
        : "r"(round_to_int32(x1)), "r"(round_to_int32(x0)), "r"(upper));
    return all;
  } else {
    return __nv_cvt_float2_to_fp8x2({x0, x1}, __NV_SATFINITE, __NV_E4M3) |
           __nv_cvt_float2_to_fp8x2({x2, x3}, __NV_SATFINITE, __NV_E4M3) << 16;
  }
#else
  return convert<kind>(x0) | convert<kind>(x1) << 8 | convert<kind>(x2) << 16 |
         static_cast<uint32_t>(convert<kind>(x3)) << 24;
#endif
}

}  // namespace jax_qmm::quantize
