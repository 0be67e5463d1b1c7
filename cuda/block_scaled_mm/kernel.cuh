// Products of 16-bit x by warp-level tensor cores. Weights are the operand with 16 rows, and go from global memory to
// registers, a step ahead; x goes through shared memory. Warps share the rows of weights of a block and then K, whose
// parts are added in a fixed order.
#pragma once

#include "block_scaled_mm/step.cuh"
#include "block_scaled_mm/windows.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"

namespace jax_qmm::block_scaled {

template <class C, class X>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) block_scaled_mm_kernel(typename X::Params p) {
#if __CUDA_ARCH__ >= 800  // else nothing: select.cc chooses no kernel
  using Term = typename C::Weights::Term;
  constexpr int kTilesM = C::kTileM / 8, kTiles = C::kTiles;
  extern __shared__ __align__(128) uint8_t shared[];
  uint32_t const stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));

  // Blocks that have the same weights are neighbours.
  int const first_m = blockIdx.x % p.tiles_m * C::kTileM, l = blockIdx.x / (p.tiles_m * p.tiles_n);
  int const first_n = blockIdx.x / p.tiles_m % p.tiles_n * C::kRows;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  int const warp_n = warp / C::kWarpsK * kTiles * 16, warp_k = warp % C::kWarpsK;

  begin();
  int const k_begin = blockIdx.y * p.k_of_part, k_end = min(p.k, k_begin + p.k_of_part);
  X x(p, l, first_m, k_begin, k_end);
  SourceOfWeights<C> weights(p, l, first_n + warp_n, warp_k, k_begin, k_end);
  x.clear(stages);
#pragma unroll
  for (int s = 0; s < C::kStages - 1; ++s) {
    x.copy(stages + s * C::kStageBytes);
    commit_copies();
  }
  Held<C> held = {}, next = {};
  bool more = weights.more();  // columns to multiply with this warp's weights
  weights.load(held);

  // Where this lane's chunk of x is of 32 columns: of the first and of the second half of 64.
  uint32_t const lane_x[2] = {swizzled<C::kPitch>(lane % 8, lane / 8) + warp_k * C::kColumns * 2,
                              swizzled<C::kPitch>(lane % 8, lane / 8 + 4) + warp_k * C::kColumns * 2};
  float acc[kTiles][kTilesM][4] = {};
  int stage = 0, copied_stage = C::kStages - 1;

  auto const step = [&](Held<C> const& held, Held<C>& next) {
    bool const now = more;
    more = weights.more();
    weights.load(next);
    wait_for_copies<C::kStages - 2>();
    __syncthreads();
    x.copy(stages + copied_stage * C::kStageBytes);
    commit_copies();
    uint32_t const from = stages + stage * C::kStageBytes;
    copied_stage = stage;
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
    if (!now) return;

    Term terms[kTiles][2][C::kHeld];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int u = 0; u < C::kHeld; ++u) {
          float const scale = to_float(held.scales[i][h][u], p.scale.dtype);
          terms[i][h][u] = C::Weights::term(scale, held.zeros[i][h][u], p.zero_point.dtype);
        }
      }
    }
    auto const take = [&](auto piece, int i, int h, Term& first, Term& second) {
      take_terms<C, 32 * decltype(piece)::value>(terms[i][h], first, second);
    };
    multiply_step<C>(held.words, acc, take, [&](auto piece, auto tile, uint32_t (&b)[4]) {
      constexpr int kBegin = 32 * decltype(piece)::value, kRow = 8 * decltype(tile)::value;
      load_matrices<kRow * C::kPitch + kBegin / 64 * 128>(b[0], b[1], b[2], b[3], from + lane_x[kBegin / 32 % 2]);
    });
  };
  int const steps = (k_end - k_begin + C::kStep - 1) / C::kStep;
  if constexpr (C::kMoves) {
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      step(held, next);
      held = next;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < steps; i += 2) {
      step(held, next);
      step(next, held);  // maybe behind the end, where x is 0
    }
  }
  wait_for_copies<0>();
  __syncthreads();

  auto* const partial = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kTilesM; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        int const m = 8 * j + 2 * member + c % 2, row = warp_n + 16 * i + group + c / 2 * 8;
        partial[(warp_k * C::kTileM + m) * C::kSumsPitch + row] = acc[i][j][c];
      }
    }
  }
  __syncthreads();
  write_sums<C>(p, l, first_m, first_n, partial);
#endif
}

template <class C, class X>
cudaError_t prepare(bool& fits) {
  auto* const kernel = reinterpret_cast<void const*>(block_scaled_mm_kernel<C, X>);
  return prepare_kernel(kernel, {{}, C::kThreads, C::kSharedBytes}, fits);
}

template <class C, class X>
cudaError_t launch(BlockScaledMm const& problem, int split, Submit const& submit) {
  typename X::Params params = X::make_params(problem);
  int const parts = set_parts<C>(problem, split, params);
  dim3 const blocks(params.tiles_m * params.tiles_n * unsigned(problem.batch), parts);
  LaunchShape const shape{blocks, C::kThreads, C::kSharedBytes};
  cudaError_t const error = jax_qmm::launch(submit, shape, block_scaled_mm_kernel<C, X>, params);
  return error || parts == 1 ? error : add_parts(problem, parts, submit);
}

template <class C, class X = SourceOfX<C>>
Instance instance(DType in) {
  Instance i = describe<C>(in);
  i.windows = X::kWindows;
  i.prepare = prepare<C, X>;
  i.launch = launch<C, X>;
  return i;
}

}  // namespace jax_qmm::block_scaled
