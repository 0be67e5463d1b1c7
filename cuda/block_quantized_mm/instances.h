// The table of kernels, from which select.cc chooses.
#pragma once

#include <vector>

#include "block_quantized_mm/block_quantized_mm.h"

namespace jax_qmm::block_quantized {

struct Instance {
  DType in;
  bool zero_points;  // whether it has terms for them
  bool half_stages;  // for blocks of 32 columns alone; else for longer ones
  int tile_m, tile_n, stages, threads, blocks_per_sm;
  int shared_bytes;
  cudaError_t (*prepare)(bool& fits);
  cudaError_t (*launch)(BlockQuantizedMm const&, Submit const&);
};

// In a source for each.
template <DType In, bool kZeroPoints>
void add_instances(std::vector<Instance>& to);

}  // namespace jax_qmm::block_quantized
