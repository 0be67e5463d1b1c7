// The table of kernels, from which select.cc chooses.
#pragma once

#include <optional>
#include <vector>

#include "block_quantized_mm/block_quantized_mm.h"
#include "core/few_rows.h"

namespace jax_qmm::block_quantized {

constexpr int kBlocksOfSlot = 4;  // whose terms come together in Hopper's kernels

struct Instance {
  DType in;
  bool zero_points;       // whether it has terms for them
  int shortest, longest;  // blocks that it serves
  int tile_m, tile_n, stages, threads, blocks_per_sm;
  int shared_bytes;
  bool wgmma = false;       // of Hopper alone, for rows that TMA can load
  bool persistent = false;  // with results that TMA writes
  bool of_a_alone = false;  // with zero points, of a alone
  bool shared_b = false;    // for rows of b that share their scales
  int share = 1;            // blocks of a cluster that load an operand for each other,
  int parts = 1;            // or that share K
  std::optional<FewRowsCycles> few_rows{};
  int tile_k = 0;  // of kernels for few rows: that all warps multiply at a time
  cudaError_t (*prepare)(bool& fits) = nullptr;
  cudaError_t (*launch)(BlockQuantizedMm const&, Submit const&) = nullptr;
};

// In a source for each.
template <DType In, bool kZeroPoints>
void add_instances(std::vector<Instance>& to);
template <DType In, bool kZeroPoints>
void add_wgmma_instances(std::vector<Instance>& to);
template <DType In, bool kZeroPoints>
void add_persistent_instances(std::vector<Instance>& to);
template <DType In, bool kZeroPoints>
void add_few_rows(std::vector<Instance>& to);

}  // namespace jax_qmm::block_quantized
