// The kernel whose blocks share a tile's K, defined in split_k_sm90.cu.
#pragma once

#include "scaled_mm/scaled_mm.h"

namespace jax_qmm::sm90 {

constexpr int kSplitRows = 64;    // of b in a tile: a warpgroup's
constexpr int kSplitTileK = 128;  // bytes: what TMA swizzles

template <DType In, int OutBytes, int Columns, int Split, int BlocksPerSm>
struct SplitK {
  static cudaError_t prepare();
  static cudaError_t launch(ScaledMm const& problem, int swizzle, int sm_count, cudaStream_t stream);
};

}  // namespace jax_qmm::sm90

// The kernel of one SPLIT_K line of instances_sm90.def.
#define JAX_QMM_SPLIT_K(in, out_bytes, columns, split, blocks_per_sm) \
  ::jax_qmm::sm90::SplitK<::jax_qmm::DType::in, out_bytes, columns, split, blocks_per_sm>
