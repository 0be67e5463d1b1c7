// The table of kernels, from which select.cc chooses.
#pragma once

#include <initializer_list>
#include <vector>

#include "conv/conv.h"
#include "core/prepare.h"
#include "core/words.h"

namespace jax_qmm::conv {

struct Instance {
  std::string words;
  bool (*serves)(Conv const&);
  cudaError_t (*prepare)(bool& fits);
  cudaError_t (*launch)(Conv const&, Submit const&);
  int shared_bytes = 0;
  bool is_depthwise = false;
  int steps_of_window = 0;  // of the kernels for windows of few bytes, which have so many 32 bytes
  // Of implicit GEMMs.
  int tile_m = 0, tile_n = 0, tile_k = 0, stages = 0, blocks_per_sm = 0;
  bool wgmma = false;        // of Hopper alone
  bool is_resident = false;  // keeps weights in shared memory
  int share = 1, parts = 1;  // blocks of a cluster that share weights, or K
};

// Prepares the kernels of an instance, of which each runs for other problems.
inline cudaError_t prepare_all(std::initializer_list<void const*> kernels, LaunchShape const& shape, bool& fits) {
  fits = true;
  for (void const* const kernel : kernels) {
    bool this_fits;
    if (cudaError_t const error = prepare_kernel(kernel, shape, this_fits)) return error;
    fits = fits && this_fits;
  }
  return cudaSuccess;
}

// In a source for each.
void add_implicit_gemm(std::vector<Instance>& to);
void add_short_window(std::vector<Instance>& to);
void add_depthwise_square(std::vector<Instance>& to);
void add_depthwise(std::vector<Instance>& to);
void add_wgmma(std::vector<Instance>& to);
void add_resident(std::vector<Instance>& to);

}  // namespace jax_qmm::conv
