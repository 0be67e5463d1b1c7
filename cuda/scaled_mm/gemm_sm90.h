// One kernel of the table of instances, defined in gemm_sm90.cuh and instantiated one to a source file.
#pragma once

#include "scaled_mm/scaled_mm.h"

namespace jax_qmm::sm90 {

enum class Accum { kFast, kFull };
enum class Schedule { kPingpong, kCooperative };

template <DType In, Accum accum, int OutBytes, int TileM, int TileN, int TileK, int ClusterM, int ClusterN,
          Schedule schedule, bool Swap>
struct Gemm {
  static cudaError_t prepare();
  static cudaError_t launch(ScaledMm const& problem, int swizzle, int sm_count, cudaStream_t stream);
};

}  // namespace jax_qmm::sm90

// The kernel of one line of instances_sm90.def.
#define JAX_QMM_GEMM(in, accum, out_bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, swap)           \
  ::jax_qmm::sm90::Gemm<::jax_qmm::DType::in, ::jax_qmm::sm90::Accum::accum, out_bytes, tile_m, tile_n, tile_k,   \
                        cluster_m, cluster_n, ::jax_qmm::sm90::Schedule::schedule, swap>
