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

// y / (1 + exp(x)), off by less than 2^-20 |y|, whether x is -y or gelu's.
//
// CUDA documents errors of at most 2 ulp for expf and __fdividef, 2^-22 of their values; the sum is rounded once,
// 2^-24. gelu's x is off by 2^-22 of itself: no more than four roundings follow one another on the way to it. That
// moves the result by |x| s (1 - s) 2^-22 |y| with s = 1 / (1 + exp(x)), of which |x| s (1 - s) is below 0.23 for every
// x. From 2^126 on, where x is above 87.3, __fdividef gives 0 instead of less than 2^-119.
__device__ inline float logistic_product(float y, float x) { return __fdividef(y, 1.0f + expf(x)); }

__device__ inline float silu(float y) { return logistic_product(y, -y); }

// The tanh form: x = -2u, u = sqrt(2 / pi) * (y + 0.044715 * y^3).
__device__ inline float gelu(float y) {
  constexpr float kOnce = -1.5957691216057308f, kCubed = -0.07135481627260026f;  // -2 sqrt(2 / pi), times 0.044715
  return logistic_product(y, y * fmaf(kCubed, y * y, kOnce));
}

// The output of full kernels, at one entry of the batch.
struct FullOutput {
  DType dtype;
  Activation activation;
  float low, high;
  quantize::Divisor scale;
  float zero_point;

  template <class Out, int N, class Values, class Sums>
  __device__ Out round(Values const& values, Sums const& sums) const {
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = values[i];
    activate(y);
    if constexpr (sizeof(Out) == N) {
      uint32_t words[(N + 3) / 4];
      if (dtype == DType::kS8) {
        quantize_all<quantize::Kind::kInt8ZeroPoint>(words, y);
      } else {
        quantize_all<quantize::Kind::kFp8>(words, y);
      }
      Out out;
      memcpy(&out, words, sizeof(Out));
      return out;
    } else {
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
    auto const each = [&](auto f) {
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = f(y[i]);
    };
    switch (activation) {
      case Activation::kNone:
        return;
      case Activation::kClamp:  // NaN stays
        return each([&](float x) { return x < low ? low : x > high ? high : x; });
      case Activation::kGelu:
        return each(gelu);
      case Activation::kSilu:
        return each(silu);
    }
  }

  template <quantize::Kind kind, int N>
  __device__ void quantize_all(uint32_t* words, float const (&y)[N]) const {
    auto const at = [&](int i) {
      if (i >= N) return 0.0f;
      float const quotient = scale.quick ? scale.divide_quickly<false>(y[i]) : y[i] / scale.value;
      return quantize::shift<kind, false>(quotient, zero_point);
    };
#pragma unroll
    for (int i = 0; i < N; i += 4) words[i / 4] = quantize::convert<kind>(at(i), at(i + 1), at(i + 2), at(i + 3));
  }
};

}  // namespace jax_qmm
