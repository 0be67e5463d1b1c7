// One kernel of the table for every GPU from Turing on, defined in gemm_sm80.cuh and instantiated in sources that CMake
// makes of instances_sm80.def.
#pragma once

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/kinds.h"
#include "scaled_mm/problem.h"

namespace jax_qmm::sm80 {

template <DType In, Accum accum, int TileM, int TileN, int TileK, int WarpsM, int WarpsN, int WarpsK, int Stages>
struct Gemm {
  static cudaError_t prepare(bool& fits);
  static cudaError_t launch(ScaledMm const& problem, int split, Gpu const& gpu, Submit const& submit);
};

}  // namespace jax_qmm::sm80

// The kernel of one MULTISTAGE line of instances_sm80.def.
#define JAX_QMM_MULTISTAGE(in, accum, tile_m, tile_n, tile_k, warps_m, warps_n, warps_k, stages)                 \
  ::jax_qmm::sm80::Gemm<::jax_qmm::DType::in, ::jax_qmm::Accum::accum, tile_m, tile_n, tile_k, warps_m, warps_n, \
                        warps_k, stages>
