// What a warp does with 64 bytes of each of its rows of weights, whatever way they and x come.
#pragma once

#include "block_scaled_mm/instances.h"
#include "block_scaled_mm/sources.cuh"
#include "core/mma.cuh"
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

// Adds a step's products to `acc`. `take(piece, i, h, first, second)` gives the terms of 32 columns of a row as
// take_terms does, and `load_x(piece, tile, b)` those of 8 rows of x as fragments.
template <class C, class Take, class LoadX>
__device__ void multiply_step(uint32_t const (&words)[C::kTiles][2][4], float (&acc)[C::kTiles][C::kTileM / 8][4],
                              Take take, LoadX load_x) {
  using Term = typename C::Weights::Term;
  constexpr int kTilesM = C::kTileM / 8, kTiles = C::kTiles;
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
        take(piece, i, h, unit_terms[0][i][h], unit_terms[1][i][h]);
        dequantize<C, kBegin>(words[i][h], unit_terms[0][i][h], unit_terms[1][i][h], pairs);
#pragma unroll
        for (int j = 0; j < 4; ++j) fragments[j / 2][i][j % 2 * 2 + h] = pairs[j];
      }
    }
    unroll<kTilesM>([&](auto tile) {
      constexpr int j = decltype(tile)::value;
      uint32_t b[4];
      load_x(piece, tile, b);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          auto& sum = sums[i][j];
          int const begin = kBegin + 16 * half;
#pragma unroll
          for (int c = 0; c < 4 && begin % C::kUnit == 0; ++c) sum[c] = 0;
          multiply(sum, fragments[half][i], b[2 * half], b[2 * half + 1], typename C::Value{});
#pragma unroll
          for (int c = 0; c < 4 && (begin + 16) % C::kUnit == 0; ++c) {
            acc[i][j][c] = fmaf(unit_terms[half][i][c / 2].scale, sum[c], acc[i][j][c]);
          }
        }
      }
    });
  });
}

// Adds the parts of all warps that share K, and writes the results of a tile.
template <class C>
__device__ void write_sums(Params const& p, int l, int first_m, int first_n, float const* partial) {
  write_rows<C::kRows, C::kSumsPitch, C::kThreads>(p, partial, C::kWarpsK, C::kTileM, min(C::kTileM, p.m - first_m), l,
                                                   first_m, first_n, p.n);
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

template <class C>
Instance describe(DType in) {
  return {in, C::kBits, C::kFloatZero, C::kUnit, C::kTileM, C::kRows, C::kStep, C::kBlocksPerSm};
}

}  // namespace jax_qmm::block_scaled
