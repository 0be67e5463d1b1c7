// The table of kernels, from which select.cc chooses.
#pragma once

#include <vector>

#include "block_scaled_mm/block_scaled_mm.h"

namespace jax_qmm::block_scaled {

struct Instance {
  DType in;
  int bits;
  bool float_zero_points;  // else integers, or none; with float32 x any
  int unit;                // columns after which sums are scaled: blocks are multiples of it
  int tile_m, rows;        // of x and of weights, of a block
  int step;                // columns of K, of all warps that share it
  int threads, blocks_per_sm;
  cudaError_t (*prepare)(bool& fits);
  cudaError_t (*launch)(BlockScaledMm const&, Submit const&);
};

// In a source for each.
template <DType In, int kBits>
void add_instances(std::vector<Instance>& to);
void add_f32_instances(std::vector<Instance>& to);

}  // namespace jax_qmm::block_scaled
