// Products of two 8-bit operands whose scales, and maybe zero points, belong to blocks along K.
//
//   t[l, m, n, g] = sum_{k in g} a[l, m, k] * b[l, n, k] - zero_point_a[l, m, g] * sums_b[l, n, g]
//                                                        - zero_point_b[l, n, g] * sums_a[l, m, g]
//   y[l, m, n] = sum_g scale_a[l, m, g] * scale_b[l, n, g] * t[l, m, n, g] + bias[l, n]
//   out[l, m, n] = activation(y[l, m, n])
//
// sums_b are those of b over a block, sums_a those of a less its zero point. Products of int8 are summed in int32; all
// else is float32: each zero point with one fused multiply-add, then block after block
// y = fma(scale_a, scale_b * t, y), so that an int8 result is the same whatever the tile. Of fp8 up to four parts
// of the blocks may be added up by themselves. Then the bias, the activation, and one rounding to the output's dtype.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <vector>

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm {

// What a side has of each row and block.
struct InBlocks {
  // float32 (batch, rows, groups), of 2^shift rows of the side each; without data zeros.
  struct Vector {
    float const* data = nullptr;
    int64_t batch_stride = 0;
    int shift = 0;

    __host__ __device__ float const* at(int l, int row, int groups) const {
      return data + l * batch_stride + int64_t(row >> shift) * groups;
    }
  };
  Vector scale, zero_point, sums;

  // Whether the rows of a tile do. Then a scale is loaded once: many threads that ask for one place wait for each
  // other.
  __host__ __device__ bool shares_scales() const { return scale.shift > 0; }
};

// Of the terms of a ScaledMm it has the bias alone.
struct BlockQuantizedMm : ScaledMm {
  static constexpr int kShortest = 32, kLongest = 256;  // blocks, by powers of two
  static constexpr int kLog2Shared = 7, kShared = 128;  // rows of b that may share their scales
  static constexpr int kFewRows = 64;                   // of a; up to here reading b may be what counts

  int block;  // columns that share a scale; the last one may be short
  InBlocks of_a, of_b;

  int groups() const { return int(ceil_div(k, block)); }
  // Whether rows of the output begin at whole 16 bytes.
  bool stores_whole() const {
    return (reinterpret_cast<uintptr_t>(out) | uintptr_t(n) * bytes_of(out_dtype)) % 16 == 0;
  }
  bool has_zero_points() const { return of_a.zero_point.data != nullptr || of_b.zero_point.data != nullptr; }
};

// The kernel of the table that serves the problem and is predicted to be the fastest; none where none does.
std::optional<int> select_block_quantized_mm(BlockQuantizedMm const& problem, Gpu const& gpu);
std::vector<int> block_quantized_mm_choices(BlockQuantizedMm const& problem, Gpu const& gpu);
std::string describe_block_quantized_mm(int instance);

// Leaves only the kernels whose words have this to choose from, for tests: all with "". Not while other threads choose.
void restrict_block_quantized_mm(std::string words);

// Loads the kernels on the current device. Call it once per device, outside of stream capture.
cudaError_t prepare_block_quantized_mm();

// Submits a kernel that computes the product on the current device. Empty outputs are legal, and need none.
cudaError_t launch_block_quantized_mm(BlockQuantizedMm const& problem, int instance, Submit const& submit);

}  // namespace jax_qmm
