// The table of kernels, from which select.cc chooses.
#pragma once

#include <algorithm>
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
  int blocks_per_sm;
  bool wgmma = false;          // of Hopper alone, for rows of x that TMA can load
  bool scale_weights = false;  // and not sums
  int share = 1;               // blocks of a cluster that load x for each other
  bool windows = false;        // on images are the rows of x
  bool direct = false;         // of direct.cuh, for no more rows of x than its tile has
  cudaError_t (*prepare)(bool& fits) = nullptr;
  cudaError_t (*launch)(BlockScaledMm const&, int split, Submit const&) = nullptr;
};

// How many blocks share K, none without a step, where it is split over up to `split`.
inline int count_parts(BlockScaledMm const& p, int step, int split) {
  int64_t const steps = std::max<int64_t>(1, ceil_div(p.k, step));
  return int(ceil_div(steps, ceil_div(steps, split)));
}
inline int64_t sums_of_part(BlockScaledMm const& p) { return int64_t(p.batch) * p.m * p.n; }

// The kernel that adds the sums of all parts (add_parts.cu).
cudaError_t prepare_add_parts();
cudaError_t add_parts(BlockScaledMm const& problem, int parts, Submit const& submit);

cudaError_t prepare_dequantize_weights();

// In a source for each.
template <DType In, int kBits>
void add_instances(std::vector<Instance>& to);
void add_f32_instances(std::vector<Instance>& to);
template <DType In>
void add_wgmma_instances(std::vector<Instance>& to);

}  // namespace jax_qmm::block_scaled
