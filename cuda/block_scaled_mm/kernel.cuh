// Products of 16-bit x by warp-level tensor cores. Weights are the operand with 16 rows, so that 8 rows of x suffice
// for a product: the kernel reads weights at the rate of memory where x has one row, and where it has 16. Weights go
// from global memory to registers, a step ahead; x through shared memory. Warps share the rows of weights of a block
// and then K, whose parts are added in a fixed order.
#pragma once

#include "block_scaled_mm/instances.h"
#include "block_scaled_mm/sources.cuh"
#include "block_scaled_mm/windows.cuh"
#include "core/launch.cuh"
#include "core/mma.cuh"
#include "core/prepare.h"
#include "core/unroll.cuh"

namespace jax_qmm::block_scaled {

__device__ inline void multiply(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1, __half) {
  mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
}
__device__ inline void multiply(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
  mma_bf16(c, a[0], a[1], a[2], a[3], b0, b1);
}

// The terms of the unit of 16 columns from `kBegin` on, and of that of the next 16.
template <class C, int kBegin, class Term>
__device__ void take_terms(Term const (&held)[C::kHeld], Term& first, Term& second) {
  auto const take = [&](int unit) {
    return C::kUnits == 1 ? held[0] : held[unit / 4].from_lane((threadIdx.x & 28) + unit % 4);
  };
  first = take(kBegin / C::kUnit);
  second = C::kUnit == 16 ? take(kBegin / C::kUnit + 1) : first;
}

// The pairs of 32 columns from `kBegin` on.
template <class C, int kBegin, class Term>
__device__ void dequantize(uint32_t const (&words)[4], Term const& first, Term const& second, uint32_t (&to)[4]) {
  using Weights = typename C::Weights;
  if constexpr (C::kBits == 8) {
    uint32_t pairs[2][2];
    Weights::pairs(words[kBegin / 16], first, first, pairs[0]);
    Weights::pairs(words[kBegin / 16 + 1], second, second, pairs[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = pairs[i / 2][i % 2];
  } else {
    Weights::pairs(words[kBegin / 32], first, second, to);
  }
}

// Adds the parts of all warps that share K, and writes the results of a tile.
template <class C>
__device__ void write_sums(Params const& p, int l, int first_m, int first_n, float const* partial) {
  write_rows<C::kRows, C::kSumsPitch, C::kThreads>(p, partial, C::kWarpsK, C::kTileM, min(C::kTileM, p.m - first_m), l,
                                                   first_m, first_n);
}

template <class C, class X>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) block_scaled_mm_kernel(typename X::Params p) {
#if __CUDA_ARCH__ >= 800  // else nothing: select.cc chooses no kernel
  using T = typename C::Value;
  using Weights = typename C::Weights;
  using Term = typename Weights::Term;
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
          terms[i][h][u] = Weights::term(scale, held.zeros[i][h][u], p.zero_point.dtype);
        }
      }
    }
    float sums[kTiles][kTilesM][4];
    unroll<C::kColumns / 32>([&](auto piece) {  // ldmatrix loads 32 columns of x, mma.sync multiplies 16
      constexpr int kBegin = 32 * decltype(piece)::value;
      uint32_t fragments[2][kTiles][4];
      Term unit_terms[2][kTiles][2];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t pairs[4];
          take_terms<C, kBegin>(terms[i][h], unit_terms[0][i][h], unit_terms[1][i][h]);
          dequantize<C, kBegin>(held.words[i][h], unit_terms[0][i][h], unit_terms[1][i][h], pairs);
#pragma unroll
          for (int j = 0; j < 4; ++j) fragments[j / 2][i][j % 2 * 2 + h] = pairs[j];
        }
      }
      unroll<kTilesM>([&](auto tile) {
        constexpr int j = decltype(tile)::value;
        uint32_t b[4];
        load_matrices<j * 8 * C::kPitch + kBegin / 64 * 128>(b[0], b[1], b[2], b[3], from + lane_x[kBegin / 32 % 2]);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            auto& sum = sums[i][j];
            int const begin = kBegin + 16 * half;
#pragma unroll
            for (int c = 0; c < 4 && begin % C::kUnit == 0; ++c) sum[c] = 0;
            multiply(sum, fragments[half][i], b[2 * half], b[2 * half + 1], T{});
#pragma unroll
            for (int c = 0; c < 4 && (begin + 16) % C::kUnit == 0; ++c) {
              acc[i][j][c] = fmaf(unit_terms[half][i][c / 2].scale, sum[c], acc[i][j][c]);
            }
          }
        }
      });
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

// How many blocks share K.
template <class C>
int set_parts(BlockScaledMm const& problem, int split, Params& params) {
  int const parts = count_parts(problem, C::kStep, split);
  if (parts > 1) {
    params.k_of_part = int(ceil_div(ceil_div(problem.k, C::kStep), parts) * C::kStep);
    params.parts = static_cast<float*>(problem.workspace);
  }
  return parts;
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

template <class C>
Instance describe(DType in) {
  return {in, C::kBits, C::kFloatZero, C::kUnit, C::kTileM, C::kRows, C::kStep, C::kBlocksPerSm};
}

template <class C, class X = SourceOfX<C>>
Instance instance(DType in) {
  Instance i = describe<C>(in);
  i.windows = X::kWindows;
  i.prepare = prepare<C, X>;
  i.launch = launch<C, X>;
  return i;
}

// All kernels for x of a dtype and weights of as many bits.
template <DType In, int kBits>
void add_instances(std::vector<Instance>& to) {
  using T = std::conditional_t<In == DType::kBF16, __nv_bfloat16, __half>;
  auto const add = [&](auto float_zero, auto unit) {
    constexpr bool kFloatZero = decltype(float_zero)::value;
    constexpr int kUnit = decltype(unit)::value;
    to.push_back(instance<Config<T, kBits, kFloatZero, kUnit, 8, 2, 1, 8>>(In));
    to.push_back(instance<Config<T, kBits, kFloatZero, kUnit, 16, 2, 2, 4>>(In));
    to.push_back(instance<Config<T, kBits, kFloatZero, kUnit, 32, kUnit == 16 ? 1 : 2, 4, 2>>(In));
    if constexpr (kUnit > 32) to.push_back(instance<Config<T, kBits, kFloatZero, kUnit, 64, 2, 8, 1>>(In));
  };
  add(std::false_type(), std::integral_constant<int, 512 / kBits>());
  add(std::false_type(), std::integral_constant<int, 32>());
  add(std::false_type(), std::integral_constant<int, 16>());
  add(std::true_type(), std::integral_constant<int, 16>());
  auto const add_windows = [&](auto const& config) {
    using C = std::decay_t<decltype(config)>;
    to.push_back(instance<C, SourceOfWindows<C>>(In));
  };
  add_windows(Config<T, kBits, false, 32, 16, 2, 2, 4>());
  add_windows(Config<T, kBits, false, 32, 32, 2, 4, 2>());
  add_windows(Config<T, kBits, false, 32, 64, 2, 8, 1>());
  add_windows(Config<T, kBits, true, 16, 16, 2, 2, 4>());
}

}  // namespace jax_qmm::block_scaled
