// Products by kernels of several stages (multistage.cuh), for every GPU from Turing on. Where tiles are too few, K is
// split over blocks too (split_k.h).
#pragma once

#include "core/launch.cuh"
#include "core/prepare.h"
#include "scaled_mm/gemm_sm80.h"
#include "scaled_mm/multistage.cuh"
#include "scaled_mm/split_k.h"
#include "scaled_mm/write_tile.cuh"

namespace jax_qmm::sm80 {

// Writes a warp's part of the tile as sums of a part of K.
template <class C>
__device__ void write_sums(typename C::Accumulator const (&acc)[C::kFragmentsM][C::kFragmentsN][4],
                           typename C::Accumulator* to, Params const& p, int l, int first_m, int first_n) {
  struct alignas(8) Two {
    typename C::Accumulator left, right;
  };
  int const group = threadIdx.x % 32 / 4, member = threadIdx.x % 4, pitch = pitch_of_part(p.n);
#pragma unroll
  for (int i = 0; i < C::kFragmentsM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const m = first_m + 16 * i + 8 * half + group;
      if (m >= p.m) continue;
      auto* const row = to + (int64_t(l) * p.m + m) * pitch + 2 * member;
#pragma unroll
      for (int j = 0; j < C::kFragmentsN; ++j) {
        int const n = first_n + 8 * j;
        if (n < pitch) *reinterpret_cast<Two*>(row + n) = {acc[i][j][2 * half], acc[i][j][2 * half + 1]};
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads) multistage_kernel(Params p) {
  using Accumulator = typename C::Accumulator;
  constexpr int kM = C::kFragmentsM, kN = C::kFragmentsN;
  extern __shared__ __align__(128) uint8_t shared[];
  uint32_t const stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));

  Place<C> const at(p);
  int const lane = threadIdx.x % 32;
  begin();

  Accumulator acc[kM][kN][4] = {};
  sum_products<C>(p, at, stages, rows_of_a<C>(p, at), rows_of_b<C>(p, at), acc, [](int) {}, [](int) {});
  __syncthreads();  // the terms take the place of the stages, from one of which fragments were loaded in vain

  bool const has_all_of_k = p.parts == nullptr;
  if (has_all_of_k) load_terms<C>(p, at, shared);
  auto* const sums = reinterpret_cast<Accumulator*>(shared + C::kTermsBytes) + at.part * C::kPartSums;
  if constexpr (C::kWarpsK > 1) {
    auto const each_sum = [&](auto use) {
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) use(acc[i][j][c], 32 * ((i * kN + j) * 4 + c) + lane);
        }
      }
    };
    if (at.slice > 0) {
      Accumulator* const to = sums + (at.slice - 1) * C::kWarpM * C::kWarpN;
      each_sum([&](Accumulator& sum, int i) { to[i] = sum; });
    }
    __syncthreads();
    if (at.slice > 0) return;
#pragma unroll
    for (int s = 0; s < C::kWarpsK - 1; ++s) {
      Accumulator const* const from = sums + s * C::kWarpM * C::kWarpN;
      each_sum([&](Accumulator& sum, int i) { sum = add(sum, from[i]); });
    }
    __syncwarp();
  } else {
    __syncthreads();
  }

  if (!has_all_of_k) {
    auto* const to = static_cast<Accumulator*>(p.parts) + blockIdx.y * p.sums_of_part;
    return write_sums<C>(acc, to, p, at.l, at.first_m + at.warp_m, at.first_n + at.warp_n);
  }
  write_tile<C>(acc, p, at, shared);
}

template <DType In, Accum accum, int TileM, int TileN, int TileK, int WarpsM, int WarpsN, int WarpsK, int Stages>
cudaError_t Gemm<In, accum, TileM, TileN, TileK, WarpsM, WarpsN, WarpsK, Stages>::prepare(bool& fits) {
  using C = Config<In, accum, TileM, TileN, TileK, WarpsM, WarpsN, WarpsK, Stages>;
  int device, most;
  if (cudaError_t const error = cudaGetDevice(&device)) return error;
  if (cudaError_t const error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device))
    return error;
  fits = C::kSharedBytes <= most;
  if (!fits) return cudaSuccess;
  if (cudaError_t const error = prepare_add_parts()) return error;
  LaunchShape const shape{{}, C::kThreads, C::kSharedBytes};
  return prepare_kernel(reinterpret_cast<void const*>(multistage_kernel<C>), shape, fits);
}

template <DType In, Accum accum, int TileM, int TileN, int TileK, int WarpsM, int WarpsN, int WarpsK, int Stages>
cudaError_t Gemm<In, accum, TileM, TileN, TileK, WarpsM, WarpsN, WarpsK, Stages>::launch(ScaledMm const& p, int split,
                                                                                         Gpu const&,
                                                                                         Submit const& submit) {
  using C = Config<In, accum, TileM, TileN, TileK, WarpsM, WarpsN, WarpsK, Stages>;
  Params const params = make_params<C>(p, split);
  unsigned const blocks = params.tiles_m * params.tiles_n * unsigned(p.batch);
  LaunchShape const shape{dim3(blocks, split), C::kThreads, C::kSharedBytes};
  cudaError_t const error = jax_qmm::launch(submit, shape, multistage_kernel<C>, params);
  return error || split == 1 ? error : add_parts(p, split, submit);
}

}  // namespace jax_qmm::sm80
