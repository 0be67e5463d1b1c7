// Products of few rows of a, by tiles of the transposed result too few to keep all SMs reading: the blocks of a cluster each
// have a part of a tile's K, and each adds up some of its columns from all of them, in a fixed order. One warp loads, by TMA,
// and a warpgroup multiplies; several blocks fit an SM, so that one reads while another ends.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // for 48 columns
#include "scaled_mm/split_k_sm90.h"

#include <algorithm>
#include <type_traits>

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"

#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::sm90 {
namespace {

using namespace cute;

constexpr int kMathThreads = 128, kThreads = kMathThreads + 32, kMostStages = 32, kMostSplit = 8;

struct Params {
  void* out;
  int m, n, k, batch, stages, split;
  int64_t out_batch_stride;
  EpilogueArgs epilogue;
};

template <class Element, int Rows>
using Tile = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<Rows>, Int<kSplitTileK>>{}));
template <class Element, int Rows>
using Stages = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                      Shape<Int<Rows>, Int<kSplitTileK>, Int<kMostStages>>{}));

// What follows the stages in shared memory.
template <class Accumulator, int Columns>
struct Shared {
  Accumulator partial[Columns + kMostSplit - 1][kSplitRows + 4];  // padded: the fragments' stores hit distinct banks
  float scale_a[Columns];
  int32_t azp[Columns];
  uint64_t full[kMostStages], empty[kMostStages];
};

template <class Element, class Bits, int Columns, class LoadB, class LoadA>
__global__ void __launch_bounds__(kThreads)
    split_k_kernel(Params const p, CUTE_GRID_CONSTANT LoadB const load_b, CUTE_GRID_CONSTANT LoadA const load_a) {
  using Accumulator = conditional_t<std::is_same_v<Element, int8_t>, int32_t, float>;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* const memory_a = memory + p.stages * kSplitRows * kSplitTileK;
  auto& smem = *reinterpret_cast<Shared<Accumulator, Columns>*>(memory_a + p.stages * Columns * kSplitTileK);
  Tensor stages_b = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(memory)), Stages<Element, kSplitRows>{});
  Tensor stages_a = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(memory_a)), Stages<Element, Columns>{});

  int const rank = blockIdx.x % p.split, tile = blockIdx.x / p.split, l = blockIdx.y;
  int const k_tiles = (p.k + kSplitTileK - 1) / kSplitTileK;
  int const begin = k_tiles * rank / p.split, end = k_tiles * (rank + 1) / p.split;
  bool const loads = threadIdx.x / 32 == kMathThreads / 32;

  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      Full::init(&smem.full[s], 1);
      Empty::init(&smem.empty[s], kMathThreads / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  cluster_arrive_relaxed();
  // The next kernel may start, and wait for this one's results as this one does for those before it.
  cudaTriggerProgrammaticLaunchCompletion();

  // The results that this thread will write: two rows of b, and some rows of a.
  int constexpr kPairs = kSplitRows / 2;
  int const share = (Columns + p.split - 1) / p.split, pair = threadIdx.x % kPairs, n = tile * kSplitRows + 2 * pair;
  float scale_b[2], bias[2];
  int32_t azp_adj[2];
  if (loads) {
    if (elect_one_sync()) {
      prefetch_tma_descriptor(load_b.get_tma_descriptor());
      prefetch_tma_descriptor(load_a.get_tma_descriptor());
      Tensor b = local_tile(load_b.get_tma_tensor(make_shape(p.n, p.k, p.batch)), Shape<Int<kSplitRows>, Int<kSplitTileK>>{},
                            make_coord(tile, _, l));
      Tensor a = local_tile(load_a.get_tma_tensor(make_shape(p.m, p.k, p.batch)), Shape<Int<Columns>, Int<kSplitTileK>>{},
                            make_coord(0, _, l));
      Tensor from_b = load_b.get_slice(0).partition_S(b);
      Tensor from_a = load_a.get_slice(0).partition_S(a);
      Tensor to_b = load_b.get_slice(0).partition_D(stages_b);
      Tensor to_a = load_a.get_slice(0).partition_D(stages_a);
      cudaGridDependencySynchronize();
      for (int i = begin, stage = 0, turn = 0; i < end; ++i) {
        if (turn > 0) Empty::wait(&smem.empty[stage], (turn - 1) & 1);
        Full::arrive_and_expect_tx(&smem.full[stage], (kSplitRows + Columns) * kSplitTileK);
        copy(load_b.with(smem.full[stage], 0, TMA::CacheHintSm90::EVICT_FIRST), from_b(_, _, _, i), to_b(_, _, _, stage));
        copy(load_a.with(smem.full[stage], 0, TMA::CacheHintSm90::EVICT_LAST), from_a(_, _, _, i), to_a(_, _, _, stage));
        if (++stage == p.stages) stage = 0, ++turn;
      }
    }
    __syncwarp();
    cluster_wait();
  } else {
    TiledMMA mma = make_tiled_mma(GMMA::ss_op_selector<Element, Element, Accumulator, Shape<_64, Int<Columns>, _128>>());
    auto thread = mma.get_slice(threadIdx.x);
    Tensor fragments_b = thread.make_fragment_A(thread.partition_A(stages_b));
    Tensor fragments_a = thread.make_fragment_B(thread.partition_B(stages_a));
    Tensor acc = partition_fragment_C(mma, Shape<Int<kSplitRows>, Int<Columns>>{});
    Tensor places = thread.partition_C(make_identity_tensor(Shape<Int<kSplitRows>, Int<Columns>>{}));
    clear(acc);

    cudaGridDependencySynchronize();
    // Now, so that the end does not wait for them.
    if (threadIdx.x < Columns && int(threadIdx.x) < p.m) {
      smem.scale_a[threadIdx.x] = p.epilogue.scale_a.load(l, threadIdx.x);
      smem.azp[threadIdx.x] = p.epilogue.azp.load(l, threadIdx.x);
    }
#pragma unroll
    for (int i = 0; i < 2 && n < p.n; ++i) {
      scale_b[i] = p.epilogue.scale_b.load(l, n + i);
      bias[i] = p.epilogue.bias.load(l, n + i);
      azp_adj[i] = p.epilogue.azp_adj.load(l, n + i);
    }

    warpgroup_fence_operand(acc);
    int stage = 0, phase = 0, before = -1;
    for (int i = begin; i < end; ++i) {
      Full::wait(&smem.full[stage], phase);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < size<2>(fragments_b); ++k) gemm(mma, fragments_b(_, _, k, stage), fragments_a(_, _, k, stage), acc);
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      if (before >= 0 && elect_one_sync()) Empty::arrive(&smem.empty[before]);
      before = stage;
      if (++stage == p.stages) stage = 0, phase ^= 1;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);

    cluster_wait();  // until all blocks of the cluster run
#pragma unroll
    for (int i = 0; i < size(acc); ++i) {
      int const row = get<0>(places(i)), column = get<1>(places(i));
      auto* const mine = &smem.partial[rank * share + column % share][row];
      *static_cast<Accumulator*>(__cluster_map_shared_rank(mine, column / share)) = acc(i);
    }
  }
  cluster_sync();
  if (loads || n >= p.n) return;

  for (int c = threadIdx.x / kPairs; c < share; c += kMathThreads / kPairs) {
    int const m = rank * share + c;
    if (m >= p.m) return;
    struct alignas(2 * sizeof(Accumulator)) Two {
      Accumulator of[2];
    };
    Accumulator sums[2] = {};
    for (int r = 0; r < p.split; ++r) {
      Two const part = *reinterpret_cast<Two const*>(&smem.partial[r * share + c][2 * pair]);
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[i] += part.of[i];
    }
    float values[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      values[i] = combine(subtract_zero_point(sums[i], smem.azp[m], azp_adj[i]), smem.scale_a[m], scale_b[i], bias[i]);
    }
    struct alignas(2 * sizeof(Bits)) Out {
      Bits of[2];
      __device__ Bits& operator[](int i) { return of[i]; }
    };
    auto* const out = static_cast<Bits*>(p.out) + l * p.out_batch_stride + int64_t(m) * p.n + n;
    *reinterpret_cast<Out*>(out) = p.epilogue.output.template round<Bits, Out, 2>(values, sums);
  }
}

template <DType In, int OutBytes, int Columns, int BlocksPerSm>
struct Types {
  using Element = conditional_t<In == DType::kS8, int8_t, cutlass::float_e4m3_t>;
  using Accumulator = conditional_t<In == DType::kS8, int32_t, float>;
  using Bits = conditional_t<OutBytes == 2, uint16_t, uint32_t>;

  template <int TileRows>
  static auto load(void const* data, int rows, int k, int batch, int64_t batch_stride) {
    auto const matrix = make_tensor(make_gmem_ptr(static_cast<Element const*>(data)), make_shape(rows, k, batch),
                                    make_stride(int64_t(k), _1{}, batch_stride));
    return make_tma_copy(SM90_TMA_LOAD{}, matrix, Tile<Element, TileRows>{}, Shape<Int<TileRows>, Int<kSplitTileK>>{}, _1{});
  }
  using LoadB = decltype(load<kSplitRows>(nullptr, 0, 0, 0, 0));
  using LoadA = decltype(load<Columns>(nullptr, 0, 0, 0, 0));

  static constexpr auto* kKernel = split_k_kernel<Element, Bits, Columns, LoadB, LoadA>;
  static constexpr int kFixed = sizeof(Shared<Accumulator, Columns>), kStage = (kSplitRows + Columns) * kSplitTileK;
  // Of the 228 KB of an SM, each block takes one more than it asks for.
  static constexpr int kStages = std::min((228 * 1024 / BlocksPerSm - 1024 - kFixed) / kStage, kMostStages);
  static constexpr int kSharedMemory = kStages * kStage + kFixed;
  static_assert(kStages >= 2, "a stage is free again when the next one's products are under way");
  static_assert(Columns <= kMathThreads);
};

}  // namespace

template <DType In, int OutBytes, int Columns, int Split, int BlocksPerSm>
cudaError_t SplitK<In, OutBytes, Columns, Split, BlocksPerSm>::prepare() {
  // The lines that share a kernel differ in their stages: the fewest blocks have the most.
  using T = Types<In, OutBytes, Columns, 1>;
  return cudaFuncSetAttribute(T::kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedMemory);
}

template <DType In, int OutBytes, int Columns, int Split, int BlocksPerSm>
cudaError_t SplitK<In, OutBytes, Columns, Split, BlocksPerSm>::launch(ScaledMm const& p, int, int,
                                                                            cudaStream_t stream) {
  static_assert(Split <= kMostSplit);
  using T = Types<In, OutBytes, Columns, BlocksPerSm>;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {Split, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((unsigned(p.n) + kSplitRows - 1) / kSplitRows * Split, p.batch);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = T::kSharedMemory;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(
      &config, T::kKernel,
      Params{p.out, p.m, p.n, p.k, p.batch, T::kStages, Split, p.out_batch_stride, epilogue_args(p)},
      T::template load<kSplitRows>(p.b, p.n, p.k, p.batch, p.b_batch_stride),
      T::template load<Columns>(p.a, p.m, p.k, p.batch, p.a_batch_stride));
}

#define GEMM(...)
#define SKINNY(...)
#define SPLIT_K(cost, ...) template struct JAX_QMM_SPLIT_K(__VA_ARGS__);
#include "scaled_mm/instances_sm90.def"

}  // namespace jax_qmm::sm90
