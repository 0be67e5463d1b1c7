// What becomes of the epilogue's float32 results: the activation, then one rounding to the output's dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "quantize/arithmetic.cuh"
#include "scaled_mm/problem.h"

namespace jax_qmm {

// An integer that has the bits of a result.
template <int kBytes>
using BitsOf = std::conditional_t<kBytes == 1, uint8_t, std::conditional_t<kBytes == 2, uint16_t, uint32_t>>;

// The output of plain kernels: which of the dtypes of its width it has.
struct PlainOutput {
  DType dtype;

  // `Out` holds the bits of N results.
  template <class Out, int N, class Values, class Sums>
  __device__ Out round(Values const& values, Sums const& sums) const {
    uint32_t words[(sizeof(Out) + 3) / 4];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (sizeof(Out) == 4 * N) {
        words[i] = dtype == DType::kS32 ? static_cast<uint32_t>(sums[i]) : __float_as_uint(values[i]);
      } else if (i % 2 == 0) {
        words[i / 2] = round_two(values[i], i + 1 < N ? values[i + 1] : 0.0f);
      }
    }
    Out out;
    memcpy(&out, words, sizeof(Out));
    return out;
  }

  template <class Bits, class Sum>
  __device__ Bits round_one(float value, Sum sum) const {
    return round<Bits, 1>(&value, &sum);
  }

 private:
  // To the lower and the upper 16 bits: one instruction for both.
  __device__ uint32_t round_two(float lower, float upper) const {
    if (dtype == DType::kBF16) return bits(__floats2bfloat162_rn(lower, upper));
    return bits(__floats2half2_rn(lower, upper));
  }

  template <class Two>
  __device__ static uint32_t bits(Two two) {
    return reinterpret_cast<uint32_t const&>(two);
  }
};

// y / (1 + 2^x), off by less than 2^-20 |y|, where x = y (once + cubed y^2): silu with -log2(e) and 0, and with kOnce
// and kCubed the tanh form of gelu, x = -2 log2(e) sqrt(2 / pi) (y + 0.044715 y^3). One code for both, and short:
// blocks run it once a tile, at the speed of its way to the SM.
//
// PTX documents errors of 2^-22 of the value for ex2.approx and 2^-23 for rcp.approx; the sum and the product are
// rounded once, 2^-24 each. x is off by 2^-22 of itself: no more than four roundings follow one another on the way to
// it. That moves the result by |t| s (1 - s) 2^-22 |y| with t = x ln(2) and s = 1 / (1 + exp(t)), of which |t| s (1 -
// s) is below 0.23 for every t. From 2^126 on, where t is above 87.3, rcp.approx gives 0 instead of less than 2^-119.
__device__ inline float logistic_product(float y, float once, float cubed) {
  float const x = y * fmaf(cubed, fminf(y * y, 0x1p100f), once);  // cubed may be 0, and then y^2 must not be infinite
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return y * inverse;
}

// The output of full kernels, at one entry of the batch.
struct FullOutput {
  DType dtype;
  Activation activation;
  float low, high;  // between which a clamp keeps its results, and quotients are kept in reach of `divide`
  quantize::AnyDivisor scale;
  float zero_point;
  bool is_usual;  // 8 bits without a curve or a zero point, by a scale whose factor is 1: all these divide quickly

  template <class Out, int N, class Values, class Sums>
  __device__ Out round(Values const& values, Sums const& sums) const {
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = values[i];
    if constexpr (sizeof(Out) == N) {
      uint32_t words[(N + 3) / 4];
      if (is_usual) {  // in one piece, as few warps wait long at each branch
        clamp(y);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = scale.of.divide_quickly<true>(y[i]);
        if (dtype == DType::kF8E4M3) {
          convert_all<quantize::Kind::kFp8, true>(words, y);
        } else {
          convert_all<quantize::Kind::kInt8, true>(words, y);
        }
      } else {
        activate(y);
        clamp(y);
        divide(y);
        if (dtype == DType::kF8E4M3) {
          convert_all<quantize::Kind::kFp8, true>(words, y);
        } else if (fabsf(zero_point) <= 0x1p21f) {
          convert_all<quantize::Kind::kInt8ZeroPoint, true>(words, y);
        } else {
          convert_all<quantize::Kind::kInt8ZeroPoint, false>(words, y);
        }
      }
      Out out;
      memcpy(&out, words, sizeof(Out));
      return out;
    } else {
      activate(y);
      if (activation == Activation::kClamp) clamp(y);
      return PlainOutput{dtype}.round<Out, N>(y, sums);
    }
  }

  template <class Bits, class Sum>
  __device__ Bits round_one(float value, Sum sum) const {
    return round<Bits, 1>(&value, &sum);
  }

 private:
  template <int N>
  __device__ void activate(float (&y)[N]) const {
    if (activation != Activation::kGelu && activation != Activation::kSilu) return;
    constexpr float kLog2e = 1.4426950408889634f;
    constexpr float kOnce = -2.302208198144325f, kCubed = -0.1029432395800235f;
    bool const gelu = activation == Activation::kGelu;
    float const once = gelu ? kOnce : -kLog2e, cubed = gelu ? kCubed : 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = logistic_product(y[i], once, cubed);
  }

  template <int N>
  __device__ void clamp(float (&y)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = quantize::max_nan(quantize::min_nan(y[i], high), low);
  }

  // By the scale. Each branch is the same for all threads.
  template <int N>
  __device__ void divide(float (&y)[N]) const {
    auto const each = [&](auto f) {
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = f(y[i]);
    };
    if (scale.factor != 1) each([&](float x) { return scale.factor * x; });
    if (scale.of.quick) {
      each([&](float x) { return scale.of.divide_quickly<true>(x); });
    } else {
      each([&](float x) { return scale.of.divide_quickly<false>(x); });
    }
  }

  template <quantize::Kind kind, bool kBounded, int N>
  __device__ void convert_all(uint32_t* words, float const (&quotients)[N]) const {
    auto const at = [&](int i) { return i < N ? quantize::shift<kind, kBounded>(quotients[i], zero_point) : 0.0f; };
#pragma unroll
    for (int i = 0; i < N; i += 4) words[i / 4] = quantize::convert<kind>(at(i), at(i + 1), at(i + 2), at(i + 3));
  }
};

}  // namespace jax_qmm
