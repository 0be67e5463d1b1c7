// The table of kernels, from which select.cc chooses.
#pragma once

#include <vector>

#include "conv/conv.h"

namespace jax_qmm::conv {

struct Instance {
  int tile_m, tile_n, stages, threads, blocks_per_sm;
  int shared_bytes;
  cudaError_t (*prepare)(bool& fits);
  cudaError_t (*launch)(Conv const&, Submit const&);
};

void add_instances(std::vector<Instance>& to);

}  // namespace jax_qmm::conv
