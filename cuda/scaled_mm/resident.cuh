// Products of int8 with 8-bit results, of so many rows and so short ones that writing the results is most of the work:
// in other kernels too few warps are at it at a time. A block keeps its columns of b in shared memory. Each of four
// warpgroups takes one tile of 64 rows after the other, and writes the results from the registers that have the sums,
// while others multiply.
//
//   warps                        role
//   0 ... 15                     warpgroups: multiply, and write the results
//   16 ... 19                    load rows of a by TMA, each for a warpgroup
//
//   mbarrier            arrivals of a phase         who waits
//   full[group][stage]  1 and the bytes of a step   the warpgroup
//   empty[group][stage] its 4 warps                 its load warp, from the second turn on
//
// In a fragment of the sums a thread has two neighbours of every 8 columns. b's rows lie in shared memory so that these
// are the columns of one piece of the output's rows, which the thread stores at once:
//
//   fragment's column 8 g + 2 q + e, of thread q of four   is the tile's   16 q + 2 g + e
//
// Where rows of a come from says a class `Rows`, with which the kernel is called: those of a matrix, or the pixels of
// images that a window has; and what is added to results before the activation. Several rows of a matrix may be joined
// to one (resident.h).
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <type_traits>

#include "core/async_copy.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/resident.h"

namespace jax_qmm::resident {

constexpr int kMathThreads = 128 * kWarpgroups, kThreads = kMathThreads + 128;
constexpr int kMathRegisters = 112, kOtherRegisters = 32;  // of the 96 with which each of five warpgroups begins
constexpr int kEach = kTileN / 4;                          // columns of a thread: one piece of 16 bytes

struct Params {
  void* out;
  void const* b;
  int m, n, k;          // of joined rows the first two, and of one K
  int joined, columns;  // rows for each of m, and the columns of each
  int steps, stages, tiles_n;
  EpilogueArgs<true> epilogue;
};

// `TileK`: bytes of a row that a step has.
template <int TileK>
struct Config {
  static constexpr int kTileK = TileK, kBytesA = kTileM * TileK, kBytesB = kTileN * TileK;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<int8_t, int8_t, int32_t, cute::Shape<cute::_64, cute::Int<kTileN>, cute::_32>>()));
  using Atom =
      std::conditional_t<TileK == 128, cute::GMMA::Layout_K_SW128_Atom<int8_t>, cute::GMMA::Layout_K_SW64_Atom<int8_t>>;
  static_assert(TileK == 64 || TileK == 128, "a row of a stage is the span of TMA's swizzle");
};

// For Rows::adder: `load` begins to load what `add` adds to a thread's piece of a row.
struct AddsNothing {
  struct Nothing {};
  __device__ Nothing load(int64_t) const { return {}; }
  __device__ void add(float (&)[kEach], Nothing) const {}
};

template <class T, bool kAlongRows>
struct OfTile {
  static constexpr bool kOfRow = kAlongRows;
  alignas(16) T values[kOfRow ? 1 : kTileN];
};

struct Shared {
  Terms<true, OfTile> terms;  // of columns
  uint64_t full[kWarpgroups][kMostStages], empty[kWarpgroups][kMostStages];
};
static_assert(sizeof(Shared) + 1024 <= kFixed);

// By all threads of a block, swizzled as TMA does. What is not there becomes zeros.
template <class C, class Rows>
__device__ void load_columns(Params const& p, Rows const& rows, int first_n, uint8_t* to_b, Shared& shared) {
  auto const copy_pieces = [&](auto bytes) {
    constexpr int kBytes = bytes, kPieces = C::kTileK / kBytes;
    for (int i = threadIdx.x; i < kTileN * p.steps * kPieces; i += kThreads) {
      int const byte = i % kPieces * kBytes, step = i / kPieces % p.steps, row = i / kPieces / p.steps;
      int const n = first_n + row % 8 / 2 * kEach + row / 8 * 2 + row % 2;
      int const swizzled = byte ^ (C::kTileK == 128 ? row % 8 : row / 2 % 4) * 16;
      int64_t at = 0;
      bool const there = n < p.n && rows.template find<C>(n, step, byte, at);
      copy_async<kBytes>(cute::cast_smem_ptr_to_uint(to_b) + (step * kTileN + row) * C::kTileK + swizzled,
                         static_cast<uint8_t const*>(p.b) + (there ? at : 0), there);
    }
  };
  if (p.k % 16 == 0) {
    copy_pieces(std::integral_constant<int, 16>());
  } else {
    copy_pieces(std::integral_constant<int, 4>());
  }
  commit_copies();
  if (int const i = threadIdx.x; i < kTileN) {
    auto const copy = [&](auto& to, auto const& from) {
      if constexpr (!from.kOfRow) to.values[i] = first_n + i < p.n ? from.load(0, (first_n + i) % p.columns) : 0;
    };
    each_term(copy, shared.terms, p.epilogue);
  }
  wait_for_copies<0>();
  cutlass::arch::fence_view_async_shared();
}

template <class C, class Rows>
__global__ void __launch_bounds__(kThreads, 1)
    kernel(Params const p, Rows const rows, CUTE_GRID_CONSTANT CUtensorMap const boxes) {
  using namespace cute;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* const memory_b = memory + kWarpgroups * p.stages * C::kBytesA;
  auto& shared = *reinterpret_cast<Shared*>(memory_b + p.steps * C::kBytesB);

  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bool const multiplies = warp < kMathThreads / 32;
  int const group = multiplies ? warp / 4 : warp % 4;
  int const first_n = blockIdx.x % p.tiles_n * kTileN;
  int const first_tile = blockIdx.x / p.tiles_n * kWarpgroups + group;
  int const stride = gridDim.x / p.tiles_n * kWarpgroups, tiles = (p.m - 1) / kTileM + 1;
  uint8_t* const memory_a = memory + group * p.stages * C::kBytesA;

  if (!multiplies && lane == 0) {
    prefetch_tma_descriptor(&boxes);
    for (int s = 0; s < p.stages; ++s) {
      Full::init(&shared.full[group][s], 1);
      Empty::init(&shared.empty[group][s], 4);
    }
    cutlass::arch::fence_barrier_init();
  }
  begin();
  load_columns<C>(p, rows, first_n, memory_b, shared);
  __syncthreads();

  if (!multiplies) {
    cutlass::arch::warpgroup_reg_dealloc<kOtherRegisters>();
    if (lane != 0) return;
    int stage = 0, turn = 0;
    for (int tile = first_tile; tile < tiles; tile += stride) {
      auto at = rows.begin(tile * kTileM);
#pragma unroll 1
      for (int i = 0; i < p.steps; ++i) {
        uint64_t* const full = &shared.full[group][stage];
        if (turn > 0) Empty::wait(&shared.empty[group][stage], (turn - 1) & 1);
        Full::arrive_and_expect_tx(full, C::kBytesA);
        rows.template load<C>(boxes, full, memory_a + stage * C::kBytesA, at);
        if (++stage == p.stages) stage = 0, ++turn;
      }
    }
    return;
  }

  cutlass::arch::warpgroup_reg_alloc<kMathRegisters>();
  typename C::Mma mma;
  auto thread = mma.get_slice(threadIdx.x % 128);
  auto const steps_of = [&](uint8_t* data, auto size, int count) {
    return make_tensor(make_smem_ptr(reinterpret_cast<int8_t*>(data)),
                       tile_to_shape(typename C::Atom{}, make_shape(size, Int<C::kTileK>{}, count)));
  };
  Tensor fragments_a = thread.make_fragment_A(thread.partition_A(steps_of(memory_a, Int<kTileM>{}, p.stages)));
  Tensor fragments_b = thread.make_fragment_B(thread.partition_B(steps_of(memory_b, Int<kTileN>{}, p.steps)));
  Tensor acc = partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});

  int const column = lane % 4 * kEach, n = first_n + column, row_of_joined = min(n, p.n - 1) / p.columns;
  float scale_b[kEach];  // for the bias there are no registers
#pragma unroll
  for (int i = 0; i < kEach; ++i) scale_b[i] = shared.terms.scale_b.values[column + i];
  auto const adder = rows.adder();
  bool const has_zero_points = Rows::kHasZeroPoints && p.epilogue.has_zero_points();
  bool const scales_rows = p.epilogue.scale_a.stride != 0;
  float scale_a[2];
  scale_a[0] = scale_a[1] = p.epilogue.scale_a.load(0, 0);
  FullOutput const output = p.epilogue.output.at(0);
  int const row_of_tile = warp % 4 * 16 + lane / 4;
  // Steps whose stages are loaded again, once the tensor cores are done with them.
  int loaded_again = (tiles - first_tile + stride - 1) / stride * p.steps - p.stages;
  auto const release = [&](int stage) {
    if (loaded_again-- > 0 && lane == 0) Empty::arrive(&shared.empty[group][stage]);
  };

  int stage = 0, phase = 0, before = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < tiles; tile += stride) {
    int const first_row = tile * kTileM + row_of_tile;
    if (scales_rows) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        scale_a[r] =
            p.epilogue.scale_a.load(0, rows.entry_of(min(first_row + 8 * r, p.m - 1) * p.joined + row_of_joined));
    }
    decltype(adder.load(0)) to_add[2];  // on its way while the tensor cores multiply
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (int const m = first_row + 8 * r; m < p.m && n < p.n) to_add[r] = adder.load(int64_t(m) * p.n + n);
    }
    mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll 1
    for (int i = 0; i < p.steps; ++i) {
      Full::wait(&shared.full[group][stage], phase);
      warpgroup_fence_operand(acc);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < C::kTileK / 32; ++k) {
        gemm(mma, fragments_a(_, _, k, stage), fragments_b(_, _, k, i), acc);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      warpgroup_fence_operand(acc);
      if (i > 0) release(before);
      before = stage;
      if (++stage == p.stages) stage = 0, phase ^= 1;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    release(before);

    if (n >= p.n) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const m = first_row + 8 * r;
      if (m >= p.m) break;
      int32_t sums[kEach];
      float values[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) sums[i] = acc(i / 2 * 4 + 2 * r + i % 2);
      if (has_zero_points) {
        int const row = m * p.joined + row_of_joined;
        int32_t const azp = p.epilogue.azp.load(0, row), sums_a = p.epilogue.sums_a.load(0, row);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          int32_t const adj = shared.terms.azp_adj.values[column + i], azp_b = shared.terms.azp_b.values[column + i];
          sums[i] = subtract_zero_points(sums[i], Terms<true, Value>{{0, 0, 0, azp, adj}, sums_a, azp_b});
        }
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        float const bias = shared.terms.bias.values[column + i];
        values[i] = scale(sums[i], Terms<true, Value>{{scale_a[r], scale_b[i], bias}});
      }
      adder.add(values, to_add[r]);
      *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + int64_t(m) * p.n + n) =
          output.template round<uint4, kEach>(values, sums);
    }
  }
}

template <class C, class Rows>
cudaError_t prepare(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(kernel<C, Rows>), {{}, kThreads, kSharedMemory}, fits);
}

template <class C, class Rows>
cudaError_t launch(ScaledMm const& p, Rows const& rows, int joined, int steps, CUtensorMap const& boxes, Gpu const& gpu,
                   Submit const& submit) {
  int const m = p.m / joined, n = p.n * joined, tiles_n = int(ceil_div(n, kTileN));
  Params const params{
      p.out, p.b, m, n, p.k, joined, p.n, steps, stages(steps, C::kTileK), tiles_n, epilogue_args<true>(p)};
  LaunchShape const shape{dim3(unsigned(tiles_n * blocks_of_columns(m, n, gpu))), kThreads, kSharedMemory};
  return jax_qmm::launch(submit, shape, kernel<C, Rows>, params, rows, boxes);
}

}  // namespace jax_qmm::resident
