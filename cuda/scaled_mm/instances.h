// The table of kernels, and what its parts (select.cc, cost.cc, words.cc, launch.cc) ask of each other.
#pragma once

#include <vector>

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/gemm_sm90.h"
#include "scaled_mm/kinds.h"
#include "scaled_mm/problem.h"
#include "scaled_mm/scaled_mm.h"

namespace jax_qmm {

struct Instance {
  bool (*has_code)(int arch);  // for GPUs of this compute capability
  DType in;
  Accum accum;
  int out_bytes;  // of multistage kernels 0: they have any output
  int tile_m, tile_n, tile_k, cluster_m, cluster_n;
  Schedule schedule;
  bool swap;
  bool full_epilogue;
  int blocks_per_sm, warps, split;
  int warps_m, warps_n, stages;  // of multistage kernels: warps that share a tile's M, its N
  cudaError_t (*prepare)(bool& fits);
  cudaError_t (*launch)(ScaledMm const&, int swizzle_or_split, Gpu const&, Submit const&);

  // How many rows of a the tiles of a cluster have.
  int rows_of_a() const { return swap ? tile_n * cluster_n : tile_m * cluster_m; }
  // That the stages of a multistage kernel take of shared memory; it needs little more.
  int stage_bytes() const { return stages * (tile_m + tile_n) * tile_k; }
  // Whether its time is estimated, and not predicted from costs that were measured.
  bool estimated() const { return schedule == Schedule::kResidentB || schedule == Schedule::kMultistage; }
  bool persistent() const { return schedule == Schedule::kPingpong || schedule == Schedule::kCooperative; }
};

std::vector<Instance> const& instances();

// Its words without the swizzle.
std::string describe(Instance const& instance);

Accum accum_of(ScaledMm const& problem);

// How the operands' rows are aligned: 16 bytes, those of the output too; 8, where only rows of a and b are not, but at
// 4 bytes; 4; or 1, for the kernel for any alignment.
int alignment(ScaledMm const& problem);
bool suits(Instance const& instance, int alignment);

// Whether the GPU runs it on rows of this alignment, and has no better ones for these.
bool may_choose(Gpu const& gpu, int instance, int alignment);

int64_t workspace_of(Instance const& instance, ScaledMm const& problem);

// Whether it can compute the product, if its operands are aligned.
bool serves(Instance const& instance, ScaledMm const& problem);
int swizzle_for(Instance const& instance, ScaledMm const& problem);

// Whether the GPU can run it: it has the code and the shared memory, and `prepare_scaled_mm` has found no device of
// this process on which its clusters don't fit.
bool runs_on(Gpu const& gpu, int instance);

// Of tiles, or of the one tile that the blocks of a cluster share.
int64_t count_clusters(Instance const& instance, ScaledMm const& problem);

// Microseconds of kernels without measured costs, from the description of the GPU: all but CUTLASS' and those of one
// tile.
double estimate_time(Instance const& instance, ScaledMm const& problem, Gpu const& gpu);

// Microseconds that the cost model predicts for each instance; infinite where it does not choose it.
std::vector<double> predict_times(ScaledMm const& problem, Gpu const& gpu);

// Makes `select_scaled_mm` choose again what it has chosen.
void forget_choices();

}  // namespace jax_qmm
