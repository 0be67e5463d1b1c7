// Weights in their stored order to pairs of 16 bits, in registers, and the scales and zero points of their blocks.
//
// A zero point is subtracted by a magic number: an integer put under the exponent of a float is that float plus the
// integer, in units of its last bit, of which one subtraction takes the float and the zero point away exactly. For
// bfloat16, which reaches as far as float32, the units are 2^-8 and the scale makes up for it: products with the
// largest x stay finite.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "block_scaled_mm/block_scaled_mm.h"

namespace jax_qmm::block_scaled {

// One instruction: of two constants the compiler would make two.
template <uint32_t kMask>
__device__ uint32_t masked(uint32_t word, uint32_t magic) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(kMask), "r"(magic));
  return result;
}

__device__ inline uint32_t subtract(uint32_t a, uint32_t b, __half) {
  uint32_t difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
__device__ inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c, __half) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
__device__ inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c, __nv_bfloat16) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
__device__ inline uint32_t subtract(uint32_t a, uint32_t b, __nv_bfloat16 type) {  // b has its sign turned
  return multiply_add(a, 0x3f803f80, b, type);
}

__device__ inline uint32_t round_pair(float low, float high, __half) {
  __half2 const pair = __floats2half2_rn(low, high);
  return reinterpret_cast<uint32_t const&>(pair);
}
__device__ inline uint32_t round_pair(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t const&>(pair);
}

__device__ inline float to_float(uint32_t bits, DType dtype) {
  if (dtype == DType::kF16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return __uint_as_float(dtype == DType::kBF16 ? bits << 16 : bits);
}

template <class T>
constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;

// q as a float, of weight i of a word.
template <int kBits>
__device__ float to_float(uint32_t word, int i) {
  if constexpr (kBits == 8) {
    return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7550 | i)) - (8388608.0f + 128);
  } else {
    // In place under 2^(23 - 4i), the fourth and later ones after a shift by 12 bits.
    int const at = i < 5 ? i : i - 3;
    float const magic = float(1 << (23 - 4 * at));
    return __uint_as_float((i < 5 ? word : word >> 12) & 0xf << 4 * at | __float_as_uint(magic)) - (magic + 8);
  }
}

// What is known of a block in a row: to be multiplied to the sums of products, and for the pairs.
struct alignas(8) ExactTerm {
  float scale;
  uint32_t zero;

  __device__ ExactTerm from_lane(int lane) const {
    return {__shfl_sync(~0u, scale, lane), __shfl_sync(~0u, zero, lane)};
  }
};
struct FloatTerm {
  float scale, factor, shift;  // a pair has factor * q + shift

  __device__ FloatTerm from_lane(int lane) const {
    return {__shfl_sync(~0u, scale, lane), __shfl_sync(~0u, factor, lane), __shfl_sync(~0u, shift, lane)};
  }
};

// Weights of kBits to pairs of T, less zero points that are integers.
template <class T, int kBits, bool kFloatZero>
struct Dequantizer {
  using Term = ExactTerm;
  static constexpr int kPairs = 16 / kBits;  // of a word, columns 2t and 2t + 1 of one chunk of 8 after the other

  __device__ static Term term(float scale, uint32_t zero_bits, DType) {
    uint32_t const zero = static_cast<int8_t>(zero_bits) + (1 << (kBits - 1));  // of the unsigned weights
    if constexpr (kIsBf16<T>) {
      scale *= 256;
      if constexpr (kBits == 8) return {scale, round_pair(0 - zero / 256.0f, 0 - zero / 256.0f, T{})};
      return {scale, zero * 0x10001 + 0xbf00bf00};  // -0.5, twice
    } else {
      return {scale, zero * 0x10001 + 0x64006400};  // 1024, twice
    }
  }

  // A word of 4 bits has 32 columns, whose halves may have two terms.
  __device__ static void pairs(uint32_t word, Term const& first, Term const& second, uint32_t (&to)[kPairs]) {
    T const type{};
    if constexpr (kIsBf16<T> && kBits == 8) {
      // A byte u under the sign and exponent of -0.5 is -(128 + u) / 256 below 128 and -2u / 256 from there on. Half of
      // that, and what it lacks of -u / 256 where that is more than nothing, are exact.
      constexpr uint32_t kHalf = 0x3f003f00, kMinusOne = 0xbf80bf80;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t const placed = __byte_perm(word, 0xbfbfbfbf, i == 0 ? 0x4140 : 0x4342);
        uint32_t lacks;
        asm("fma.rn.relu.bf16x2 %0, %1, %2, %2;" : "=r"(lacks) : "r"(placed), "r"(kHalf));
        to[i] = multiply_add(multiply_add(placed, kHalf, lacks, type), kMinusOne, first.zero, type);
      }
    } else if constexpr (kIsBf16<T>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t const zero = i < 2 ? first.zero : second.zero;
        to[i] = subtract(masked<0x000f000f>(word >> 4 * i, 0x3f003f00), zero, type);
      }
    } else if constexpr (kBits == 8) {
      to[0] = subtract(__byte_perm(word, 0x64646464, 0x4140), first.zero, type);
      to[1] = subtract(__byte_perm(word, 0x64646464, 0x4342), first.zero, type);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // The upper nibble of a byte counts 16 units of 1024's, or one of 64's.
        uint32_t const zero = i == 0 ? first.zero : second.zero, zero_of_64 = masked<0x00f000f0>(zero << 4, 0xd400d400);
        uint32_t const bytes = word >> 8 * i, sixteenth = 0x2c002c00;
        to[2 * i] = subtract(masked<0x000f000f>(bytes, 0x64006400), zero, type);
        to[2 * i + 1] = multiply_add(masked<0x00f000f0>(bytes, 0x64006400), sixteenth, zero_of_64, type);
      }
    }
  }
};

// Such pairs of bfloat16 times their scale, in two parts, the second of which is what rounding to the first one left:
// so that a weight is rounded once, whatever the dtype of the scale.
template <int kBits>
struct ScalingDequantizer {
  using Exact = Dequantizer<__nv_bfloat16, kBits, false>;
  struct alignas(16) Term {
    uint32_t zero, scale, rest;  // twice each
  };
  static constexpr int kPairs = Exact::kPairs;

  __device__ static Term term(float scale, uint32_t zero_bits, DType dtype) {
    ExactTerm const exact = Exact::term(scale, zero_bits, dtype);
    __nv_bfloat16 const first = __float2bfloat16_rn(exact.scale);
    float const rest = exact.scale - __bfloat162float(first);
    __nv_bfloat16 const second = __float2bfloat16_rn(isfinite(rest) ? rest : 0);
    return {exact.zero, __bfloat16_as_ushort(first) * 0x10001u, __bfloat16_as_ushort(second) * 0x10001u};
  }

  __device__ static void pairs(uint32_t word, Term const& first, Term const& second, uint32_t (&to)[kPairs]) {
    Exact::pairs(word, {0, first.zero}, {0, second.zero}, to);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      Term const& term = i < kPairs / 2 ? first : second;
      uint32_t product;
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(to[i]), "r"(term.rest));
      to[i] = multiply_add(to[i], term.scale, product, __nv_bfloat16{});
    }
  }
};

// Less zero points that are floats: the difference in float32, by a power of two that keeps it within T's range (for
// bfloat16: at most 1), rounded once.
template <class T, int kBits>
struct Dequantizer<T, kBits, true> {
  using Term = FloatTerm;
  static constexpr int kPairs = 16 / kBits;

  __device__ static Term term(float scale, uint32_t zero_bits, DType zero_dtype) {
    constexpr int kMost = kIsBf16<T> ? 0 : 15;  // differences are below two to this
    float const zero = to_float(zero_bits, zero_dtype);
    int const exponent = int(__float_as_uint(fabsf(zero) + 128) >> 23) - 126;  // |q - zero| is below two to this
    int const shrink = min(max(exponent - kMost, 0), 126);
    float const factor = __uint_as_float((127 - shrink) << 23), back = __uint_as_float((127 + shrink) << 23);
    return {scale * back, factor, -zero * factor};
  }

  __device__ static void pairs(uint32_t word, Term const& first, Term const& second, uint32_t (&to)[kPairs]) {
    auto const value = [&](int i, Term const& term) { return fmaf(to_float<kBits>(word, i), term.factor, term.shift); };
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (kBits == 8) {
        to[i] = round_pair(value(2 * i, first), value(2 * i + 1, first), T{});
      } else {
        Term const& term = i < 2 ? first : second;
        to[i] = round_pair(value(i, term), value(i + 4, term), T{});
      }
    }
  }
};

}  // namespace jax_qmm::block_scaled
