// One kernel of the table of instances, defined in gemm_sm90.cuh and instantiated one to a source file.
#pragma once

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/kinds.h"
#include "scaled_mm/problem.h"

namespace jax_qmm::sm90 {

// The same product as a batch of tiles of rows that overlap, where M would leave the last of a few tiles partly empty:
// TMA fills missing rows with zeros more slowly than it reads rows, which shows from 16 of them on. Rows in two tiles
// are computed twice, alike. A tile still lacks up to tiles - 2 rows. Not where b does not stay in L2, as each tile of
// rows reads it again.
inline ScaledMm overlap_tiles(ScaledMm p, int rows_of_cluster, int64_t l2_bytes) {
  int constexpr kMostTiles = 4, kFewRows = 16;
  int const tiles = (p.m - 1) / rows_of_cluster + 1;
  if (p.batch > 1 || tiles < 2 || tiles > kMostTiles || tiles * rows_of_cluster - p.m < kFewRows) return p;
  if (int64_t(p.n) * p.k > l2_bytes) return p;
  int const step = (p.m - rows_of_cluster + tiles - 2) / (tiles - 1);
  p.batch = tiles;
  p.m -= (tiles - 1) * step;
  p.a_batch_stride = int64_t(step) * p.k;
  p.out_batch_stride = int64_t(step) * p.n;
  auto const step_rows = [&](Vector& vector, auto direction) {
    if (direction.kOfRow) vector.batch_stride = step * vector.stride;
  };
  each_term(step_rows, p, Terms<true, Direction>{});
  return p;
}

template <DType In, Accum accum, int OutBytes, int TileM, int TileN, int TileK, int ClusterM, int ClusterN,
          Schedule schedule, bool Swap, bool kFull = false>
struct Gemm {
  static cudaError_t prepare(bool& fits);
  static cudaError_t launch(ScaledMm const& problem, int swizzle, Gpu const& gpu, Submit const& submit);
};

}  // namespace jax_qmm::sm90

// The kernel of one line of instances_sm90.def.
#define JAX_QMM_GEMM(in, accum, out_bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, ...)              \
  ::jax_qmm::sm90::Gemm<::jax_qmm::DType::in, ::jax_qmm::Accum::accum, out_bytes, tile_m, tile_n, tile_k, cluster_m, \
                        cluster_n, ::jax_qmm::Schedule::schedule, __VA_ARGS__>
