// Products of int8 with short rows, and so many of them that writing the 8-bit results is most of the work:
// convolutions with windows of one value, of many images. What bounds other kernels there is the epilogue, of which too
// few warps are at work at a time.
//
// A block keeps its columns of b in shared memory. Each of its warpgroups takes one tile of 64 rows after the other: it
// waits for a's rows, multiplies, has TMA load those of a later tile in their place, and writes the results from the
// registers that have the sums. So a warpgroup waits for no other one.
//
// In a fragment of the sums a thread has two neighbours of every 8 columns. b's rows lie in shared memory so that these
// are the columns of one piece of the output's rows, which the thread stores at once:
//
//   fragment's column 8 g + 2 q + e, of thread q of four   is the tile's   TileN / 4 * q + 2 g + e
//
//   mbarrier          arrivals of a phase            who waits
//   full[slot]        1, and the bytes of a's rows   the slot's warpgroup
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <algorithm>

#include "core/async_copy.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/resident_b_sm90.h"

namespace jax_qmm::sm90 {
namespace {

using namespace cute;

constexpr int kTileM = 64, kStep = 128;  // rows of a tile, and bytes of a row of them that TMA loads at a time
constexpr int kMostSlots = 8;            // tiles of a warpgroup that are there or on their way
constexpr int kThreads = 128 * kResidentWarpgroups;
constexpr int kSharedMemory = 227 * 1024;

struct Params {
  void* out;
  void const* b;
  int m, n, k;
  int tiles_n, slots;
  EpilogueArgs<true> epilogue;
};

template <int TileN>
struct Types {
  using Mma = decltype(make_tiled_mma(GMMA::ss_op_selector<int8_t, int8_t, int32_t, Shape<_64, Int<TileN>, _128>>()));
  static constexpr int kTileN = TileN, kEach = TileN / 4;  // columns, and those of a thread
  using Piece = conditional_t<kEach == 8, uint2, uint4>;   // of results, that a thread stores at once
  template <class T, bool kAlongRows>
  struct OfTile {
    static constexpr bool kOfRow = kAlongRows;
    alignas(16) T values[kOfRow ? 1 : TileN];
  };
  struct Shared {
    Terms<true, OfTile> terms;  // of columns
    uint64_t full[kResidentWarpgroups][kMostSlots];
  };
  static constexpr int slots(int k) {
    int const of_row = int(ceil_div(k, kStep)) * kStep;
    int const left = kSharedMemory - int(sizeof(Shared)) - 1024 - TileN * of_row;
    return std::min(kMostSlots, left / (kResidentWarpgroups * kTileM * of_row));
  }
  static_assert(slots(kResidentMostK) >= 2);
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    resident_b_kernel(Params const p, CUTE_GRID_CONSTANT CUtensorMap const boxes_a) {
  using Full = cutlass::arch::ClusterTransactionBarrier;
  constexpr int kTileN = T::kTileN, kEach = T::kEach;
  extern __shared__ __align__(1024) uint8_t memory[];
  int const steps = (p.k - 1) / kStep + 1;
  uint8_t* const memory_b = memory + kResidentWarpgroups * p.slots * steps * kTileM * kStep;
  auto& shared = *reinterpret_cast<typename T::Shared*>(memory_b + steps * kTileN * kStep);

  int const group = threadIdx.x / 128, thread_of_group = threadIdx.x % 128, lane = threadIdx.x % 32;
  int const first_n = blockIdx.x % p.tiles_n * kTileN;
  int const first_tile = blockIdx.x / p.tiles_n * kResidentWarpgroups + group;
  int const stride = gridDim.x / p.tiles_n * kResidentWarpgroups, tiles = (p.m - 1) / kTileM + 1;
  uint8_t* const memory_a = memory + group * p.slots * steps * kTileM * kStep;

  if (thread_of_group == 0) {
    prefetch_tma_descriptor(&boxes_a);
    for (int s = 0; s < p.slots; ++s) Full::init(&shared.full[group][s], 1);
    cutlass::arch::fence_barrier_init();
  }
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  auto const load_tile = [&](int tile, int slot) {
    uint64_t* const full = &shared.full[group][slot];
    Full::arrive_and_expect_tx(full, steps * kTileM * kStep);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      SM90_TMA_LOAD_2D::copy(&boxes_a, full, static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                             memory_a + (slot * steps + i) * kTileM * kStep, i * kStep, tile * kTileM);
    }
  };
  if (thread_of_group == 0) {
    for (int s = 0; s < p.slots && first_tile + s * stride < tiles; ++s) load_tile(first_tile + s * stride, s);
  }
  // b, by 16 bytes, with the swizzle that TMA gives a; what is beyond it are zeros.
  int const chunks = steps * kStep / 16;
  for (int i = threadIdx.x; i < kTileN * chunks; i += kThreads) {
    int const row = i / chunks, chunk = i % chunks;
    int const n = first_n + row % 8 / 2 * kEach + row / 8 * 2 + row % 2;
    uint32_t const to =
        cast_smem_ptr_to_uint(memory_b) + chunk / 8 * kTileN * kStep + row * kStep + (chunk % 8 ^ row % 8) * 16;
    copy_async<16>(to, static_cast<uint8_t const*>(p.b) + int64_t(n) * p.k + chunk * 16, n < p.n && chunk * 16 < p.k);
  }
  if (int const i = threadIdx.x; i < kTileN) {
    auto const copy = [&](auto& to, auto const& from) {
      if constexpr (!from.kOfRow) to.values[i] = first_n + i < p.n ? from.load(0, first_n + i) : 0;
    };
    each_term(copy, shared.terms, p.epilogue);
  }
  commit_copies();
  wait_for_copies<0>();
  cutlass::arch::fence_view_async_shared();
  __syncthreads();

  typename T::Mma mma;
  auto thread = mma.get_slice(thread_of_group);
  auto const steps_of = [&](uint8_t* data, auto rows, int count) {
    return make_tensor(make_smem_ptr(reinterpret_cast<int8_t*>(data)),
                       tile_to_shape(GMMA::Layout_K_SW128_Atom<int8_t>{}, make_shape(rows, Int<kStep>{}, count)));
  };
  Tensor fragments_a = thread.make_fragment_A(thread.partition_A(steps_of(memory_a, Int<kTileM>{}, p.slots * steps)));
  Tensor fragments_b = thread.make_fragment_B(thread.partition_B(steps_of(memory_b, Int<kTileN>{}, steps)));
  Tensor acc = partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});

  int const column = lane % 4 * kEach, n = first_n + column;
  float scale_b[kEach], bias[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    scale_b[i] = shared.terms.scale_b.values[column + i], bias[i] = shared.terms.bias.values[column + i];
  }
  bool const has_zero_points = p.epilogue.has_zero_points(), scales_rows = p.epilogue.scale_a.stride != 0;
  float scale_a[2];
  scale_a[0] = scale_a[1] = p.epilogue.scale_a.load(0, 0);
  FullOutput const output = p.epilogue.output.at(0);
  int const row_of_tile = thread_of_group / 32 * 16 + lane / 4;

  int slot = 0, phase = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < tiles; tile += stride) {
    int const first_row = tile * kTileM + row_of_tile;
    if (scales_rows) {
#pragma unroll
      for (int r = 0; r < 2; ++r) scale_a[r] = p.epilogue.scale_a.load(0, min(first_row + 8 * r, p.m - 1));
    }
    Full::wait(&shared.full[group][slot], phase);
    warpgroup_fence_operand(acc);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    for (int k = 0; k < p.k; k += 32) {
      gemm(mma, fragments_a(_, _, k % kStep / 32, slot * steps + k / kStep),
           fragments_b(_, _, k % kStep / 32, k / kStep), acc);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    if (thread_of_group == 0 && tile + p.slots * stride < tiles) load_tile(tile + p.slots * stride, slot);
    if (++slot == p.slots) slot = 0, phase ^= 1;

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
        int32_t const azp = p.epilogue.azp.load(0, m), sums_a = p.epilogue.sums_a.load(0, m);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          Terms<true, Value> const terms{
              {0, 0, 0, azp, shared.terms.azp_adj.values[column + i]}, sums_a, shared.terms.azp_b.values[column + i]};
          sums[i] = subtract_zero_points(sums[i], terms);
        }
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) values[i] = scale(sums[i], Terms<true, Value>{{scale_a[r], scale_b[i], bias[i]}});
      *reinterpret_cast<typename T::Piece*>(static_cast<uint8_t*>(p.out) + int64_t(m) * p.n + n) =
          output.template round<typename T::Piece, kEach>(values, sums);
    }
  }
}

}  // namespace

template <int TileN>
cudaError_t ResidentB<TileN>::prepare(bool& fits) {
  LaunchShape const shape{{}, kThreads, kSharedMemory};
  return prepare_kernel(reinterpret_cast<void const*>(resident_b_kernel<Types<TileN>>), shape, fits);
}

template <int TileN>
cudaError_t ResidentB<TileN>::launch(ScaledMm const& p, int, Gpu const& gpu, Submit const& submit) {
  using T = Types<TileN>;
  CUtensorMap boxes_a;
  cuuint64_t const shape[] = {cuuint64_t(p.k), cuuint64_t(p.m)}, strides[] = {shape[0]};
  cuuint32_t const box[] = {kStep, kTileM}, each[] = {1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &boxes_a, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(p.a), shape, strides, box, each,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  int const tiles_n = int(ceil_div(p.n, TileN)), tiles_m = int(ceil_div(p.m, kTileM));
  int const groups = std::max(1, std::min(gpu.sm_count / tiles_n, int(ceil_div(tiles_m, kResidentWarpgroups))));
  Params const params{p.out, p.b, p.m, p.n, p.k, tiles_n, T::slots(p.k), epilogue_args<true>(p)};
  LaunchShape const grid{dim3(unsigned(tiles_n * groups)), kThreads, kSharedMemory};
  return jax_qmm::launch(submit, grid, resident_b_kernel<T>, params, boxes_a);
}

#define GEMM(...)
#define ONE_TILE(...)
#define RESIDENT_B(...) template struct JAX_QMM_RESIDENT_B(__VA_ARGS__);
#include "scaled_mm/instances_sm90.def"

}  // namespace jax_qmm::sm90
