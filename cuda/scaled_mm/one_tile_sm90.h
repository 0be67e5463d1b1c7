// The kernel whose blocks compute one tile each, or a part of its K, defined in one_tile_sm90.cu.
#pragma once

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm::sm90 {

template <DType In, int OutBytes, int TileX, int TileY, int TileK, int ClusterX, int ClusterY, int Split,
          int BlocksPerSm, bool Swap, bool kFull = false>
struct OneTile {
  static cudaError_t prepare(bool& fits);
  static cudaError_t launch(ScaledMm const& problem, int swizzle, Gpu const& gpu, Submit const& submit);
};

}  // namespace jax_qmm::sm90

// The kernel of one ONE_TILE line of instances_sm90.def.
#define JAX_QMM_ONE_TILE(in, ...) ::jax_qmm::sm90::OneTile<::jax_qmm::DType::in, __VA_ARGS__>
