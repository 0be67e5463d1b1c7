// Products of 16-bit x by Hopper's warpgroup-level tensor cores, from some tens of rows on: y^T = w x^T. Weights are
// the operand that comes from registers, whose fragments are those of mma.sync: their stored order serves both. Each
// warp has 16 rows of weights, which it loads two steps ahead. x comes by TMA, in tiles of 64 columns.
//
//   warps               role
//   0 ... kMathWarps-1  two warpgroups: dequantize and multiply, each 64 rows of weights; they write the results
//   kMathWarps          loads x
//   the other three     make it a warpgroup, which leaves its registers to the others
//
//   mbarrier      arrivals of a phase          who waits
//   full[stage]   1, and the bytes of a tile   math warps
//   empty[stage]  kMathWarps                   the warp that loads, from the second turn on
//
// While the products of 64 columns are under way, the next 64 are dequantized into other registers. Sums of a block are
// added to those before, scaled in float32, when its last products are done; the other warpgroup multiplies meanwhile.
#include "block_scaled_mm/kernel.cuh"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cuda_host_adapter.hpp"

namespace jax_qmm::block_scaled {
namespace {

constexpr int kColumnsX = 64;  // of a tile of x: 128 bytes, the span of TMA's swizzle

template <class T, int Bits, bool FloatZero, int TileM>
struct ConfigSm90 : Config<T, Bits, FloatZero, kColumnsX, TileM, 1, 8, 1> {
  using Element = std::conditional_t<kIsBf16<T>, cutlass::bfloat16_t, cutlass::half_t>;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<TileM>, cute::_16>>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  static constexpr int kMathWarps = 8, kLaunched = 32 * (kMathWarps + 4);  // kThreads are those of the math warps
  static constexpr int kStages = 8, kStageBytes = TileM * 2 * kColumnsX;
  struct Barriers {
    uint64_t full[kStages], empty[kStages];
  };
  static constexpr int kSharedBytes = kStages * kStageBytes + sizeof(Barriers);
  static_assert(TileM * ConfigSm90::kSumsPitch * 4 <= kStages * kStageBytes, "sums take the place of the stages");
};

template <class C>
__global__ void __launch_bounds__(C::kLaunched, 1)
    wgmma_kernel(Params const p, int block, CUTE_GRID_CONSTANT CUtensorMap const tiles_x) {
  using namespace cute;
  using Element = typename C::Element;
  using Weights = typename C::Weights;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kStages = C::kStages, kHalves = C::kColumns / kColumnsX;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& barriers = *reinterpret_cast<typename C::Barriers*>(memory + kStages * C::kStageBytes);

  // Blocks that have the same weights are neighbours.
  int const first_m = blockIdx.x % p.tiles_m * C::kTileM, l = blockIdx.x / (p.tiles_m * p.tiles_n);
  int const first_n = blockIdx.x / p.tiles_m % p.tiles_n * C::kRows;
  int const k_begin = blockIdx.y * p.k_of_part, k_end = min(p.k, k_begin + p.k_of_part);
  int const steps = (k_end - k_begin + C::kColumns - 1) / C::kColumns;
  int const warp = threadIdx.x / 32;
  if (warp == C::kMathWarps && elect_one_sync()) {
    prefetch_tma_descriptor(&tiles_x);
    for (int s = 0; s < kStages; ++s) {
      Full::init(&barriers.full[s], 1);
      Empty::init(&barriers.empty[s], C::kMathWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  begin();

  if (warp >= C::kMathWarps) {
    cutlass::arch::warpgroup_reg_dealloc<24>();
    if (warp == C::kMathWarps && elect_one_sync()) {
      int const rows = min(C::kTileM, p.m);
      for (int i = 0, stage = 0, turn = 0; i < steps * kHalves; ++i) {
        if (turn > 0) Empty::wait(&barriers.empty[stage], (turn - 1) & 1);
        Full::arrive_and_expect_tx(&barriers.full[stage], rows * 2 * kColumnsX);
        SM90_TMA_LOAD_3D::copy(&tiles_x, &barriers.full[stage], static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST),
                               memory + stage * C::kStageBytes, k_begin + i * kColumnsX, first_m,
                               p.x_batch_stride != 0 ? l : 0);
        if (++stage == kStages) stage = 0, ++turn;
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<240>();
    typename C::Mma mma;
    auto thread = mma.get_slice(threadIdx.x);
    Tensor stages = make_tensor(
        make_smem_ptr(reinterpret_cast<Element*>(memory)),
        tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<C::kTileM>, Int<kColumnsX>, Int<kStages>>{}));
    Tensor fragments_x = thread.make_fragment_B(thread.partition_B(stages));
    Tensor sums = partition_fragment_C(mma, Shape<Int<C::kRows>, Int<C::kTileM>>{});
    constexpr int kSums = decltype(size(sums))::value;
    float acc[kSums] = {};

    SourceOfWeights<C> weights(p, l, min(first_n + 16 * warp, p.n - 1), 0, k_begin, k_end);
    Held<C> held[2] = {};
    weights.load(held[0]);
    weights.load(held[1]);

    uint32_t pairs[2][4][4];  // of two halves in turn: of 16 columns each a fragment
    float scale[2] = {};      // of the block of the last half, of this lane's rows
    int stage = 0, phase = 0, before = -1, left = block - k_begin % block;  // columns of the block
    auto const add_block = [&] {
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[i] = fmaf(scale[i / 2 % 2], sums(i), acc[i]);
      warpgroup_fence_operand(sums);
    };
    mma.accumulate_ = GMMA::ScaleOut::Zero;

    auto const half = [&](Held<C>& held, auto number, auto buffer) {
      constexpr int kBegin = kColumnsX * decltype(number)::value, kBuffer = decltype(buffer)::value;
      float next_scale[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float const scale = to_float(held.scales[0][h][0], p.scale.dtype);
        typename Weights::Term const own[1] = {Weights::term(scale, held.zeros[0][h][0], p.zero_point.dtype)};
        typename Weights::Term term, same;
        take_terms<C, kBegin>(own, term, same);
        next_scale[h] = term.scale;
        unroll<2>([&](auto piece) {
          constexpr int i = decltype(piece)::value;
          uint32_t words[4];
          dequantize<C, kBegin + 32 * i>(held.words[0][h], term, term, words);
#pragma unroll
          for (int j = 0; j < 4; ++j) pairs[kBuffer][2 * i + j / 2][j % 2 * 2 + h] = words[j];
        });
      }
      if constexpr (kBegin + kColumnsX == C::kColumns) weights.load(held);
      if (left == 0) {
        add_block();
        left = block;
        mma.accumulate_ = GMMA::ScaleOut::Zero;
      }
      left -= kColumnsX;
      if (mma.accumulate_ == GMMA::ScaleOut::Zero) {  // of a half beyond K it would be 0
        scale[0] = next_scale[0], scale[1] = next_scale[1];
      }

      Full::wait(&barriers.full[stage], phase);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) warpgroup_fence_operand(pairs[kBuffer][i][j]);
      }
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Tensor fragment =
            make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(pairs[kBuffer][i])), Layout<Shape<_8, _1>>{});
        gemm(mma, fragment, fragments_x(_, _, i, stage), sums);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      if (before >= 0 && elect_one_sync()) Empty::arrive(&barriers.empty[before]);
      before = stage;
      if (++stage == kStages) stage = 0, phase ^= 1;
    };
    auto const step = [&](auto turn) {
      constexpr int kTurn = decltype(turn)::value;
      unroll<kHalves>([&](auto number) {
        half(held[kTurn], number, std::integral_constant<int, (kTurn * kHalves + decltype(number)::value) % 2>());
      });
    };
#pragma unroll 1
    for (int i = 0; i < steps; i += 2) {
      step(std::integral_constant<int, 0>());
      if (i + 1 == steps) break;
      step(std::integral_constant<int, 1>());
    }
    add_block();

    auto const sync_math = [] { asm volatile("bar.sync 1, %0;" ::"n"(C::kThreads) : "memory"); };
    sync_math();  // nobody reads x any more
    auto* const partial = reinterpret_cast<float*>(memory);
    int const row = 16 * warp + threadIdx.x % 32 / 4, member = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      int const m = i / 4 * 8 + 2 * member + i % 2;
      partial[m * C::kSumsPitch + row + i / 2 % 2 * 8] = acc[i];
    }
    sync_math();
    write_sums<C>(p, l, first_m, first_n, partial);
  }
}

template <class C>
cudaError_t prepare_wgmma(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(wgmma_kernel<C>), {{}, C::kLaunched, C::kSharedBytes}, fits);
}

// Has TMA load x in tiles of 64 columns, and zeros for what is beyond.
template <class C>
cudaError_t make_tiles(BlockScaledMm const& p, CUtensorMap& tiles) {
  bool const batched = p.x_batch_stride != 0;
  cuuint64_t const shape[] = {cuuint64_t(p.k), cuuint64_t(p.m), batched ? cuuint64_t(p.batch) : 1};
  cuuint64_t const strides[] = {2 * shape[0], 2 * (batched ? cuuint64_t(p.x_batch_stride) : shape[0] * shape[1])};
  cuuint32_t const box[] = {kColumnsX, cuuint32_t(std::min(C::kTileM, p.m)), 1}, steps[] = {1, 1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &tiles, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(p.x), shape, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class C>
cudaError_t launch_wgmma(BlockScaledMm const& problem, int split, Submit const& submit) {
  Params params = make_params<C>(problem);
  int const parts = set_parts<C>(problem, split, params);
  CUtensorMap tiles_x;
  if (cudaError_t const error = make_tiles<C>(problem, tiles_x)) return error;
  dim3 const blocks(params.tiles_m * params.tiles_n * unsigned(problem.batch), parts);
  LaunchShape const shape{blocks, C::kLaunched, C::kSharedBytes};
  cudaError_t const error = jax_qmm::launch(submit, shape, wgmma_kernel<C>, params, problem.block, tiles_x);
  return error || parts == 1 ? error : add_parts(problem, parts, submit);
}

template <DType In, int kBits>
void add(std::vector<Instance>& to) {
  using T = std::conditional_t<In == DType::kBF16, __nv_bfloat16, __half>;
  auto const add_one = [&](auto float_zero, auto tile_m) {
    using C = ConfigSm90<T, kBits, decltype(float_zero)::value, decltype(tile_m)::value>;
    Instance i = describe<C>(In);
    i.wgmma = true;
    i.prepare = prepare_wgmma<C>;
    i.launch = launch_wgmma<C>;
    to.push_back(i);
  };
  add_one(std::false_type(), std::integral_constant<int, 64>());
  add_one(std::false_type(), std::integral_constant<int, 128>());
}

}  // namespace

void add_wgmma_instances(std::vector<Instance>& to) {
  add<DType::kBF16, 4>(to);
  add<DType::kBF16, 8>(to);
  add<DType::kF16, 4>(to);
  add<DType::kF16, 8>(to);
}

}  // namespace jax_qmm::block_scaled
