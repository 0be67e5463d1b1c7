// Products of floats with integer weights that have a scale, and maybe a zero point, for each block along K.
//
//   y[l, m, n] = sum_k x[l, m, k] * (q[l, n, k] - zero_point[l, n, k / block]) * scale[l, n, k / block] + bias[l, n]
//   out[l, m, n] = activation(y[l, m, n])
//
// q less an integer zero point is exact in 16 bits, and of 4 bits in fp8; less a float one it is rounded to x's dtype
// once. Products are summed in float32 over a block at most, then scaled in float32. One rounding to the output's dtype
// ends it. Where blocks are few, K is split over more of them, whose sums a second kernel adds in their order.
//
// Where the rows of x are windows on images it is a convolution: K is taps, then channels, a row of the result an
// output pixel, and what is outside of an image is 0.
//
// Weights are stored in the order in which a lane of a warp multiplies them, as unsigned integers: q + 8 of 4 bits, q +
// 128 of 8. K is padded to a multiple of kPadding. Each 64 bytes of a row are 4 parts t of 4 little-endian words w:
//   4 bits: 128 columns; bits 4p .. 4p+3 of a word have column 8 * (4w + p % 4) + 2t + p / 4.
//   8 bits: 64 columns; byte p of a word has column 16w + 8 * (p / 2) + 2t + p % 2.
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

struct BlockScaledMm {
  static constexpr int kPadding = 128;
  static constexpr int kLongestK = (1 << 19) - 1;  // with which the number of a block comes of one multiplication

  // Scales or zero points, (batch, n, groups); without data all zero points are 0.
  struct Blocks {
    void const* data = nullptr;
    DType dtype = DType::kF32;
    int64_t batch_stride = 0;
  };

  void const* x;     // (batch, m, k), K contiguous; with windows the images
  uint8_t const* w;  // (batch, n, padded k), in the order above
  void* out;         // (batch, m, n), N contiguous
  int m, n, k, batch;
  int bits;                                // of a weight: 4 or 8
  int block;                               // columns that share a scale: a multiple of 16, or at least k
  int64_t x_batch_stride, w_batch_stride;  // in elements, in bytes; 0 where one matrix serves the whole batch
  DType in, out_dtype;                     // kBF16, kF16 or kF32; in too kF8E4M3, with weights of 4 bits
  Blocks scale, zero_point;                // zero points kS8, within q's range, or floats
  Vector bias;
  Activation activation;
  float low, high;                 // between which kClamp keeps its results
  std::optional<Windows> windows;  // of one group, with channels in multiples of 8
  void* workspace;                 // for sums of parts of K
  int64_t workspace_bytes;

  int padded_k() const { return int(ceil_div(k, kPadding)) * kPadding; }
  int row_bytes() const { return padded_k() / 8 * bits; }
  int groups() const { return int(ceil_div(k, block)); }
  bool float_zero_points() const { return zero_point.data != nullptr && zero_point.dtype != DType::kS8; }
};

// A kernel of the table, and over how many blocks it splits K.
struct BlockScaledMmChoice {
  int instance, split;
};

// Those that serve the problem with the workspace that it has, and of these the one that is predicted to be the
// fastest.
std::vector<BlockScaledMmChoice> block_scaled_mm_choices(BlockScaledMm const& problem, Gpu const& gpu);
std::optional<BlockScaledMmChoice> select_block_scaled_mm(BlockScaledMm const& problem, Gpu const& gpu);
std::string describe_block_scaled_mm(BlockScaledMmChoice choice);
double predict_block_scaled_mm(BlockScaledMm const& problem, Gpu const& gpu);  // seconds; infinite without a kernel

// Leaves only the kernels whose words have this to choose from, for tests, and XLA's product not: all with "". Not
// while other threads choose.
void restrict_block_scaled_mm(std::string words);

// The bytes of workspace that a choice needs.
int64_t workspace_of(BlockScaledMm const& problem, BlockScaledMmChoice choice, Gpu const& gpu);

// Whether writing the weights in x's dtype, and XLA's product with these, is predicted to be faster than any kernel.
bool dequantizes_once(BlockScaledMm const& problem, Gpu const& gpu);

// Loads the kernels on the current device. Call it once per device, outside of stream capture.
cudaError_t prepare_block_scaled_mm();

// Submits the kernels that compute the product on the current device. Empty outputs are legal, and need none.
cudaError_t launch_block_scaled_mm(BlockScaledMm const& problem, BlockScaledMmChoice choice, Submit const& submit);

// Submits the kernel that writes the weights in `out_dtype` to `out`, (batch, n, k); of a problem without x and m.
cudaError_t dequantize_weights(BlockScaledMm const& problem, Submit const& submit);

}  // namespace jax_qmm
