// How kernels of several stages write their tile: the epilogue's terms of its rows and columns, and results side by
// side.
#pragma once

#include "scaled_mm/add_nothing.cuh"
#include "scaled_mm/multistage.cuh"

namespace jax_qmm::sm80 {

// Writes a warp's part of the tile: 16 rows of sums at a time go through shared memory, so that each thread has results
// that lie side by side. `add_to` is called as AddNothing is.
template <class C, class Bits, class Sum, class Add>
__device__ void write_part(Sum (&acc)[C::kFragmentsM][C::kFragmentsN][4], void* out, Params const& p,
                           FullOutput const& output, int first_m, int first_n, int end_n,
                           Terms<true, Value> const* rows, Terms<true, Value> const* columns, Sum* part, Add add_to) {
  using Whole = std::conditional_t<sizeof(Bits) == 1, uint2, uint4>;  // what a thread stores at once
  constexpr int kValues = sizeof(Whole) / sizeof(Bits);
  constexpr int kAcross = C::kWarpN / kValues;  // threads for a row
  int const lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  int const column = lane % kAcross * kValues, n = first_n + column;
  Terms<true, Value> of_column[kValues];
#pragma unroll
  for (int v = 0; v < kValues; ++v) of_column[v] = columns[column + v];
  // No more code than for 16 rows: the sums of the others move up to their registers.
#pragma unroll 1
  for (int i = 0; i < C::kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < C::kFragmentsN; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        part[(c / 2 * 8 + group) * C::kPitch + 8 * j + 2 * member + c % 2] = acc[0][j][c];
#pragma unroll
        for (int up = 1; up < C::kFragmentsM; ++up) acc[up - 1][j][c] = acc[up][j][c];
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int r = lane / kAcross; r < 16; r += 32 / kAcross) {
      int const row = 16 * i + r, m = first_m + row;
      if (m >= p.m || n >= end_n) continue;
      Sum sums[kValues];
      float values[kValues];
#pragma unroll
      for (int v = 0; v < kValues; ++v) sums[v] = part[r * C::kPitch + column + v];
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        auto const pick = [](auto const& arg, auto of_row, auto of_column) { return arg.kOfRow ? of_row : of_column; };
        auto const terms = map_terms<Value>(pick, p.epilogue, rows[row], of_column[v]);
        sums[v] = subtract_zero_points(sums[v], terms);
        values[v] = scale(sums[v], terms);
      }
      add_to(values, int64_t(m) * p.n + n, end_n - n);
      Bits* const to = static_cast<Bits*>(out) + int64_t(m) * p.n + n;
      if (p.stores_whole) {
        *reinterpret_cast<Whole*>(to) = output.template round<Whole, kValues>(values, sums);
      } else {
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          if (n + v < end_n) to[v] = output.template round_one<Bits>(values[v], sums[v]);
        }
      }
    }
    __syncwarp();
  }
}

// Brings the terms of the tile's rows and columns into shared memory, in place of the stages; `load_row(m, terms)`
// those of a row.
template <class C, class LoadRow>
__device__ void load_terms(Params const& p, Place<C> const& at, uint8_t* shared, LoadRow load_row) {
  auto* const rows = reinterpret_cast<Terms<true, Value>*>(shared);
  auto* const columns = rows + C::kTileM;
  for (int i = threadIdx.x; i < C::kTileM; i += C::kThreads) {
    if (at.first_m + i < p.m) load_row(at.first_m + i, rows[i]);
  }
  for (int i = threadIdx.x; i < C::kTileN; i += C::kThreads) {
    if (at.first_n + i < at.end_n) p.epilogue.load_column(at.l, at.first_n + i, columns[i]);
  }
}

template <class C>
__device__ void load_terms(Params const& p, Place<C> const& at, uint8_t* shared) {
  load_terms(p, at, shared, [&](int m, Terms<true, Value>& terms) { p.epilogue.load_row(at.l, m, terms); });
}

// Writes a warp's part of the tile, when the terms are there.
template <class C, class Sum, class Add = AddNothing>
__device__ void write_tile(Sum (&acc)[C::kFragmentsM][C::kFragmentsN][4], Params const& p, Place<C> const& at,
                           uint8_t* shared, Add add_to = {}) {
  auto* const rows = reinterpret_cast<Terms<true, Value>*>(shared);
  auto* const columns = rows + C::kTileM;
  auto* const sums = reinterpret_cast<Sum*>(shared + C::kTermsBytes) + at.part * C::kPartSums;
  FullOutput const output = p.epilogue.output.at(at.l);
  auto const write = [&](auto bits) {
    using Bits = decltype(bits);
    Bits* const out = static_cast<Bits*>(p.out) + at.l * p.out_batch_stride;
    write_part<C, Bits>(acc, out, p, output, at.first_m + at.warp_m, at.first_n + at.warp_n, at.end_n, rows + at.warp_m,
                        columns + at.warp_n, sums, add_to);
  };
  switch (bytes_of(output.dtype)) {
    case 1:
      return write(BitsOf<1>());
    case 2:
      return write(BitsOf<2>());
    default:
      return write(BitsOf<4>());
  }
}

}  // namespace jax_qmm::sm80
