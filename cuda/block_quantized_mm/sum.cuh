// The sums of a block, as tensor cores have them, and what they add to an output.
#pragma once

#include "block_quantized_mm/block_quantized_mm.h"

namespace jax_qmm::block_quantized {

// Sums of int8 start from a float that is as large as to have units of 1, as bits: they are that float plus the sum,
// of which one subtraction takes the float away, exactly. So no sum is converted. Those of a block are 2^22 at most.
template <class Accumulator>
struct Sum;
template <>
struct Sum<int32_t> {
  static_assert(128 * 128 * BlockQuantizedMm::kLongest <= 1 << 22);
  static constexpr int32_t kStart = 0x4b400000;  // 1.5 * 2^23
  __device__ static float value(int32_t sum) { return __int_as_float(sum) - 12582912.0f; }
};
template <>
struct Sum<float> {
  static constexpr float kStart = 0;
  __device__ static float value(float sum) { return sum; }
};

// The total of the blocks before, and of one more. `of_a` and `of_b` give what a row of a side has of the block: its
// scale, zero point and sum. One code for all kernels but that of rows of b that share scales: their results are the
// same bits.
template <bool kZeroPointsOfA, bool kZeroPointsOfB = kZeroPointsOfA, class OfA, class OfB>
__device__ float add_scaled(float total, float sum, OfA const& of_a, OfB const& of_b) {
  if constexpr (kZeroPointsOfA) sum = fmaf(-of_a(1), of_b(2), sum);
  if constexpr (kZeroPointsOfB) sum = fmaf(-of_b(1), of_a(2), sum);
  return fmaf(of_a(0), of_b(0) * sum, total);
}

}  // namespace jax_qmm::block_quantized
