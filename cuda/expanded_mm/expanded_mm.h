// Products of int8 and of int4 that becomes int8 on the way: values less the zero point of their block, times its
// multiple, exactly.
//
//   b[l, n, k] = multiple[l, n, g] * (w[l, n, k] - zero_point[l, n, g])      g = k / block
//   out[l, m, n] = scale_a[l, m] * scale_b[l, n] * sum_k a[l, m, k] * b[l, n, k] + bias[l, n]
//
// b has to be in the range of int8. The rest is the arithmetic of ScaledMm; an int32 output is the sums themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm {

// Of the terms of a ScaledMm it has both scales and the bias, and workspace, for sums of parts of tiles. In place of b
// stands w: (batch, n, k), two values a byte, the first of them in its lower half.
struct ExpandedMm : ScaledMm {
  static constexpr int kColumns = 32;  // K and blocks are multiples of it
  static constexpr int kFewRows = 64;  // of a; up to here reading w is what counts

  int block;
  int8_t const *multiple, *zero_point;                             // (batch, n, groups); zero_point may be null
  int64_t multiple_batch_stride = 0, zero_point_batch_stride = 0;  // elements; 0 for a shared one

  int groups() const { return int(ceil_div(k, block)); }
};

// The kernels of the table that serve the problem with the workspace that it has, and of these the one that is
// predicted to be the fastest; none where none does.
std::vector<int> expanded_mm_choices(ExpandedMm const& problem, Gpu const& gpu);
std::optional<int> select_expanded_mm(ExpandedMm const& problem, Gpu const& gpu);
std::string describe_expanded_mm(int instance);

// The bytes of workspace that a kernel needs.
int64_t workspace_of(ExpandedMm const& problem, int instance, Gpu const& gpu);

// Leaves only the kernels whose words have this to choose from, for tests: all with "". Not while other threads choose.
void restrict_expanded_mm(std::string words);

// Loads the kernels on the current device. Call it once per device, outside of stream capture.
cudaError_t prepare_expanded_mm();

// Submits a kernel that computes the product on the current device. Empty outputs are legal, and need none.
cudaError_t launch_expanded_mm(ExpandedMm const& problem, int instance, Submit const& submit);

}  // namespace jax_qmm
