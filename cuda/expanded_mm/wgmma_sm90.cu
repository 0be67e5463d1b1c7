// Products by Hopper's warpgroup-level tensor cores, from tiles of int8 that warpgroups of their own make of int4: they
// copy w some steps ahead, and when the copies of a step are there, int8 takes their place. The blocks of a cluster
// share K, where there are few tiles.
//
//   warps                    role
//   0 ... kMathWarps - 1     two warpgroups of 64 rows of a each: multiply; then they write the results
//   the others               feeders, which take turns: copy w and make int8 of it; the first thread of each loads a
//                            by TMA; then they load the epilogue's terms
//
//   mbarrier        arrivals of a phase                               who waits
//   full[stage]     1 and the bytes of a, a feeder's warps with int8  math warps
//   empty[stage]    kMathWarps                                        feeders, from the second turn on
//   met             see write_rows.cuh
#include <algorithm>

#include "core/launch.cuh"
#include "core/prepare.h"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "expanded_mm/expansion.cuh"
#include "expanded_mm/instances.h"
#include "scaled_mm/write_rows.cuh"

namespace jax_qmm::expanded {
namespace {

constexpr int kMathWarps = 8, kMathThreads = 32 * kMathWarps;
constexpr int kTileK = 128;  // a row of a stage is the span of TMA's swizzle

// `Feeders`: groups of warps that take turns to feed a stage, as that takes longer than to multiply one.
template <int TileM, int TileN, int Feeders, int WarpsOfEach>
struct Config {
  static constexpr int kFeeders = Feeders, kWarpsOfEach = WarpsOfEach, kFeedThreads = 32 * Feeders * WarpsOfEach;
  static constexpr int kThreads = kMathThreads + kFeedThreads;
  // Of a thread. Those that multiply have sums, the others get what is left.
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kMathRegisters = std::max(kRegisters, (TileM * TileN) / kMathThreads + 64);
  static constexpr int kFeedRegisters = (kRegisters * kThreads - kMathRegisters * kMathThreads) / kFeedThreads / 8 * 8;
  static_assert(kMathRegisters == kRegisters || kFeedThreads % 128 == 0, "warpgroups change the number of registers");
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<int8_t, int8_t, int32_t, cute::Shape<cute::_64, cute::Int<TileN>, cute::_32>>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  static constexpr bool kFull = false;  // of the epilogue
  static constexpr int kTileM = TileM, kTileN = TileN, kBytesA = kTileM * kTileK, kBytesB = TileN * kTileK;
  static constexpr int kPitch = TileN + 8;  // of sums on their way out: stores of fragments hit distinct banks
  static constexpr int kTermsBytes = (kTileM + TileN) * sizeof(Terms<kFull, Value>);
  static constexpr int kStages = (227 * 1024 - 1024 - kTermsBytes) / (kBytesA + kBytesB) / Feeders * Feeders;
  static constexpr int kAhead = 1;  // of a feeder's steps, from a copy to its int8
  struct Shared {
    alignas(1024) uint8_t a[kStages][kBytesA];
    alignas(1024) uint8_t b[kStages][kBytesB];
    Terms<kFull, Value> rows[kTileM], columns[TileN];
    uint64_t full[kStages], empty[kStages], met;
  };
  static_assert(kStages > kAhead * Feeders);
  static_assert((kTileM + 7) * kPitch * 4 <= kStages * (kBytesA + kBytesB), "sums take the place of the stages");
};

struct Params {
  uint8_t const* w;
  void* out;
  int m, n, k;
  int tiles_m, tiles_n;
  bool a_batched;
  bool stores_whole;  // whether rows of the output start at whole stores
  int64_t w_batch_stride, out_batch_stride;
  Blocks blocks;
  EpilogueArgs<false> epilogue;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgmma_kernel(Params const p, CUTE_GRID_CONSTANT CUtensorMap const boxes_a) {
  using namespace cute;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kStages = C::kStages, kTileM = C::kTileM;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(memory);

  // Blocks that have the same rows of w are neighbours.
  int const first_m = blockIdx.x % p.tiles_m * kTileM, of_n = blockIdx.x / p.tiles_m;
  int const first_n = of_n % p.tiles_n * C::kTileN, l = of_n / p.tiles_n;
  int const tile_m = min(kTileM, p.m - first_m), tile_n = min(C::kTileN, p.n - first_n);
  Parts const parts(kTileM, tile_m);
  int const all_steps = (p.k + kTileK - 1) / kTileK, first_step = all_steps * parts.own / parts.count;
  int const steps = all_steps * (parts.own + 1) / parts.count - first_step;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (warp == kMathWarps && elect_one_sync()) {
    prefetch_tma_descriptor(&boxes_a);
    for (int s = 0; s < kStages; ++s) {
      Full::init(&shared.full[s], 1 + C::kWarpsOfEach);
      Empty::init(&shared.empty[s], kMathWarps);
    }
    Full::init(&shared.met, C::kThreads / 32);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  begin();

  if (warp >= kMathWarps) {
    if constexpr (C::kFeedRegisters < C::kRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kFeedRegisters>();
    constexpr int kFeeders = C::kFeeders, kEach = 32 * C::kWarpsOfEach, kAhead = kFeeders * C::kAhead;
    int const feeder = (warp - kMathWarps) / C::kWarpsOfEach, thread = threadIdx.x - kMathThreads - feeder * kEach;
    Expanding<C::kTileN, kTileK, kEach> b(p.w + l * p.w_batch_stride, p.blocks, l, first_n, p.n, p.k, thread);
    b.load_blocks((first_step + feeder) * kTileK);
    auto const tile_of = [&](int stage) { return cast_smem_ptr_to_uint(shared.b[stage]); };
    for (int i = feeder, stage = feeder, turn = 0, made = feeder; i < steps + kAhead; i += kFeeders) {
      if (i < steps) {
        if (turn > 0) Empty::wait(&shared.empty[stage], (turn - 1) & 1);
        asm volatile("" ::: "memory");  // to the compiler, the wait alone changes no memory
        if (thread == 0) {
          Full::arrive_and_expect_tx(&shared.full[stage], C::kBytesA);
          SM90_TMA_LOAD_3D::copy(&boxes_a, &shared.full[stage], static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                                 shared.a[stage], (first_step + i) * kTileK, first_m, p.a_batched ? l : 0);
        }
        b.copy(tile_of(stage), (first_step + i) * kTileK);
        if ((stage += kFeeders) >= kStages) stage = feeder, ++turn;
      }
      commit_copies();
      if (i < kAhead) continue;
      wait_for_copies<C::kAhead>();
      b.make(tile_of(made));
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (elect_one_sync()) Full::arrive(&shared.full[made]);
      b.load_blocks((first_step + i - kAhead + kFeeders) * kTileK);
      if ((made += kFeeders) >= kStages) made = feeder;
    }
    int const of_all = threadIdx.x - kMathThreads;
    for (int i = of_all; i < tile_m; i += C::kFeedThreads) p.epilogue.load_row(l, first_m + i, shared.rows[i]);
    for (int i = of_all; i < tile_n; i += C::kFeedThreads) p.epilogue.load_column(l, first_n + i, shared.columns[i]);
    finish_stages<C>(shared, parts);
    return;
  }

  if constexpr (C::kMathRegisters > C::kRegisters) cutlass::arch::warpgroup_reg_alloc<C::kMathRegisters>();
  typename C::Mma mma;
  auto thread = mma.get_slice(threadIdx.x);
  auto const stages_of = [&](auto rows, uint8_t(*from)) {
    return make_tensor(
        make_smem_ptr(reinterpret_cast<int8_t*>(from)),
        tile_to_shape(GMMA::Layout_K_SW128_Atom<int8_t>{}, Shape<decltype(rows), Int<kTileK>, Int<kStages>>{}));
  };
  Tensor fragments_a = thread.make_fragment_A(thread.partition_A(stages_of(Int<kTileM>{}, shared.a[0])));
  Tensor fragments_b = thread.make_fragment_B(thread.partition_B(stages_of(Int<C::kTileN>{}, shared.b[0])));
  Tensor acc = partition_fragment_C(mma, Shape<Int<kTileM>, Int<C::kTileN>>{});
  clear(acc);
  warpgroup_fence_operand(acc);
  int stage = 0, phase = 0, before = -1;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    Full::wait(&shared.full[stage], phase);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < size<2>(fragments_a); ++k) {
      gemm(mma, fragments_a(_, _, k, stage), fragments_b(_, _, k, stage), acc);
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();
    // What the step before had is free, if it is filled again.
    if (before >= 0 && i - 1 + kStages < steps && lane == 0) Empty::arrive(&shared.empty[before]);
    before = stage;
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(acc);
  finish_stages<C>(shared, parts);
  auto* const partial = reinterpret_cast<int32_t*>(memory);
  Tensor places = thread.partition_C(make_identity_tensor(Shape<Int<kTileM>, Int<C::kTileN>>{}));
  store_sums<C, kMathThreads>(partial, parts, tile_m, acc, places);
  write_rows<C, kMathThreads>(p, p.epilogue.output.at(l), shared, partial, parts, l, first_m, first_n, p.n);
}

template <class C, int kParts>
LaunchShape shape_of(unsigned blocks) {
  return {dim3(blocks, kParts), C::kThreads, sizeof(typename C::Shared), dim3(1, kParts)};
}

template <class C, int kParts>
cudaError_t prepare(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(wgmma_kernel<C>), shape_of<C, kParts>(1), fits);
}

template <class C, int kParts>
cudaError_t launch(ExpandedMm const& p, Submit const& submit) {
  cuuint64_t const k = p.k, m = p.m;
  cuuint64_t const sizes[] = {k, m, p.a_batch_stride != 0 ? cuuint64_t(p.batch) : 1}, apart[] = {k, k * m};
  cuuint32_t const box[] = {kTileK, C::kTileM, 1}, ones[] = {1, 1, 1};
  CUtensorMap boxes;
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &boxes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(p.a), sizes, apart, box, ones,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  uintptr_t const bytes = bytes_of(p.out_dtype);
  Params const params{static_cast<uint8_t const*>(p.b),
                      p.out,
                      p.m,
                      p.n,
                      p.k,
                      int(ceil_div(p.m, C::kTileM)),
                      int(ceil_div(p.n, C::kTileN)),
                      p.a_batch_stride != 0,
                      (reinterpret_cast<uintptr_t>(p.out) | p.n * bytes) % (4 * bytes) == 0,
                      p.b_batch_stride / 2,
                      p.out_batch_stride,
                      Blocks(p),
                      epilogue_args<false>(p)};
  unsigned const blocks = unsigned(params.tiles_m) * params.tiles_n * unsigned(p.batch);
  return jax_qmm::launch(submit, shape_of<C, kParts>(blocks), wgmma_kernel<C>, params, boxes);
}

template <class C, int kParts>
void add(std::vector<Instance>& to, int tile_cycles, int step_cycles, int sharing_cycles = 0) {
  std::string const parts = kParts > 1 ? " split-K " + std::to_string(kParts) : "";
  Instance i{"sm90 wgmma " + words_of_tile(C::kTileM, C::kTileN, kTileK) + parts + " int4", prepare<C, kParts>,
             launch<C, kParts>};
  i.tile_m = C::kTileM, i.tile_n = C::kTileN, i.tile_k = kTileK, i.parts = kParts;
  i.tile_cycles = tile_cycles, i.step_cycles = step_cycles, i.sharing_cycles = sharing_cycles;
  i.blocks_per_sm = 1, i.shared_bytes = int(sizeof(typename C::Shared)), i.wgmma = true;
  to.push_back(std::move(i));
}

}  // namespace

void add_wgmma(std::vector<Instance>& to) {
  using Narrow = Config<128, 64, 4, 2>;
  using Square = Config<128, 128, 3, 2>;
  using Tall = Config<256, 128, 1, 4>;
  add<Narrow, 1>(to, 5280, 636), add<Narrow, 2>(to, 5280, 636, 3780);
  add<Square, 1>(to, 7850, 1200), add<Square, 2>(to, 7850, 1200, 5070);
  add<Tall, 1>(to, 5950, 1860), add<Tall, 2>(to, 5950, 1860, 7500);
}

}  // namespace jax_qmm::expanded
