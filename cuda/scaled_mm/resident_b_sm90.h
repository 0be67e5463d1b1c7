// The kernel whose blocks keep their columns of b and stream rows of a, defined in resident_b_sm90.cu.
#pragma once

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm::sm90 {

constexpr int kResidentWarpgroups = 4;
constexpr int kResidentMostK = 384;  // for which the shared memory has two tiles of each warpgroup

template <int TileN>
struct ResidentB {
  static cudaError_t prepare(bool& fits);
  static cudaError_t launch(ScaledMm const& problem, int swizzle, Gpu const& gpu, Submit const& submit);
};

}  // namespace jax_qmm::sm90

// The kernel of one RESIDENT_B line of instances_sm90.def.
#define JAX_QMM_RESIDENT_B(...) ::jax_qmm::sm90::ResidentB<__VA_ARGS__>
