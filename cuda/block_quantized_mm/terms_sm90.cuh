// How persistent blocks bring scales, zero points and sums to shared memory.
#pragma once

#include "block_quantized_mm/stages_sm90.cuh"

namespace jax_qmm::block_quantized {

struct Tile {
  int l, first_m, first_n;
};

// The rows whose terms a thread brings.
template <class C>
struct RowsOfThread {
  static constexpr int kRowsOfA = C::kTile / C::kTermsThreads, kAll = C::kSharedB ? kRowsOfA + 1 : 2 * kRowsOfA;
  float const* from[C::kVectors][kAll];  // null beyond the last row, and where there are none
  int line[kAll];

  __device__ RowsOfThread(Side const& a, Side const& b, int groups, Tile const& at, int thread) {
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      bool const of_a = i < kRowsOfA;
      int const row = thread + i % kRowsOfA * C::kTermsThreads;
      line[i] = of_a ? row : C::line_of(row);
      Side const& side = of_a ? a : b;
      int const of_side = (of_a ? at.first_m : at.first_n) + row;
      auto const at_row = [&](InBlocks::Vector const& vector) -> float const* {
        return of_side < side.rows && vector.data != nullptr ? vector.at(at.l, of_side, groups) : nullptr;
      };
      from[0][i] = at_row(side.blocks.scale);
      if constexpr (C::kOfA) from[1][i] = at_row(of_a ? side.blocks.zero_point : side.blocks.sums);
      if constexpr (C::kOfB) from[2][i] = at_row(of_a ? side.blocks.sums : side.blocks.zero_point);
    }
  }
};

// Brings the terms of four blocks, of which so many are there. Others become zeros, as those of rows that are not
// there.
template <class C>
__device__ void bring_terms(RowsOfThread<C> const& rows, int first, int there, bool by_fours, typename C::Terms& to) {
#pragma unroll
  for (int v = 0; v < C::kVectors; ++v) {
    float four[RowsOfThread<C>::kAll][kBlocksOfSlot];
#pragma unroll
    for (int i = 0; i < RowsOfThread<C>::kAll; ++i) {
      // No read-only loads: what wrote them may have ended after this kernel began.
      float const* const from = rows.from[v][i];
      if (by_fours) {
        float4 const all = from == nullptr ? float4{} : *reinterpret_cast<float4 const*>(from + first);
        four[i][0] = all.x, four[i][1] = all.y, four[i][2] = all.z, four[i][3] = all.w;
      } else {
#pragma unroll
        for (int j = 0; j < kBlocksOfSlot; ++j) four[i][j] = from == nullptr || j >= there ? 0 : from[first + j];
      }
    }
#pragma unroll
    for (int i = 0; i < RowsOfThread<C>::kAll; ++i) {
      bool const is_last = C::kSharedB && i == RowsOfThread<C>::kRowsOfA;  // of b, whose rows have the first one's
      if (is_last && rows.line[i] != C::kTile) continue;
#pragma unroll
      for (int j = 0; j < kBlocksOfSlot; ++j) to[v][j][rows.line[i]] = four[i][j];
    }
  }
}

}  // namespace jax_qmm::block_quantized
