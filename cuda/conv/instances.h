// The table of kernels, from which select.cc chooses.
#pragma once

#include <vector>

#include "conv/conv.h"

namespace jax_qmm::conv {

struct Instance {
  int depthwise_channels;  // of a thread, in kernels for convolutions of each channel by itself; 0 in others
  int tile_m, tile_n, tile_k, threads, blocks_per_sm;
  int shared_bytes;
  cudaError_t (*prepare)(bool& fits);
  cudaError_t (*launch)(Conv const&, Submit const&);
};

// In a source for each.
void add_implicit_gemm(std::vector<Instance>& to);
void add_depthwise(std::vector<Instance>& to);

}  // namespace jax_qmm::conv
