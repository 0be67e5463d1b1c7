#include "scaled_mm/stream_sm90.h"

#define CUTLASS_ENABLE_GDC_FOR_SM90 1

#include <cute/tensor.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/grid_dependency_control.h>
#include <cutlass/cluster_launch.hpp>
#include <cutlass/numeric_types.h>

#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::sm90 {

using namespace cute;
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

namespace {

constexpr int kStageK = 256;
constexpr int kStages = 3;              // 3 blocks of up to 75 KB share an SM, so that one's start hides another's end
constexpr int kConsumers = 128;         // one warpgroup multiplies, one thread of one more warp loads
constexpr int kThreads = kConsumers + 32;

struct Vectors {
  VectorArg<float> scale_a, scale_b, bias;
  VectorArg<int32_t> azp, azp_adj;
  OutputArg output;
  void* out;
  int out_bytes;
};

__device__ float add(float x, float y) { return x + y; }
__device__ int32_t add(int32_t x, int32_t y) { return int32_t(uint32_t(x) + uint32_t(y)); }

template <DType In, Accum accum, int Rows>
struct Kernel {
  static constexpr bool kInt8 = In == DType::kS8;
  static constexpr int kColumns = Stream<In, accum, Rows>::kColumns;
  static_assert(kStageK == Stream<In, accum, Rows>::kTileK);
  static constexpr int kPitch = kColumns + 4;  // words between a tile's rows of sums: no two lanes hit one bank
  using Element = conditional_t<kInt8, int8_t, cutlass::float_e4m3_t>;
  using Accumulator = conditional_t<kInt8, int32_t, float>;
  using LayoutB = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kStageK>, Int<kStages>>{}));
  using LayoutA = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<Rows>, Int<kStageK>, Int<kStages>>{}));
  // b's rows are the rows of the tensor cores' product, whose M is 64, and a's are its columns, of which 8 are enough.
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, Accumulator, Shape<Int<kColumns>, Int<Rows>, Int<kStageK>>>()));

  struct Storage {
    union {
      struct {
        alignas(1024) array_aligned<Element, cosize_v<LayoutB>, 1024> b;
        alignas(1024) array_aligned<Element, cosize_v<LayoutA>, 1024> a;
      };
      Accumulator sums[Rows * kPitch];
    };
    uint64_t full[kStages], empty[kStages];
  };

  template <class Layout>
  static auto make_tma(void const* data, int rows, int k, int batch, int64_t batch_stride, Layout layout) {
    auto tensor = make_tensor(make_gmem_ptr(static_cast<Element const*>(data)), make_shape(rows, k, batch),
                              make_stride(int64_t(k), _1{}, batch_stride));
    return make_tma_copy(SM90_TMA_LOAD{}, tensor, layout(_, _, _0{}), make_shape(size<0>(layout), Int<kStageK>{}), _1{});
  }
  using TmaA = decltype(make_tma(nullptr, 0, 0, 0, 0, LayoutA{}));
  using TmaB = decltype(make_tma(nullptr, 0, 0, 0, 0, LayoutB{}));

  struct Params {
    TmaA tma_a;
    TmaB tma_b;
    int m, n, k, batch;
    Vectors vectors;
  };
};

template <class K>
__global__ void __launch_bounds__(kThreads) stream_kernel(__grid_constant__ typename K::Params const p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<typename K::Storage*>(shared);
  using Accumulator = typename K::Accumulator;
  constexpr int kRows = size<0>(typename K::LayoutA{}), kColumns = K::kColumns;

  int const split = cute::cluster_shape().x, rank = cute::block_rank_in_cluster();
  int const tile_n = blockIdx.x / split, tile_m = blockIdx.y, l = blockIdx.z;
  int const k_tiles = (p.k + kStageK - 1) / kStageK;
  int const k_begin = int64_t(k_tiles) * rank / split, k_end = int64_t(k_tiles) * (rank + 1) / split;

  Tensor sA = make_tensor(make_smem_ptr(storage.a.data()), typename K::LayoutA{});  // (rows, k, stage)
  Tensor sB = make_tensor(make_smem_ptr(storage.b.data()), typename K::LayoutB{});

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      FullBarrier::init(&storage.full[i], 1);
      EmptyBarrier::init(&storage.empty[i], kConsumers / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  Vectors const& v = p.vectors;
  v.scale_a.prefetch();
  v.scale_b.prefetch();
  v.bias.prefetch();
  v.azp.prefetch();
  v.azp_adj.prefetch();

  typename K::Mma mma;
  auto thread_mma = mma.get_thread_slice(threadIdx.x % kConsumers);
  Tensor sums_layout = make_tensor(make_smem_ptr(storage.sums), Shape<Int<kColumns>, Int<kRows>>{},
                                   Stride<_1, Int<K::kPitch>>{});
  Tensor tCsC = thread_mma.partition_C(sums_layout);
  Tensor sums = thread_mma.make_fragment_C(tCsC);
  clear(sums);

  cutlass::arch::wait_on_dependent_grids();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      Tensor gA = local_tile(p.tma_a.get_tma_tensor(make_shape(p.m, p.k, p.batch)),
                             Shape<Int<kRows>, Int<kStageK>>{}, make_coord(tile_m, _))(_, _, _, l);
      Tensor gB = local_tile(p.tma_b.get_tma_tensor(make_shape(p.n, p.k, p.batch)),
                             Shape<Int<kColumns>, Int<kStageK>>{}, make_coord(tile_n, _))(_, _, _, l);
      auto [tAgA, tAsA] = tma_partition(p.tma_a, _0{}, Layout<_1>{}, group_modes<0, 2>(sA), group_modes<0, 2>(gA));
      auto [tBgB, tBsB] = tma_partition(p.tma_b, _0{}, Layout<_1>{}, group_modes<0, 2>(sB), group_modes<0, 2>(gB));
      constexpr int kBytes = (kRows + kColumns) * kStageK;
      for (int k = k_begin, stage = 0, phase = 1; k < k_end; ++k) {
        EmptyBarrier::wait(&storage.empty[stage], phase);
        FullBarrier::arrive_and_expect_tx(&storage.full[stage], kBytes);
        // b is read once, a by every block.
        copy(p.tma_b.with(storage.full[stage], 0, TMA::CacheHintSm90::EVICT_FIRST), tBgB(_, k), tBsB(_, stage));
        copy(p.tma_a.with(storage.full[stage], 0, TMA::CacheHintSm90::EVICT_LAST), tAgA(_, k), tAsA(_, stage));
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    }
  } else {
    Tensor fragments_b = thread_mma.make_fragment_A(thread_mma.partition_A(sB));  // (MMA, MMA_M, MMA_K, stage)
    Tensor fragments_a = thread_mma.make_fragment_B(thread_mma.partition_B(sA));
    constexpr int kSteps = size<2>(decltype(fragments_b){}.layout());
    for (int k = k_begin, stage = 0, phase = 0; k < k_end; ++k) {
      FullBarrier::wait(&storage.full[stage], phase);
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        gemm(mma, fragments_b(_, _, step, stage), fragments_a(_, _, step, stage), sums);
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&storage.empty[stage]);
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  }

  cutlass::arch::launch_dependent_grids();

  // Everything loaded has been read: the sums take its place.
  __syncthreads();
  if (threadIdx.x < kConsumers) copy(sums, tCsC);
  if (split > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  constexpr int kGroup = 4;  // neighbours along N that one thread finishes
  int const rows = min(kRows, p.m - tile_m * kRows);
  int const groups = min(kColumns, p.n - tile_n * kColumns) / kGroup;
  uint32_t const sums_address = cast_smem_ptr_to_uint(storage.sums);
  for (int i = rank * kThreads + threadIdx.x; i < rows * (kColumns / kGroup); i += split * kThreads) {
    int const row = i / (kColumns / kGroup), group = i % (kColumns / kGroup);
    if (group >= groups) continue;
    Accumulator total[kGroup] = {};
    for (int part = 0; part < split; ++part) {
      uint32_t const address = set_block_rank(sums_address + (row * K::kPitch + group * kGroup) * 4, part);
      uint32_t words[kGroup];
      asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address));
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kGroup; ++j) total[j] = add(total[j], reinterpret_cast<Accumulator const&>(words[j]));
    }
    int const m = tile_m * kRows + row, n = tile_n * kColumns + group * kGroup;
    float const scale_a = v.scale_a.load(l, m);
    int32_t const azp = v.azp.load(l, m);
    cutlass::Array<float, kGroup> values;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kGroup; ++j) {
      values[j] = combine(subtract_zero_point(total[j], azp, v.azp_adj.load(l, n + j)), scale_a,
                          v.scale_b.load(l, n + j), v.bias.load(l, n + j));
    }
    int64_t const offset = (int64_t(l) * p.m + m) * p.n + n;
    auto store = [&](auto bits) {
      using Out = cutlass::AlignedArray<decltype(bits), kGroup>;
      Out const out = v.output.template round<decltype(bits), Out, kGroup>(values, total);
      *reinterpret_cast<Out*>(static_cast<decltype(bits)*>(v.out) + offset) = out;
    };
    if (v.out_bytes == 2) {
      store(uint16_t{});
    } else {
      store(uint32_t{});
    }
  }
  if (split > 1) cluster_sync();  // the others may still be reading these sums
}

}  // namespace

template <DType In, Accum accum, int Rows>
cudaError_t Stream<In, accum, Rows>::prepare() {
  using K = Kernel<In, accum, Rows>;
  return cudaFuncSetAttribute(stream_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              sizeof(typename K::Storage));
}

template <DType In, Accum accum, int Rows>
cudaError_t Stream<In, accum, Rows>::launch(ScaledMm const& p, int split, int, cudaStream_t stream) {
  using K = Kernel<In, accum, Rows>;
  bool const two_bytes = p.out_dtype == DType::kBF16 || p.out_dtype == DType::kF16;
  typename K::Params params{
      K::make_tma(p.a, p.m, p.k, p.batch, p.a_batch_stride, typename K::LayoutA{}),
      K::make_tma(p.b, p.n, p.k, p.batch, p.b_batch_stride, typename K::LayoutB{}),
      p.m, p.n, p.k, p.batch,
      {scale_arg(p.scale_a), scale_arg(p.scale_b), bias_arg(p.bias), azp_arg(p.azp), azp_adj_arg(p.azp_adj),
       {p.out_dtype}, p.out, two_bytes ? 2 : 4}};

  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ceil_div(p.n, kColumns) * split, ceil_div(p.m, Rows), p.batch);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(typename K::Storage);
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {unsigned(split), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, stream_kernel<K>, params);
}

#define GEMM(...)
#define STREAM(cost, in, accum, rows) template struct Stream<DType::in, Accum::accum, rows>;
#include "scaled_mm/instances_sm90.def"

}  // namespace jax_qmm::sm90
