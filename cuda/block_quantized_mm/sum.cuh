// The sums of a block, as tensor cores have them.
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

}  // namespace jax_qmm::block_quantized
