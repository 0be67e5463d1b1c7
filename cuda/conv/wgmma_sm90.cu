// The implicit GEMM by Hopper's warpgroup-level tensor cores. TMA knows images: its im2col mode brings the pixels that
// the tile's windows have at one tap, some channels of each, and zeros for those outside. Weights are boxes of some
// channels at one tap. K is taps, then channels; what a box has beyond the channels of a group meets zeros there.
//
//   warps                        role
//   0 ... kMathWarps - 1         two warpgroups: multiply; then they write the results
//   kMathWarps                   loads images and weights by TMA
//   kMathWarps + 1               where images have zero points: writes them over the zeros of pixels outside; then
//                                copies the epilogue's terms to shared memory
//
//   mbarrier        arrivals of a phase                       who waits
//   full[stage]     1 and the bytes of what TMA brings        math warps, or the one of the borders
//   bordered[stage] the warp of the borders                   math warps, where images have zero points
//   empty[stage]    kMathWarps of each block that shares      load warp, from the second turn on
//                   the weights
//   met             all warps: what the stages had is done    math warps (one phase)
//
// The blocks of a cluster share weights, of which each loads some rows for all of them, or they share K: then each adds
// up some pixels from all parts. Stages of the last turn are not released, as blocks that are done may have exited.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <algorithm>

#include "conv/im2col_sm90.cuh"
#include "conv/instances.h"
#include "conv/residual.cuh"
#include "conv/window.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "scaled_mm/write_rows.cuh"

namespace jax_qmm::conv {
namespace {

constexpr int kMathWarps = 8, kMathThreads = 32 * kMathWarps, kThreads = kMathThreads + 64;

template <int TileM, int TileN, int TileK, int BlocksPerSm>
struct Config {
  static constexpr int kTileM = TileM, kTileN = TileN, kTileK = TileK, kBlocksPerSm = BlocksPerSm;
  static constexpr bool kFull = true;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<int8_t, int8_t, int32_t, cute::Shape<cute::_64, cute::Int<TileN>, cute::_32>>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  using Atom =
      std::conditional_t<TileK == 128, cute::GMMA::Layout_K_SW128_Atom<int8_t>, cute::GMMA::Layout_K_SW64_Atom<int8_t>>;
  static_assert(TileK == 64 || TileK == 128, "a row of a stage is the span of TMA's swizzle");

  static constexpr int kBytesA = TileM * TileK, kBytesB = TileN * TileK, kPitch = TileN + 8;
  static constexpr int kTermsBytes = (TileM + TileN) * sizeof(Terms<true, Value>);
  static constexpr int kStages = std::min(12, (227 * 1024 / BlocksPerSm - 1024 - kTermsBytes) / (kBytesA + kBytesB));
  struct Shared {
    alignas(1024) uint8_t a[kStages][kBytesA];
    alignas(1024) uint8_t b[kStages][kBytesB];
    Terms<true, Value> rows[TileM], columns[TileN];
    uint64_t full[kStages], bordered[kStages], empty[kStages], met;
  };
  static_assert(kStages >= 3);
  static_assert((TileM + 7) * kPitch * 4 <= kStages * (kBytesA + kBytesB), "sums take the place of the stages");
};

struct Params {
  void* out;
  int64_t out_batch_stride;
  Window window;
  int m, n, columns_of_group, groups;
  int channels, chunks, taps, taps_x;  // channels of a group, which are so many boxes
  int images;
  bool images_batched, weights_batched;  // or the same for the whole batch
  bool stores_whole;                     // whether rows of the output start at whole stores
  int share;                             // blocks of a cluster that share weights
  int clusters_m, tiles_n;
  EpilogueArgs<true> epilogue;
};

// Writes the zero points over the pixels outside of the image, which TMA left zeros, in each stage.
template <class C>
__device__ void write_borders(Params const& p, typename C::Shared& shared, int first_m, int l, int begin, int end) {
  constexpr int kRows = C::kTileM / 32, kPieces = C::kTileK / 16;
  int const lane = threadIdx.x % 32;
  int corner[kRows][kSpatial];
  uint32_t zeros[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    int const m = min(first_m + lane + i * 32, p.m - 1);
    zeros[i] = 0x01010101 * uint8_t(p.epilogue.azp.load(l, p.window.corner_of(m, corner[i])));
  }
  int tap = begin / p.chunks, chunk = begin % p.chunks;
  for (int i = begin, stage = 0, phase = 0; i < end; ++i) {
    int const y = tap / p.taps_x * p.window.dilation[1], x = tap % p.taps_x * p.window.dilation[2];
    cutlass::arch::ClusterTransactionBarrier::wait(&shared.full[stage], phase);
    asm volatile("" ::: "memory");  // neither the wait nor the fence below keeps the compiler from moving stores
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      unsigned byte;
      if (p.window.finds(0, corner[j][1] + y, corner[j][2] + x, byte)) continue;
      auto* const row = reinterpret_cast<uint4*>(shared.a[stage] + (lane + j * 32) * C::kTileK);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        row[(piece + lane) % kPieces] = make_uint4(zeros[j], zeros[j], zeros[j], zeros[j]);
      }
    }
    asm volatile("" ::: "memory");
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (cute::elect_one_sync()) cutlass::arch::ClusterBarrier::arrive(&shared.bordered[stage]);
    if (++stage == C::kStages) stage = 0, phase ^= 1;
    if (++chunk == p.chunks) chunk = 0, ++tap;
  }
}

// For the math threads: the terms of the tile's rows, and of its columns by the last threads first.
template <class C>
__device__ void load_terms(Params const& p, typename C::Shared& shared, int l, int group, int first_m, int tile_m,
                           int first_n, int tile_n) {
  static_assert(C::kTileM <= kMathThreads && C::kTileN <= kMathThreads);
  int const row = threadIdx.x, column = kMathThreads - 1 - threadIdx.x;
  if (row < tile_m) {
    int const m = first_m + row, image = p.window.image_of(m);
    auto& terms = shared.rows[row];
    terms.scale_a = p.epilogue.scale_a.load(l, image);
    terms.azp = p.epilogue.azp.load(l, image);
    terms.sums_a = p.epilogue.sums_a.load(l, m * p.groups + group);
  }
  if (column < tile_n) p.epilogue.load_column(l, first_n + column, shared.columns[column]);
}

template <class C, class Added>
__global__ void __launch_bounds__(kThreads, C::kBlocksPerSm)
    wgmma_conv_kernel(Params const p, Added const added, CUTE_GRID_CONSTANT CUtensorMap const boxes_a,
                      CUTE_GRID_CONSTANT CUtensorMap const boxes_b) {
  using namespace cute;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kStages = C::kStages, kTileM = C::kTileM, kTileN = C::kTileN, kTileK = C::kTileK;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(memory);
  auto* const partial = reinterpret_cast<int32_t*>(memory);  // [parts][rows of one][kPitch], when all is multiplied

  // Blocks that have the same pixels are neighbours.
  int const share = p.share, rank = blockIdx.x % share, cluster = blockIdx.x / share, group = blockIdx.z;
  int const tile_n = cluster % p.tiles_n, of_m = cluster / p.tiles_n;
  int const first_m = (of_m % p.clusters_m * share + rank) * kTileM, l = of_m / p.clusters_m;
  int const first_n = group * p.columns_of_group + tile_n * kTileN, end_n = (group + 1) * p.columns_of_group;
  int const steps = p.taps * p.chunks, tile_m = min(kTileM, p.m - first_m);
  Parts const parts(kTileM, tile_m);
  int const begin = steps * parts.own / parts.count, end = steps * (parts.own + 1) / parts.count;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bool const has_borders = p.epilogue.azp.data != nullptr;

  if (warp == kMathWarps && elect_one_sync()) {
    prefetch_tma_descriptor(&boxes_a);
    prefetch_tma_descriptor(&boxes_b);
    for (int s = 0; s < kStages; ++s) {
      Full::init(&shared.full[s], 1);
      Full::init(&shared.bordered[s], 1);
      Empty::init(&shared.empty[s], share * kMathWarps);
    }
    Full::init(&shared.met, kThreads / 32);
    cutlass::arch::fence_barrier_init();
  }
  if (share > 1) {
    sync_cluster();
  } else {
    __syncthreads();
  }
  cudaTriggerProgrammaticLaunchCompletion();

  if (warp >= kMathWarps) {
    cudaGridDependencySynchronize();
    if (warp == kMathWarps && elect_one_sync()) {
      int corner[kSpatial];
      int const image = p.window.corner_of(first_m, corner) + (p.images_batched ? l * p.images : 0);
      int const rows_b = kTileN / share, first_b = rank * rows_b, entry = p.weights_batched ? l : 0;
      auto const normal = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
      int tap = begin / p.chunks, chunk = begin % p.chunks;
      for (int i = begin, stage = 0, turn = 0; i < end; ++i) {
        uint64_t* const full = &shared.full[stage];
        if (turn > 0) Empty::wait(&shared.empty[stage], (turn - 1) & 1);
        Full::arrive_and_expect_tx(full, C::kBytesA + C::kBytesB);
        int const y = tap / p.taps_x * p.window.dilation[1], x = tap % p.taps_x * p.window.dilation[2];
        SM90_TMA_LOAD_IM2COL_4D::copy(&boxes_a, full, shared.a[stage], group * p.channels + chunk * kTileK, corner[2],
                                      corner[1], image, uint16_t(x), uint16_t(y));
        auto* const to = shared.b[stage] + first_b * kTileK;
        if (share > 1) {
          SM90_TMA_LOAD_MULTICAST_4D::copy(&boxes_b, full, uint16_t((1 << share) - 1), normal, to, chunk * kTileK, tap,
                                           first_n + first_b, entry);
        } else {
          SM90_TMA_LOAD_4D::copy(&boxes_b, full, normal, to, chunk * kTileK, tap, first_n, entry);
        }
        if (++stage == kStages) stage = 0, ++turn;
        if (++chunk == p.chunks) chunk = 0, ++tap;
      }
    }
    __syncwarp();
    if (warp > kMathWarps && has_borders) write_borders<C>(p, shared, first_m, l, begin, end);
    finish_stages<C>(shared, parts);
    return;
  }

  typename C::Mma mma;
  auto thread = mma.get_slice(threadIdx.x);
  auto const stages_of = [&](auto rows, uint8_t(*from)) {
    return make_tensor(make_smem_ptr(reinterpret_cast<int8_t*>(from)),
                       tile_to_shape(typename C::Atom{}, Shape<decltype(rows), Int<kTileK>, Int<kStages>>{}));
  };
  Tensor fragments_a = thread.make_fragment_A(thread.partition_A(stages_of(Int<kTileM>{}, shared.a[0])));
  Tensor fragments_b = thread.make_fragment_B(thread.partition_B(stages_of(Int<kTileN>{}, shared.b[0])));
  Tensor acc = partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});
  clear(acc);
  warpgroup_fence_operand(acc);
  cudaGridDependencySynchronize();  // what the end needs comes while the first stages are on their way
  FullOutput const output = p.epilogue.output.at(l);
  load_terms<C>(p, shared, l, group, first_m, tile_m, first_n, min(kTileN, end_n - first_n));
  uint64_t* const ready = has_borders ? shared.bordered : shared.full;
  int stage = 0, phase = 0, before = -1;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    Full::wait(&ready[stage], phase);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < size<2>(fragments_a); ++k) {
      gemm(mma, fragments_a(_, _, k, stage), fragments_b(_, _, k, stage), acc);
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();
    // What the step before had is free, if it is loaded again.
    if (before >= 0 && i - 1 + kStages < end && lane < share) {
      Empty::arrive(&shared.empty[before], share > 1 ? lane : parts.own, true);  // by their rank in the cluster
    }
    before = stage;
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(acc);
  finish_stages<C>(shared, parts);
  Tensor places = thread.partition_C(make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));
  store_sums<C, kMathThreads>(partial, parts, tile_m, acc, places);
  write_rows<C, kMathThreads>(p, output, shared, partial, parts, l, first_m, first_n, end_n, added.at(l));
}

// The channels of weights at one tap.
template <class C>
cudaError_t make_weight_boxes(Conv const& p, int share, CUtensorMap& boxes) {
  cuuint64_t const channels = p.channels, taps = p.taps[1] * p.taps[2], n = p.n, k = p.k;
  cuuint64_t const shape[] = {channels, taps, n, p.b_batch_stride != 0 ? cuuint64_t(p.batch) : 1};
  cuuint64_t const apart[] = {channels, k, n * k};
  cuuint32_t const box[] = {C::kTileK, 1, cuuint32_t(C::kTileN / share), 1}, ones[] = {1, 1, 1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &boxes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(p.b), shape, apart, box, ones,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(C::kTileK), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The blocks of a cluster share weights, or K.
template <class C>
LaunchShape shape_of(dim3 grid, int share, int parts) {
  return {grid, kThreads, sizeof(typename C::Shared), dim3(share, parts)};
}

template <class C, int kShare, int kParts>
cudaError_t prepare(bool& fits) {
  return prepare_all({reinterpret_cast<void const*>(wgmma_conv_kernel<C, NoResidual>),
                      reinterpret_cast<void const*>(wgmma_conv_kernel<C, ResidualArg>)},
                     shape_of<C>({}, kShare, kParts), fits);
}

template <class C, int kShare, int kParts>
cudaError_t launch(Conv const& p, Submit const& submit) {
  CUtensorMap images, weights;
  if (cudaError_t const error = make_image_boxes(p, C::kTileM, C::kTileK, images)) return error;
  if (cudaError_t const error = make_weight_boxes<C>(p, kShare, weights)) return error;
  int const columns = p.n / p.groups;
  uintptr_t const bytes = bytes_of(p.out_dtype);
  Params const params{p.out,
                      p.out_batch_stride,
                      Window(p),
                      p.m,
                      p.n,
                      columns,
                      p.groups,
                      p.channels,
                      int(ceil_div(p.channels, C::kTileK)),
                      p.taps[1] * p.taps[2],
                      p.taps[2],
                      p.images,
                      p.a_batch_stride != 0,
                      p.b_batch_stride != 0,
                      (reinterpret_cast<uintptr_t>(p.out) | columns * bytes) % (4 * bytes) == 0,
                      kShare,
                      int(ceil_div(p.m, C::kTileM * kShare)),
                      int(ceil_div(columns, C::kTileN)),
                      epilogue_args<true>(p)};
  unsigned const clusters = unsigned(params.clusters_m) * params.tiles_n * unsigned(p.batch);
  LaunchShape const shape = shape_of<C>(dim3(clusters * kShare, kParts, p.groups), kShare, kParts);
  return with_residual(p, columns, 4, [&](auto added) {
    return jax_qmm::launch(submit, shape, wgmma_conv_kernel<C, decltype(added)>, params, added, images, weights);
  });
}

// Whether TMA has its boxes, and each part of K a stage.
template <class C, int kParts>
bool serves(Conv const& p) {
  return suits_im2col(p) && ceil_div(p.channels, C::kTileK) * p.taps[1] * p.taps[2] >= kParts;
}

template <class C, int kShare, int kParts>
void add(std::vector<Instance>& to) {
  std::string const cluster = kShare > 1   ? " cluster " + std::to_string(kShare)
                              : kParts > 1 ? " split-K " + std::to_string(kParts)
                                           : "";
  Instance i{"sm90 wgmma implicit GEMM " + words_of_tile(C::kTileM, C::kTileN, C::kTileK) + cluster + " int8",
             serves<C, kParts>, prepare<C, kShare, kParts>, launch<C, kShare, kParts>, int(sizeof(typename C::Shared))};
  i.tile_m = C::kTileM, i.tile_n = C::kTileN, i.tile_k = C::kTileK, i.stages = C::kStages,
  i.blocks_per_sm = C::kBlocksPerSm;
  i.wgmma = true, i.share = kShare, i.parts = kParts;
  to.push_back(std::move(i));
}

template <class C>
void add_sharing(std::vector<Instance>& to) {
  add<C, 1, 1>(to);
  add<C, 2, 1>(to);
}

template <class C>
void add_split(std::vector<Instance>& to) {
  add<C, 1, 2>(to);
  add<C, 1, 4>(to);
  add<C, 1, 8>(to);
}

}  // namespace

void add_wgmma(std::vector<Instance>& to) {
  add_sharing<Config<128, 64, 64, 2>>(to);
  add_sharing<Config<128, 64, 128, 2>>(to);
  add_split<Config<128, 64, 128, 2>>(to);
  add_sharing<Config<128, 128, 64, 2>>(to);
  add_sharing<Config<128, 128, 128, 2>>(to);
  add_split<Config<128, 128, 128, 2>>(to);
  add_sharing<Config<128, 160, 64, 1>>(to);
  add_sharing<Config<128, 160, 128, 1>>(to);
  add_split<Config<128, 160, 128, 1>>(to);
  add_sharing<Config<128, 256, 128, 1>>(to);
}

}  // namespace jax_qmm::conv
