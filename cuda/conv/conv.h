// Convolutions of int8, with scales, zero points and bias applied to the sums.
//
//   l[i, q, c] = lhs[i, q, c] - zero_point_lhs[i], r[o, t, c] = rhs[o, t, c] - zero_point_rhs[o]
//   sum[i, p, o] = sum_{t, c} l[i, p * strides + t * dilation - before, c of o's group] * r[o, t, c]
//   y[i, p, o] = scale_lhs[i] * scale_rhs[o] * sum[i, p, o] + bias[o] + residual[i, p, o]
//   out[i, p, o] = activation(y[i, p, o])
//
// for each entry of a batch. q, p and t have three axes each. Where the window reaches out of an image it adds nothing.
// The sums are int32, modulo 2^32; what follows them is that of scaled_mm/problem.h, int32 outputs included. A residual
// of int8 is scale_residual * (residual - zero_point_residual), which joins what stands before it by one fused
// multiply-add.
//
// It is computed as a product: a row of it is an output pixel, a column an output channel, and K is taps, then channels
// of a group. Outside of an image stands its zero point, so that what it adds is the same for all pixels of an image:
//
//   sum = sum_k lhs * rhs - azp * azp_adj - sums_a * azp_b
//
// with azp = zero_point_lhs[i], azp_adj[o] the sums of rhs, azp_b = zero_point_rhs[o], and sums_a[i, p, g] the sums of
// l over the window and the channels of group g.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <vector>

#include "conv/windows.h"
#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm {

// In terms of the product: a is lhs (batch, images, *image, groups * channels), b is rhs (batch, n, *taps, channels),
// out (batch, images, *pixels, n); m = images * pixels, k = taps * channels. Vectors of rows have a value for each
// image, but sums_a, which has (batch, m * groups).
struct Conv : ScaledMm, Windows {
  static constexpr int kOldest = 80;         // compute capability 8.0, the first that the kernels were tested for
  static constexpr int kMostGroups = 65535;  // that a grid has
  static constexpr int kMostTaps = 256;      // of a depthwise convolution

  int sums;         // m * groups
  Vector residual;  // (batch, m, n), int8 or float
  Vector scale_residual, zero_point_residual;

  bool has_zero_points() const {
    return azp.data != nullptr || azp_adj.data != nullptr || sums_a.data != nullptr || azp_b.data != nullptr;
  }

  // Whether each channel is a group, with one output channel.
  bool is_depthwise() const { return channels == 1 && groups == n; }
};

// The kernel of the table that serves the problem and is predicted to be the fastest; none where none does.
std::optional<int> select_conv(Conv const& problem, Gpu const& gpu);
std::vector<int> conv_choices(Conv const& problem, Gpu const& gpu);
std::string describe_conv(int instance);

// Leaves only the kernels whose words have this to choose from, for tests: all with "". Not while other threads choose.
void restrict_conv(std::string words);

// Loads the kernels on the current device. Call it once per device, outside of stream capture.
cudaError_t prepare_conv();

// Submits a kernel that computes the convolution on the current device. Empty outputs are legal, and need none.
cudaError_t launch_conv(Conv const& problem, int instance, Submit const& submit);

}  // namespace jax_qmm
