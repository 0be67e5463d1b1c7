// The table of kernels, from which select.cc chooses.
#pragma once

#include <string>
#include <vector>

#include "block_scaled_mm/instances.h"
#include "core/words.h"
#include "expanded_mm/expanded_mm.h"

namespace jax_qmm::expanded {

struct Instance {
  std::string words;
  cudaError_t (*prepare)(bool& fits);
  cudaError_t (*launch)(ExpandedMm const&, Submit const&);
  int tile_m = 0, tile_n = 0, tile_k = 0, blocks_per_sm = 0;
  int shared_bytes = 0;
  bool few_rows = false;                        // serves up to kFewRows
  bool (*serves)(ExpandedMm const&) = nullptr;  // or all
  // Of those of Hopper alone.
  bool wgmma = false;
  int parts = 1;                                                              // of K, a block of the cluster each
  block_scaled::Streams (*streams)(ExpandedMm const&, Gpu const&) = nullptr;  // of persistent blocks
  // As measured: of a tile besides its steps of K, of a step, and to share K or tiles. Of few rows a step by itself,
  // and what it takes of an SM that has others too.
  int tile_cycles = 0, step_cycles = 0, sharing_cycles = 0, busy_cycles = 0;
};

// In a source for each.
void add_few_rows(std::vector<Instance>& to);
void add_multistage(std::vector<Instance>& to);
void add_wgmma(std::vector<Instance>& to);
void add_streams(std::vector<Instance>& to);

}  // namespace jax_qmm::expanded
