// Products of int8 and of int4 that becomes int8 on the way: values less the zero point of their block, times its
// multiple, exactly.
//
//   out[l, m, n] = sum_k x[l, m, k] * multiple[l, n, g] * (w[l, n, k] - zero_point[l, n, g])      g = k / block
//
// in int32. What is multiplied to x has to be in the range of int8. For so few rows of x that reading w is what counts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/launch.h"

namespace jax_qmm {

struct ExpandedMm {
  static constexpr int kColumns = 32;  // K and blocks are multiples of it

  int8_t const* x;                      // (batch, m, k)
  uint8_t const* w;                     // (batch, n, k), two values a byte, the first of them in its lower half
  int8_t const *multiple, *zero_point;  // (batch, n, blocks of k); zero_point may be null
  int32_t* out;                         // (batch, m, n)
  int batch, m, n, k, block;
  int64_t x_batch_stride, w_batch_stride, multiple_batch_stride,
      zero_point_batch_stride;  // elements; 0 for a shared one
};

// Loads the kernels on the current device. Call it once per device, outside of stream capture.
cudaError_t prepare_expanded_mm();

// Submits a kernel that computes the product on the current device. Empty outputs are legal, and need none.
cudaError_t launch_expanded_mm(ExpandedMm const& problem, Submit const& submit);

}  // namespace jax_qmm
