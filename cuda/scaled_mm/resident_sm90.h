// The kernel of products whose blocks keep their columns of b, defined in resident_sm90.cu.
#pragma once

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm::sm90 {

template <int TileK>
struct ResidentB {
  static cudaError_t prepare(bool& fits);
  static cudaError_t launch(ScaledMm const& problem, int swizzle, Gpu const& gpu, Submit const& submit);
};

}  // namespace jax_qmm::sm90
