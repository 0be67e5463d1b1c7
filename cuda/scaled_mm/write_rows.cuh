// How wgmma kernels with a main loop of their own end: their int32 sums go to shared memory, those of all parts of K to
// the block of the cluster that adds them up, which writes rows of the tile.
#pragma once

#include "core/cluster.cuh"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "scaled_mm/add_nothing.cuh"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm {

// Which part of K the block multiplies, by its rank in the cluster along y, and which rows of the tile it adds up.
struct Parts {
  int count = gridDim.y, own = blockIdx.y;
  int rows_of_each, first_row, rows;

  __device__ Parts(int whole_tile, int tile_m)
      : rows_of_each((whole_tile + count - 1) / count),
        first_row(own * rows_of_each),
        rows(max(0, min(rows_of_each, tile_m - first_row))) {}
};

// For all warps: waits until what the stages had is not needed any more, and no more data arrive there. Other blocks
// write there if they add up parts of K, so that the whole cluster must be done. `Shared` has an mbarrier for one
// phase, `met`, which counts the warps.
template <class C>
__device__ void finish_stages(typename C::Shared& shared, Parts const& parts) {
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  __syncwarp();
  if (cute::elect_one_sync()) Barrier::arrive(&shared.met);
  Barrier::wait(&shared.met, 0);
  asm volatile("" ::: "memory");  // to the compiler, the wait alone changes no memory
  if (parts.count > 1) sync_cluster();
}

// For the math warps: stores their sums where they are added up, and waits for those of all parts. `places(i)` is the
// row and the column of a sum. The code is short, as blocks run it once, at the speed of its way to the SM: a thread
// has few rows, and in each of them two sums of every 8 columns.
template <class C, int kMathThreads, class Acc, class Places>
__device__ void store_sums(int32_t* partial, Parts const& parts, int tile_m, Acc const& acc, Places const& places) {
  constexpr int kRows = C::kTileM / (kMathThreads / 4), kSums = C::kTileN / 4, kHalf = 2 * kSums;
  auto const each_row = [&](auto store) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      int const first = r / 2 * kHalf + r % 2 * 2;
      int const row = cute::get<0>(places(first)), column = cute::get<1>(places(first));
      store(row, column, [&](int i) { return acc(first + i / 2 * 4 + i % 2); });
    }
  };
  if (parts.count == 1) {
    each_row([&](int row, int column, auto sum) {
      auto* const to = reinterpret_cast<int2*>(&partial[row * C::kPitch + column]);
#pragma unroll
      for (int i = 0; i < kSums; i += 2) to[i / 2 * 4] = make_int2(sum(i), sum(i + 1));
    });
    asm volatile("bar.sync 1, %0;" ::"n"(kMathThreads) : "memory");
    return;
  }
  unsigned const inverse = 0xffffffffu / parts.rows_of_each + 1;  // of the quotient of a small number
  bool const is_odd = threadIdx.x % 2 == 1;
  each_row([&](int row, int column, auto sum) {
    int const adder = __umulhi(row, inverse), of_adder = row - adder * parts.rows_of_each;
    int32_t* const here = &partial[(parts.own * parts.rows_of_each + of_adder) * C::kPitch + column - column % 4];
    uint32_t const to = cute::set_block_rank(cute::cast_smem_ptr_to_uint(here), adder) + (is_odd ? 32 : 0);
    // Of every 16 columns a lane has two sums of both halves, and gets its neighbour's for one of them.
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      int2 const own = is_odd ? make_int2(sum(i + 2), sum(i + 3)) : make_int2(sum(i), sum(i + 1));
      int2 const other = is_odd ? make_int2(sum(i), sum(i + 1)) : make_int2(sum(i + 2), sum(i + 3));
      int2 const got{__shfl_xor_sync(~0u, other.x, 1), __shfl_xor_sync(~0u, other.y, 1)};
      int2 const first = is_odd ? got : own, last = is_odd ? own : got;
      if (row < tile_m) store_to_cluster(to + i * 16, make_int4(first.x, first.y, last.x, last.y));
    }
  });
  sync_stores_of_cluster();  // which the other warps, having ended, do not hold up
}

template <class C, int kThreads, class Bits, class Params, class Output, class Add>
__device__ void write_rows_of(Params const& p, Output const& output, typename C::Shared const& shared, int32_t* partial,
                              Parts const& parts, int l, int first_m, int first_n, int end_n, Add add_to) {
  constexpr int kEach = 4, kAcross = C::kTileN / kEach, kDown = kThreads / kAcross;
  int const column = threadIdx.x % kAcross * kEach, n = first_n + column;
  if (threadIdx.x >= kAcross * kDown || n >= end_n) return;
  constexpr int kAtOnce = C::kFull ? 2 : 4;  // what waits for shared memory, as far as there are registers
  auto const sums_of = [&](int part, int row) -> int4& {
    return *reinterpret_cast<int4*>(&partial[(part * parts.rows_of_each + row) * C::kPitch + column]);
  };
#pragma unroll 1
  for (int part = 1; part < parts.count; ++part) {
#pragma unroll 2
    for (int row = threadIdx.x / kAcross; row < parts.rows; row += kDown) {
      int4 &sum = sums_of(0, row), more = sums_of(part, row);
      sum = make_int4(add(sum.x, more.x), add(sum.y, more.y), add(sum.z, more.z), add(sum.w, more.w));
    }
  }
  Terms<C::kFull, Value> of_columns[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) of_columns[j] = shared.columns[column + j];
  bool const has_zero_points = p.epilogue.has_zero_points();
  Bits* to = static_cast<Bits*>(p.out) + l * p.out_batch_stride + int64_t(first_m + parts.first_row) * p.n + n;
#pragma unroll kAtOnce
  for (int row = threadIdx.x / kAcross; row < parts.rows; row += kDown) {
    int4 const four = sums_of(0, row);
    int32_t sums[kEach] = {four.x, four.y, four.z, four.w};
    float values[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      auto const pick = [](auto const& arg, auto of_row, auto of_column) { return arg.kOfRow ? of_row : of_column; };
      auto const terms = map_terms<Value>(pick, p.epilogue, shared.rows[parts.first_row + row], of_columns[j]);
      if (!C::kFull || has_zero_points) sums[j] = subtract_zero_points(sums[j], terms);
      values[j] = scale(sums[j], terms);
    }
    add_to(values, int64_t(first_m + parts.first_row + row) * p.n + n, end_n - n);
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
// `shared` has the terms, and `add_to` is called as AddNothing is.
template <class C, int kThreads, class Params, class Output, class Add = AddNothing>
__device__ void write_rows(Params const& p, Output const& output, typename C::Shared const& shared, int32_t* partial,
                           Parts const& parts, int l, int first_m, int first_n, int end_n, Add add_to = {}) {
  auto const write = [&](auto bits) {
    write_rows_of<C, kThreads, decltype(bits)>(p, output, shared, partial, parts, l, first_m, first_n, end_n, add_to);
  };
  if constexpr (C::kFull) {
    if (bytes_of(output.dtype) == 1) return write(BitsOf<1>());
  }
  bytes_of(output.dtype) == 2 ? write(BitsOf<2>()) : write(BitsOf<4>());
}

}  // namespace jax_qmm
