// Products by Hopper's warpgroup-level tensor cores, from tiles of int8 that a warpgroup of its own makes of int4: it
// copies w some steps ahead, and when the copies of a step are there, int8 takes their place.
//
//   warps                    role
//   0 ... kMathWarps - 1     two warpgroups of 64 rows of a each: multiply; then they write the results
//   the next kFeedWarps      copy w and make int8 of it; their first thread loads a by TMA; then they load the
//                            epilogue's terms
//
//   mbarrier        arrivals of a phase                               who waits
//   full[stage]     1 and the bytes of a, kFeedWarps with int8        math warps
//   empty[stage]    kMathWarps                                        feeding warps, from the second turn on
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

constexpr int kMathWarps = 8, kMathThreads = 32 * kMathWarps, kFeedWarps = 4, kFeedThreads = 32 * kFeedWarps;
constexpr int kThreads = kMathThreads + kFeedThreads;
constexpr int kTileM = 128, kTileK = 128;  // a row of a stage is the span of TMA's swizzle
// Of a thread: 168 for each of 384, but sums need more.
constexpr int kMathRegisters = 208, kFeedRegisters = 88;

template <int TileN>
struct Config {
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<int8_t, int8_t, int32_t, cute::Shape<cute::_64, cute::Int<TileN>, cute::_32>>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  static constexpr bool kFull = false;  // of the epilogue
  static constexpr int kTileN = TileN, kBytesA = kTileM * kTileK, kBytesB = TileN * kTileK;
  static constexpr int kPitch = TileN + 8;  // of sums on their way out: stores of fragments hit distinct banks
  static constexpr int kTermsBytes = (kTileM + TileN) * sizeof(Terms<kFull, Value>);
  static constexpr int kStages = std::min(8, (227 * 1024 - 1024 - kTermsBytes) / (kBytesA + kBytesB));
  static constexpr int kAhead =
      kStages - 2;  // steps from a copy to its int8, of which two are ready for the math warps
  struct Shared {
    alignas(1024) uint8_t a[kStages][kBytesA];
    alignas(1024) uint8_t b[kStages][kBytesB];
    Terms<kFull, Value> rows[kTileM], columns[TileN];
    uint64_t full[kStages], empty[kStages];
  };
  static_assert(kStages >= 4);
  static_assert(kTileM * kPitch * 4 <= kStages * (kBytesA + kBytesB), "sums take the place of the stages");
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
__global__ void __launch_bounds__(kThreads, 1)
    wgmma_kernel(Params const p, CUTE_GRID_CONSTANT CUtensorMap const boxes_a) {
  using namespace cute;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kStages = C::kStages;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(memory);

  // Blocks that have the same rows of w are neighbours.
  int const first_m = blockIdx.x % p.tiles_m * kTileM, of_n = blockIdx.x / p.tiles_m;
  int const first_n = of_n % p.tiles_n * C::kTileN, l = of_n / p.tiles_n;
  int const steps = (p.k + kTileK - 1) / kTileK, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const tile_m = min(kTileM, p.m - first_m), tile_n = min(C::kTileN, p.n - first_n);

  if (warp == kMathWarps && elect_one_sync()) {
    prefetch_tma_descriptor(&boxes_a);
    for (int s = 0; s < kStages; ++s) {
      Full::init(&shared.full[s], 1 + kFeedWarps);
      Empty::init(&shared.empty[s], kMathWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  begin();

  if (warp >= kMathWarps) {
    cutlass::arch::warpgroup_reg_dealloc<kFeedRegisters>();
    int const thread = threadIdx.x - kMathThreads;
    Expanding<C::kTileN, kTileK, kFeedThreads> b(p.w + l * p.w_batch_stride, p.blocks, l, first_n, p.n, p.k, thread);
    auto const tile_of = [&](int stage) { return cast_smem_ptr_to_uint(shared.b[stage]); };
    for (int i = 0, stage = 0, turn = 0, made = 0; i < steps + C::kAhead; ++i) {
      if (i < steps) {
        if (turn > 0) Empty::wait(&shared.empty[stage], (turn - 1) & 1);
        asm volatile("" ::: "memory");  // to the compiler, the wait alone changes no memory
        if (thread == 0) {
          Full::arrive_and_expect_tx(&shared.full[stage], C::kBytesA);
          SM90_TMA_LOAD_3D::copy(&boxes_a, &shared.full[stage], static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                                 shared.a[stage], i * kTileK, first_m, p.a_batched ? l : 0);
        }
        b.copy(tile_of(stage), i * kTileK);
        if (++stage == kStages) stage = 0, ++turn;
      }
      commit_copies();
      if (i < C::kAhead) continue;
      wait_for_copies<C::kAhead>();
      b.make(tile_of(made), (i - C::kAhead) * kTileK);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (elect_one_sync()) Full::arrive(&shared.full[made]);
      if (++made == kStages) made = 0;
    }
    for (int i = thread; i < tile_m; i += kFeedThreads) p.epilogue.load_row(l, first_m + i, shared.rows[i]);
    for (int i = thread; i < tile_n; i += kFeedThreads) p.epilogue.load_column(l, first_n + i, shared.columns[i]);
    __syncthreads();
    return;
  }

  cutlass::arch::warpgroup_reg_alloc<kMathRegisters>();
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
  __syncthreads();  // the terms are there, and nobody multiplies any more

  auto* const sums = reinterpret_cast<int32_t*>(memory);  // [kTileM][kPitch]
  Tensor places = thread.partition_C(make_identity_tensor(Shape<Int<kTileM>, Int<C::kTileN>>{}));
#pragma unroll
  for (int i = 0; i < size(acc); i += 2) {
    int const row = get<0>(places(i)), column = get<1>(places(i));
    *reinterpret_cast<int2*>(&sums[row * C::kPitch + column]) = make_int2(acc(i), acc(i + 1));
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kMathThreads) : "memory");
  write_rows<C, kMathThreads>(p, p.epilogue.output.at(l), shared, sums, 1, kTileM, 0, tile_m, l, first_m, first_n, p.n);
}

template <class C>
LaunchShape shape_of(unsigned blocks) {
  return {blocks, kThreads, sizeof(typename C::Shared)};
}

template <class C>
cudaError_t prepare(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(wgmma_kernel<C>), shape_of<C>(1), fits);
}

template <class C>
cudaError_t launch(ExpandedMm const& p, Submit const& submit) {
  cuuint64_t const k = p.k, m = p.m;
  cuuint64_t const sizes[] = {k, m, p.a_batch_stride != 0 ? cuuint64_t(p.batch) : 1}, apart[] = {k, k * m};
  cuuint32_t const box[] = {kTileK, kTileM, 1}, ones[] = {1, 1, 1};
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
                      int(ceil_div(p.m, kTileM)),
                      int(ceil_div(p.n, C::kTileN)),
                      p.a_batch_stride != 0,
                      (reinterpret_cast<uintptr_t>(p.out) | p.n * bytes) % (4 * bytes) == 0,
                      p.b_batch_stride / 2,
                      p.out_batch_stride,
                      Blocks(p),
                      epilogue_args<false>(p)};
  unsigned const blocks = unsigned(params.tiles_m) * params.tiles_n * unsigned(p.batch);
  return jax_qmm::launch(submit, shape_of<C>(blocks), wgmma_kernel<C>, params, boxes);
}

template <class C>
Instance instance() {
  Instance i{"sm90 wgmma " + words_of_tile(kTileM, C::kTileN, kTileK), prepare<C>, launch<C>};
  i.tile_m = kTileM, i.tile_n = C::kTileN, i.tile_k = kTileK;
  i.blocks_per_sm = 1, i.shared_bytes = int(sizeof(typename C::Shared)), i.wgmma = true;
  return i;
}

}  // namespace

void add_wgmma(std::vector<Instance>& to) {
  to.push_back(instance<Config<128>>());
  to.push_back(instance<Config<256>>());
}

}  // namespace jax_qmm::expanded
