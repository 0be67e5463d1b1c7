// Products with many rows by Hopper's warpgroup-level tensor cores, y = a b^T in tiles of 128 x 128. Blocks stay, one
// on each SM, and take one tile after the other: the next one is loaded while the results of this one are written, by
// TMA.
//
// The sums of a block of columns are scaled and added to float32 ones while the tensor cores multiply the next block
// into a second set of registers.
//
//   warps        role
//   0 ... 7      two warpgroups, each of 64 rows of a: multiply, scale, and write the results
//   8            loads a and b by TMA
//   9, 10        bring the terms of four blocks at a time; the last one has no work
//
//   mbarrier            arrivals of a phase                     who waits
//   full[stage]         1 and the bytes of what TMA brings      math warps
//   empty[stage]        kMathWarps of each block of a cluster   the load warp, from the second turn on
//   terms_full[slot]    kTermsThreads                           math warps
//   terms_empty[slot]   kMathWarps                              the terms' warps, from the second turn on
//
// Where tiles are few, the blocks of a cluster share K of one tile: each adds up and writes a part of it, whose sums it
// has from all, in their order. Of fp8 alone, for int8 results shall be the same bits whatever the kernel.
//
// Else the blocks of a cluster have neighbouring rows of a and share b, of which each loads some rows for all of them.
// Stages of the last turn are not released, as blocks that are done may have exited.
//
// Shared memory is what bounds it: of 128 bytes a cycle, a tile's step of 128 columns takes 128 cycles for the tensor
// cores to read a, 256 for b, which both warpgroups read, 256 for TMA to write both, and 256 for each vector of b's
// terms, where each thread reads those of 32 rows; products take 512.
#pragma once

#include <algorithm>

#include "block_quantized_mm/instances.h"
#include "block_quantized_mm/parts_sm90.cuh"
#include "block_quantized_mm/stages_sm90.cuh"
#include "block_quantized_mm/sum.cuh"
#include "block_quantized_mm/terms_sm90.cuh"
#include "core/boxes.cuh"
#include "core/cluster.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::block_quantized {

constexpr int kMostPartsOfTile = 4;  // of K

// `OfA`, `OfB`: zero points of a, and of b. `Share`: blocks of a cluster that share b. `SharedB`: 128 rows of b share
// their scales. `SplitsK`: the blocks of a cluster, up to four, share K.
template <DType In, bool OfA, bool OfB, int Block, int Share = 1, bool SharedB = false, bool SplitsK = false>
struct PersistentSm90 {
  using Element = typename TypesOf<In>::Element;
  using Sum = typename TypesOf<In>::Sum;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, Sum, cute::Shape<cute::_64, cute::_128, cute::Int<kStep>>>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  static constexpr DType kIn = In;
  static constexpr bool kOfA = OfA, kOfB = OfB, kSharedB = SharedB, kSplitsK = SplitsK;
  static constexpr int kBlock = Block, kShare = Share, kTile = 128;
  static constexpr int kMathWarps = 8, kMathThreads = 256, kTermsThreads = 64, kThreads = 384;
  static constexpr int kMathRegisters = 232, kOtherRegisters = 40;  // 504 for three warpgroups
  // Of each row: the scale; of a its zero point, of b its sum; the other way around.
  static constexpr int kVectors = 1 + OfA + OfB;
  // The terms of b's rows stand so that a thread's are side by side, and its neighbours' in other banks.
  static constexpr int kOfThread = kTile / 4 + 4, kLines = kTile + (SharedB ? 4 : 4 * kOfThread);
  static constexpr int kSlots = kVectors == 1 ? 4 : 2;
  using Terms = float[kVectors][kBlocksOfSlot][kLines];
  static constexpr int kBoxBytes = 64 * kStep;  // of results: 64 rows of a warpgroup
  static constexpr int kBoxRows = 32;           // of a
  static constexpr int kStageBytes = 2 * kTile * kStep;
  static constexpr int kStages = (227 * 1024 - 2048 - 2 * kBoxBytes - int(sizeof(Terms)) * kSlots) / kStageBytes;
  struct Shared {
    alignas(1024) uint8_t a[kStages][kTile * kStep];
    alignas(1024) uint8_t b[kStages][kTile * kStep];
    alignas(1024) uint8_t out[2][kBoxBytes];
    alignas(16) Terms terms[kSlots];
    uint64_t full[kStages], empty[kStages], terms_full[kSlots], terms_empty[kSlots];
  };
  static_assert(!SplitsK ||
                (Share == 1 && Block == kStep && kMostPartsOfTile * kTile * kTile / 2 * 4 <= kStages * kStageBytes));
  static_assert(kStages >= 4 && Block >= kStep / 2 && (OfA || !OfB) && !(SharedB && OfA));

  // Where the term of a row of b stands.
  __device__ static int line_of(int row) { return kTile + row % 8 / 2 * kOfThread + row / 8 * 2 + row % 2; }
};

struct PersistentParams {
  int n, groups;
  int rounds;  // of a tile: blocks, of whole stages
  int tiles_across, clusters_down, clusters;
  Side a, b;
  bool fours;  // whether the terms of four blocks can be loaded at once
  VectorArg<float, false> bias;
  OutputArg<true> output;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    persistent_kernel(PersistentParams const p, CUTE_GRID_CONSTANT CUtensorMap const boxes_a,
                      CUTE_GRID_CONSTANT CUtensorMap const boxes_b, CUTE_GRID_CONSTANT CUtensorMap const boxes_out) {
  using namespace cute;
  using Element = typename C::Element;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kStages = C::kStages, kShare = C::kShare, kTile = C::kTile, kMathWarps = C::kMathWarps;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(memory);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % kShare;
  int const first = blockIdx.x / kShare, stride = gridDim.x / kShare;
  auto const tile_of = [&](int cluster) {
    TilePlace const place = place_in_bands(cluster, p.tiles_across, p.clusters_down);
    return Tile{place.l, (place.down * kShare + rank) * kTile, place.across * kTile};
  };
  int const parts = C::kSplitsK ? gridDim.y : 1, part = C::kSplitsK ? blockIdx.y : 0;
  PartOfK const own(p.rounds, part, parts);
  int const steps = own.blocks * C::kBlock / kStep, first_column = own.first_slot * (kBlocksOfSlot * C::kBlock);
  auto const each_tile = [&](auto f) {
    for (int cluster = first; cluster < p.clusters; cluster += stride) f(tile_of(cluster));
  };

  if (warp == kMathWarps && elect_one_sync()) {
    prefetch_tma_descriptor(&boxes_a);
    prefetch_tma_descriptor(&boxes_b);
    prefetch_tma_descriptor(&boxes_out);
    Tile const at = tile_of(first);
    for (int i = 0; i < min(steps, 2); ++i) {  // of b to L2, by the time the kernel before this one is done
      SM90_TMA_LOAD_3D::PREFETCH::copy(&boxes_b, first_column + i * kStep, at.first_n + rank * (kTile / kShare),
                                       p.b.batched ? at.l : 0);
    }
    for (int s = 0; s < kStages; ++s) {
      Full::init(&shared.full[s], 1);
      Empty::init(&shared.empty[s], kShare * kMathWarps);
    }
    for (int s = 0; s < C::kSlots; ++s) {
      Empty::init(&shared.terms_full[s], C::kTermsThreads);
      Empty::init(&shared.terms_empty[s], kMathWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (kShare > 1) {
    sync_cluster();
  } else {
    __syncthreads();
  }
  cudaTriggerProgrammaticLaunchCompletion();

  if (warp >= kMathWarps) {
    cutlass::arch::warpgroup_reg_dealloc<C::kOtherRegisters>();
    cudaGridDependencySynchronize();
    if (warp == kMathWarps) {
      if (!elect_one_sync()) return;
      uint64_t const again = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);
      constexpr int kRowsB = kTile / kShare;
      Ring<kStages> stage;
      BoxesOfTile<kStages, kTile / C::kBoxRows> boxes;
      each_tile([&](Tile const& at) {
        boxes.start((max(p.a.rows - at.first_m, 0) + C::kBoxRows - 1) / C::kBoxRows, steps);
#pragma unroll 1
        for (int i = 0; i < steps; ++i, stage.advance()) {
          int const column = first_column + i * kStep;
          uint64_t* const full = &shared.full[stage.at];
          if (stage.turn > 0) Empty::wait(&shared.empty[stage.at], (stage.turn - 1) & 1);
          int const rows = boxes.count(i) * C::kBoxRows;
          Full::arrive_and_expect_tx(full, (rows + kTile) * kStep);
          for (int row = 0; row < rows; row += C::kBoxRows) {
            SM90_TMA_LOAD_3D::copy(&boxes_a, full, again, shared.a[stage.at] + row * kStep, column, at.first_m + row,
                                   p.a.batched ? at.l : 0);
          }
          auto* const to = shared.b[stage.at] + rank * kRowsB * kStep;
          int const row = at.first_n + rank * kRowsB, entry = p.b.batched ? at.l : 0;
          if constexpr (kShare > 1) {
            SM90_TMA_LOAD_MULTICAST_3D::copy(&boxes_b, full, uint16_t((1 << kShare) - 1), again, to, column, row,
                                             entry);
          } else {
            SM90_TMA_LOAD_3D::copy(&boxes_b, full, again, to, column, row, entry);
          }
        }
      });
      return;
    }
    int const thread = threadIdx.x - C::kMathThreads - 32;
    if (thread >= C::kTermsThreads) return;
    Ring<C::kSlots> slot;
    each_tile([&](Tile const& at) {
      RowsOfThread<C> const rows(p.a, p.b, p.groups, at, thread);
#pragma unroll 1
      for (int i = own.first_slot; i < own.end_slot; ++i, slot.advance()) {
        if (slot.turn > 0) Empty::wait(&shared.terms_empty[slot.at], (slot.turn - 1) & 1);
        asm volatile("" ::: "memory");  // to the compiler, the wait alone changes no memory
        int const first = i * kBlocksOfSlot;
        bring_terms<C>(rows, first, p.groups - first, p.fours, shared.terms[slot.at]);
        asm volatile("" ::: "memory");  // nor does the arrival keep stores before it
        Empty::arrive(&shared.terms_full[slot.at]);
      }
    });
    return;
  }

  cutlass::arch::warpgroup_reg_alloc<C::kMathRegisters>();
  typename C::Mma mma;
  auto thread = mma.get_slice(threadIdx.x);
  constexpr int kCount = kTile / 2;  // sums of a thread
  Tensor one = partition_fragment_C(mma, Shape<Int<kTile>, Int<kTile>>{});
  static_assert(decltype(size(one))::value == kCount);
  typename C::Sum sums[2][kCount];  // one set is multiplied while the other is added
  float total[kCount] = {};
  auto const stages_of = [&](uint8_t* data) {
    return make_tensor(
        make_smem_ptr(reinterpret_cast<Element*>(data)),
        tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kTile>, Int<kStep>, Int<kStages>>{}));
  };
  Tensor fragments_a = thread.make_fragment_A(thread.partition_A(stages_of(shared.a[0])));
  Tensor fragments_b = thread.make_fragment_B(thread.partition_B(stages_of(shared.b[0])));
  constexpr int kStagesOfBlock = std::max(1, C::kBlock / kStep);
  constexpr bool kHalves = C::kBlock < kStep;  // blocks are halves of a stage
  Ring<kStages> stage, free;                   // to multiply next, and to release next
  Ring<C::kSlots> slot;
  int half = 0, of_slot = 0;
  int loaded_again = ((p.clusters - 1 - first) / stride + 1) * steps - kStages;

  // What moves no use of the sums across the tensor cores' work.
  auto const fence = [&](auto set) {
    Tensor all = make_tensor(make_rmem_ptr(sums[set]), Layout<Int<kCount>>{});
    warpgroup_fence_operand(all);
  };
  auto const multiply = [&](auto set) {
    int at[kStagesOfBlock];
#pragma unroll
    for (int i = 0; i < kStagesOfBlock; ++i) {
      if (half == 0) Full::wait(&shared.full[stage.at], stage.turn & 1);
      at[i] = stage.at;
      if (!kHalves || half == 1) stage.advance();
    }
    fence(set);
    warpgroup_arrive();
    Tensor acc = make_tensor(make_rmem_ptr(sums[set]), one.layout());
    mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
    for (int i = 0; i < kStagesOfBlock; ++i) {
      int const from = kHalves ? 2 * half : 0;
#pragma unroll
      for (int k = 0; k < std::min(C::kBlock, kStep) / 32; ++k) {
        gemm(mma, fragments_a(_, _, from + k, at[i]), fragments_b(_, _, from + k, at[i]), acc);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
    }
    if (kHalves) half ^= 1;
    warpgroup_commit_batch();
  };
  // The stages of the block before, once the tensor cores are done with them. Only what is loaded into again.
  auto const release = [&] {
#pragma unroll
    for (int i = 0; i < kStagesOfBlock; ++i, --loaded_again, free.advance()) {
      if (loaded_again > 0 && lane < kShare) Empty::arrive(&shared.empty[free.at], kShare > 1 ? lane : part, true);
    }
  };
  auto const release_terms = [&] {
    __syncwarp();
    if (elect_one_sync()) Empty::arrive(&shared.terms_empty[slot.at]);
    of_slot = 0, slot.advance();
  };
  int const row = 16 * warp + lane / 4;
  auto const add = [&](auto set) {
    fence(set);
    if (of_slot == 0) {
      Empty::wait(&shared.terms_full[slot.at], slot.turn & 1);
      asm volatile("" ::: "memory");  // to the compiler, the wait alone changes no memory
    }
    float const* const terms = shared.terms[slot.at][0][of_slot];
    auto const of_vector = [&](int v) { return terms + v * (kBlocksOfSlot * C::kLines); };
    if constexpr (C::kSharedB) {
      float const of_b = terms[kTile], scales[] = {terms[row] * of_b, terms[row + 8] * of_b};
#pragma unroll
      for (int i = 0; i < kCount; ++i) total[i] = fmaf(scales[i / 2 % 2], float(sums[set][i]), total[i]);
    } else {
      float of_a[C::kVectors][2];
#pragma unroll
      for (int v = 0; v < C::kVectors; ++v) of_a[v][0] = of_vector(v)[row], of_a[v][1] = of_vector(v)[row + 8];
#pragma unroll
      for (int j = 0; j < kCount; j += 8) {  // two rows of a by four of b
        float4 of_b[C::kVectors];
#pragma unroll
        for (int v = 0; v < C::kVectors; ++v) {
          of_b[v] = *reinterpret_cast<float4 const*>(&of_vector(v)[kTile + lane % 4 * C::kOfThread + j / 2]);
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          auto const a = [&](int v) { return of_a[v][c / 2 % 2]; };
          auto const b = [&](int v) {
            float4 const& four = of_b[(3 - v) % 3];  // whose sums stand before its zero points
            return c / 4 == 0 ? (c % 2 == 0 ? four.x : four.y) : c % 2 == 0 ? four.z : four.w;
          };
          total[j + c] = add_scaled<C::kOfA, C::kOfB>(total[j + c], float(sums[set][j + c]), a, b);
        }
      }
    }
    if (++of_slot == kBlocksOfSlot) release_terms();
  };

  // Adds the bias, applies the activation, and writes a tile.
  int const group = warp / 4;
  QuartersOfTile const quarters{part, parts};
  auto const writes = [&](int half) { return !C::kSplitsK || quarters.is_own(group, half); };
  bool const leads = threadIdx.x % 128 == 0;
  auto const sync_group = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
  auto const write = [&](Tile const& tile) {
    p.bias.with_data([&](auto const* bias) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int const n = min(tile.first_n + i * 2 + lane % 4 * 2 + h, p.n - 1);
          float const value = float(bias[tile.l * p.bias.batch_stride + n * p.bias.stride]);
          total[i + h] += value, total[i + 2 + h] += value;
        }
      }
    });
    if (p.output.activation != Activation::kNone) {
      FullOutput output = p.output.at(tile.l);
      output.dtype = DType::kF32;
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        float values[] = {total[i], total[i + 1], total[i + 2], total[i + 3]};
        uint4 const bits = output.template round<uint4, 4>(values, values);
        total[i] = __uint_as_float(bits.x), total[i + 1] = __uint_as_float(bits.y);
        total[i + 2] = __uint_as_float(bits.z), total[i + 3] = __uint_as_float(bits.w);
      }
    }
    // By boxes, of rows of 128 bytes.
    uint8_t* const box = shared.out[group];
    auto const each_box = [&](auto columns, auto fill) {
      constexpr int kColumns = columns;
#pragma unroll
      for (int column = 0; column < kTile; column += kColumns) {
        if (!writes(column / (kTile / 2))) continue;
        if (leads) tma_store_wait<0>();
        sync_group();
        fill(&total[column / 2]);
        cutlass::arch::fence_view_async_shared();
        sync_group();
        if (!leads) continue;
        SM90_TMA_STORE_3D::copy(&boxes_out, box, tile.first_n + column, tile.first_m + 64 * group, tile.l);
        tma_store_arrive();
      }
    };
    if (bytes_of(p.output.dtype) == 2) {
      // Lane 8 i + r has the place of row r of matrix i, of four: rows 0 and 8 of columns 0, then of columns 8.
      int const line = (16 * (warp % 4) + lane / 8 % 2 * 8 + lane % 8) * kStep;
      each_box(Int<64>(), [&](float const* from) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          uint32_t pairs[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float const* const two = &from[4 * (j + i / 2) + 2 * (i % 2)];
            pairs[i] = PlainOutput{p.output.dtype}.round<uint32_t, 2>(two, two);
          }
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                           cast_smem_ptr_to_uint(box + line + (j + lane / 16 ^ lane % 8) * 16)),
                       "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                       : "memory");
        }
      });
    } else {
      each_box(Int<32>(), [&](float const* from) {
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
          int const chunk = i / 4 * 2 + lane % 4 / 2, r = row % 64 + i / 2 % 2 * 8;
          *reinterpret_cast<float2*>(box + r * kStep + (chunk ^ r % 8) * 16 + lane % 2 * 8) =
              make_float2(from[i], from[i + 1]);
        }
      });
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] = 0;
  };

  cudaGridDependencySynchronize();  // a bias is read later, and results overwrite what others may read
  auto const step = [&](auto now, auto next) {
    bool const ended = half == 0;  // with a stage, as the next one may not
    multiply(next);
    warpgroup_wait<1>();
    if (ended) release();
    add(now);
  };
  auto const last = [&](auto now) {
    warpgroup_wait<0>();
    release();
    add(now);
  };
  each_tile([&](Tile const& tile) {
    alternate(own.blocks, multiply, step, last);
    if (of_slot > 0) release_terms();
    if constexpr (C::kSplitsK) {
      quarters.add(total, group, memory);  // in place of stages
      if (!writes(0) && !writes(1)) return;
    }
    write(tile);
  });
  if (leads) tma_store_wait<0>();
}

template <class C, int kParts>
LaunchShape shape_of_persistent(unsigned blocks) {
  return {dim3(blocks, kParts), C::kThreads, sizeof(typename C::Shared), dim3(C::kShare, kParts)};
}

template <class C, int kParts>
cudaError_t prepare_persistent(bool& fits) {
  LaunchShape const shape = shape_of_persistent<C, kParts>(C::kShare);
  return prepare_kernel(reinterpret_cast<void const*>(persistent_kernel<C>), shape, fits);
}

template <class C, int kParts>
cudaError_t launch_persistent(BlockQuantizedMm const& problem, Submit const& submit) {
  Gpu const* gpu;
  if (cudaError_t const error = current_gpu(gpu)) return error;
  PersistentParams p{};
  p.n = problem.n, p.groups = problem.groups();
  p.rounds = C::kBlock < kStep ? p.groups + p.groups % 2 : p.groups;  // whole stages
  p.a = {problem.m, problem.of_a, problem.a_batch_stride != 0}, p.b = {p.n, problem.of_b, problem.b_batch_stride != 0};
  p.tiles_across = int(ceil_div(p.n, C::kTile)), p.clusters_down = int(ceil_div(problem.m, C::kTile * C::kShare));
  p.clusters = p.tiles_across * p.clusters_down * problem.batch;
  p.fours = has_fours(problem);
  auto const epilogue = epilogue_args<true>(problem);
  p.bias = epilogue.bias, p.output = epilogue.output;

  CUtensorMap boxes_a, boxes_b, boxes_out;
  cudaError_t error =
      make_boxes(problem.a, problem.k, problem.m, p.a.batched ? problem.batch : 1, C::kBoxRows, boxes_a);
  if (error == cudaSuccess) {
    error = make_boxes(problem.b, problem.k, p.n, p.b.batched ? problem.batch : 1, C::kTile / C::kShare, boxes_b);
  }
  if (error != cudaSuccess) return error;
  error = make_boxes_of_results(problem, boxes_out);
  if (error != cudaSuccess) return error;
  // Blocks with a part of K have one tile.
  int const at_once = kParts > 1 ? p.clusters : gpu->sms_in_clusters(C::kShare) / C::kShare;
  unsigned const blocks = unsigned(std::min(p.clusters, at_once) * C::kShare);
  return jax_qmm::launch(submit, shape_of_persistent<C, kParts>(blocks), persistent_kernel<C>, p, boxes_a, boxes_b,
                         boxes_out);
}

template <class C, int kParts = 1>
Instance persistent_instance() {
  static_assert(C::kSplitsK == (kParts > 1) && kParts <= kMostPartsOfTile);
  Instance i{};
  i.in = C::kIn, i.zero_points = C::kOfA, i.of_a_alone = C::kOfA && !C::kOfB;
  i.shortest = i.longest = C::kBlock;
  i.tile_m = i.tile_n = C::kTile, i.stages = C::kStages, i.threads = C::kThreads;
  i.blocks_per_sm = 1, i.shared_bytes = sizeof(typename C::Shared);
  i.wgmma = i.persistent = true, i.shared_b = C::kSharedB, i.share = C::kShare, i.parts = kParts;
  i.prepare = prepare_persistent<C, kParts>, i.launch = launch_persistent<C, kParts>;
  return i;
}

// With zero points of either side, or without.
template <DType In, bool OfA, bool OfB>
void add_of_blocks(std::vector<Instance>& to) {
  to.push_back(persistent_instance<PersistentSm90<In, OfA, OfB, 64>>());
  to.push_back(persistent_instance<PersistentSm90<In, OfA, OfB, 128>>());
  to.push_back(persistent_instance<PersistentSm90<In, OfA, OfB, 256>>());
}

}  // namespace jax_qmm::block_quantized
