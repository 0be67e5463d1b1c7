// How wgmma kernels with a main loop of their own write rows of their tile: int32 sums in shared memory, the terms of
// rows and columns beside them.
#pragma once

#include "scaled_mm/epilogue.cuh"

namespace jax_qmm {

template <class C, int kThreads, class Bits, class Params, class Output>
__device__ void write_rows_of(Params const& p, Output const& output, typename C::Shared const& shared,
                              int32_t const* partial, int parts, int rows_of_part, int first_row, int rows, int l,
                              int first_m, int first_n, int end_n) {
  constexpr int kEach = 4, kAcross = C::kTileN / kEach, kDown = kThreads / kAcross;
  int const column = threadIdx.x % kAcross * kEach, n = first_n + column;
  if (threadIdx.x >= kAcross * kDown || n >= end_n) return;
  constexpr int kAtOnce = C::kFull ? 2 : 4;  // what waits for shared memory, as far as there are registers
  Terms<C::kFull, Value> of_columns[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) of_columns[j] = shared.columns[column + j];
  Bits* to = static_cast<Bits*>(p.out) + l * p.out_batch_stride + int64_t(first_m + first_row) * p.n + n;
#pragma unroll kAtOnce
  for (int row = threadIdx.x / kAcross; row < rows; row += kDown) {
    int32_t sums[kEach] = {};
    float values[kEach];
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      int4 const more = *reinterpret_cast<int4 const*>(&partial[(part * rows_of_part + row) * C::kPitch + column]);
      sums[0] = add(sums[0], more.x), sums[1] = add(sums[1], more.y);
      sums[2] = add(sums[2], more.z), sums[3] = add(sums[3], more.w);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      auto const pick = [](auto const& arg, auto of_row, auto of_column) { return arg.kOfRow ? of_row : of_column; };
      auto const terms = map_terms<Value>(pick, p.epilogue, shared.rows[first_row + row], of_columns[j]);
      sums[j] = subtract_zero_points(sums[j], terms);
      values[j] = scale(sums[j], terms);
    }
    Bits* const at = to + int64_t(row) * p.n;
    struct alignas(kEach * sizeof(Bits)) Whole {
      Bits bits[kEach];
    };
    if (p.stores_whole) {
      *reinterpret_cast<Whole*>(at) = output.template round<Whole, kEach>(values, sums);
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (n + j < end_n) at[j] = output.template round_one<Bits>(values[j], sums[j]);
      }
    }
  }
}

// Adds up what all parts of K have of some rows of the tile, applies the terms, and writes them; by `kThreads` threads,
// the first of the block. `C` has the tile's columns, the pitch of the sums, and whether the epilogue is the full one;
// `shared` has the terms.
template <class C, int kThreads, class Params, class Output>
__device__ void write_rows(Params const& p, Output const& output, typename C::Shared const& shared,
                           int32_t const* partial, int parts, int rows_of_part, int first_row, int rows, int l,
                           int first_m, int first_n, int end_n) {
  auto const write = [&](auto bits) {
    write_rows_of<C, kThreads, decltype(bits)>(p, output, shared, partial, parts, rows_of_part, first_row, rows, l,
                                               first_m, first_n, end_n);
  };
  if constexpr (C::kFull) {
    if (bytes_of(output.dtype) == 1) return write(BitsOf<1>());
  }
  bytes_of(output.dtype) == 2 ? write(BitsOf<2>()) : write(BitsOf<4>());
}

}  // namespace jax_qmm
