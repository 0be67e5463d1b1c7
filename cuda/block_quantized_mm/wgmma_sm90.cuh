// Products by Hopper's warpgroup-level tensor cores, of few rows of a or with results that TMA can't write. The sums of
// a block of columns are scaled and added to float32 ones while the tensor cores multiply what comes after in a second
// set of registers.
//
// 64 rows of b go down a tile, and rows of a across: y^T = b a^T, so that few rows of a waste nothing.
//
//   warps        role
//   0 ... 3      multiply, scale, and write the results
//   4            loads a and b by TMA
//   5, 6, 7      copy the terms of four blocks at a time
//
//   mbarrier            arrivals of a phase                     who waits
//   full[stage]         1 and the bytes of what TMA brings      math warps
//   empty[stage]        kMathWarps                              the load warp, from the second turn on
//   terms_full[slot]    those of each of their lanes' copies    math warps
//   terms_empty[slot]   kMathWarps                              the three warps, from the second turn on
//   added               kMathWarps, 1 for the expected bytes,   math warps: the sums of all parts of K are there (one
//                       and the bytes of the parts' sums        phase)
//
// Stages of the last turn are not released: nothing is loaded into them again.
//
// The blocks of a cluster share K, where there are few tiles: each adds up some rows of a from all parts, in their
// order. Of fp8 alone, for int8 results shall be the same bits whatever the kernel.
#pragma once

#include <algorithm>

#include "block_quantized_mm/instances.h"
#include "block_quantized_mm/parts_sm90.cuh"
#include "block_quantized_mm/stages_sm90.cuh"
#include "block_quantized_mm/sum.cuh"
#include "core/async_copy.cuh"
#include "core/cluster.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::block_quantized {

constexpr int kTermsThreads = 96;
constexpr int kMostParts = 2;  // of K; with 4 none was faster on an H200

// `Block`: its columns. `Round`: blocks that are multiplied between two waits, each into sums of its own.
template <DType In, bool ZeroPoints, int Block, int Across, int Round>
struct ConfigSm90 {
  using Element = typename TypesOf<In>::Element;
  using Accumulator = typename TypesOf<In>::Sum;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, Accumulator,
                                 cute::Shape<cute::_64, cute::Int<Across>, cute::Int<kStep>>>()));
  static constexpr DType kIn = In;
  static constexpr bool kZeroPoints = ZeroPoints, kSplitsK = In == DType::kF8E4M3;
  static constexpr int kBlock = Block, kStagesOfBlock = std::max(1, Block / kStep),
                       kStagesOfRound = std::max(1, Round* Block / kStep);
  static constexpr int kAcross = Across, kDown = 64, kRound = Round;
  static constexpr int kMathWarps = 4, kMathThreads = 32 * kMathWarps, kThreads = kMathThreads + 128;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kVectors = ZeroPoints ? 3 : 1;  // of each row: scale, zero point, sums
  static constexpr int kLines = kDown + Across;        // with terms of their own
  static constexpr int kSlots = ZeroPoints ? 3 : 8;
  using Terms = float[kVectors][kLines][kBlocksOfSlot];
  static constexpr int kStageBytes = (kDown + Across) * kStep;
  static constexpr int kStages =
      std::min(20, (227 * 1024 / kBlocksPerSm - 1536 - int(sizeof(Terms)) * kSlots) / kStageBytes);
  struct Shared {
    alignas(1024) uint8_t down[kStages][kDown * kStep];
    alignas(1024) uint8_t across[kStages][Across * kStep];
    alignas(16) Terms terms[kSlots];
    uint64_t full[kStages], empty[kStages], terms_full[kSlots], terms_empty[kSlots], added;
  };
  // Of sums on their way out: the stores of fragments hit distinct banks.
  static constexpr int kPitch = kDown + 4;
  static_assert(kStages >= 2 && (kAcross + kMostParts - 1) * kPitch * 4 <= kStageBytes * kStages);
  static_assert(BlockQuantizedMm::kShared % kDown == 0, "rows of b of a tile share a scale, or none do");
  static_assert(Block >= kStep || (Block == kStep / 2 && (Round == 1 || Round % 2 == 0)));
};

struct ParamsSm90 {
  void* out;
  int m, n;
  int tiles_down, tiles_across;
  int groups;
  Side down, across;
  bool fours;         // whether the terms of four blocks can be loaded at once
  bool stores_whole;  // whether rows of the output start at 16 bytes
  int box_rows;       // of what goes across
  int64_t out_batch_stride;
  VectorArg<float, false> bias;
  OutputArg<true> output;
};

template <int kThreads>
__device__ void sync_math() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Copies the terms of four blocks, by one of the threads that bring them. Behind the last block they become zeros.
template <class C>
__device__ void copy_terms(ParamsSm90 const& p, int thread, int l, int first_down, int first_across, int slot,
                           typename C::Terms& to) {
#pragma unroll
  for (int i = 0; i < (C::kLines + kTermsThreads - 1) / kTermsThreads; ++i) {
    int const line = thread + kTermsThreads * i;
    if (line >= C::kLines) break;
    bool const is_down = line < C::kDown;
    if (!C::kZeroPoints && is_down && line > 0 && p.down.blocks.shares_scales()) continue;
    Side const& side = is_down ? p.down : p.across;
    int const row = is_down ? first_down + line : first_across + line - C::kDown;
    // Zeros beyond the last row, whose terms would be asked for by many threads at once, at one place of L2.
    bool const is_there = row < side.rows;
    int const there = p.groups - slot * kBlocksOfSlot;
    auto const copy = [&](int v, InBlocks::Vector const& vector) {
      uint32_t const four = cute::cast_smem_ptr_to_uint(&to[v][line][0]);
      auto const* const data = reinterpret_cast<uint8_t const*>(vector.at(l, row, p.groups) + slot * kBlocksOfSlot);
      bool const has_data = is_there && vector.data != nullptr;
      if (p.fours) return copy_async<16>(four, data, has_data);
#pragma unroll
      for (int j = 0; j < kBlocksOfSlot; ++j) copy_async<4>(four + 4 * j, data + 4 * j, has_data && j < there);
    };
    copy(0, side.blocks.scale);
    if constexpr (C::kZeroPoints) {
      copy(1, side.blocks.zero_point);
      copy(2, side.blocks.sums);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    wgmma_kernel(ParamsSm90 const p, CUTE_GRID_CONSTANT CUtensorMap const boxes_down,
                 CUTE_GRID_CONSTANT CUtensorMap const boxes_across) {
  using namespace cute;
  using Element = typename C::Element;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kStages = C::kStages, kDown = C::kDown, kAcross = C::kAcross, kMathWarps = C::kMathWarps;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(memory);

  TilePlace const place = place_in_bands(blockIdx.x, p.tiles_across, p.tiles_down);
  int const l = place.l, first_across = place.across * kAcross, first_down = place.down * kDown;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // What is multiplied, of which the last blocks and the end of the last stage may not be there: zeros.
  int const parts = C::kSplitsK ? gridDim.y : 1, part = C::kSplitsK ? blockIdx.y : 0;
  PartOfK const own(p.groups, part, parts);
  int const rounds = (own.blocks - 1) / C::kRound + 1, blocks = rounds * C::kRound;
  int const steps = C::kBlock >= kStep ? blocks * C::kStagesOfBlock : (blocks + 1) / 2;
  int const first_column = own.first_slot * kBlocksOfSlot * C::kBlock;

  if (warp == kMathWarps && elect_one_sync()) {
    prefetch_tma_descriptor(&boxes_down);
    prefetch_tma_descriptor(&boxes_across);
    for (int i = 0; i < min(steps, 2); ++i) {  // of b to L2, by the time the kernel before this one is done
      SM90_TMA_LOAD_3D::PREFETCH::copy(&boxes_down, first_column + i * kStep, first_down, p.down.batched ? l : 0);
    }
    for (int s = 0; s < kStages; ++s) {
      Full::init(&shared.full[s], 1);
      Empty::init(&shared.empty[s], kMathWarps);
    }
    for (int s = 0; s < C::kSlots; ++s) {
      Empty::init(&shared.terms_full[s], kTermsThreads);
      Empty::init(&shared.terms_empty[s], kMathWarps);
    }
    if (C::kSplitsK) Full::init(&shared.added, kMathWarps + 1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  cudaTriggerProgrammaticLaunchCompletion();

  if (warp >= kMathWarps) {
    cudaGridDependencySynchronize();
    if (warp == kMathWarps) {
      if (!elect_one_sync()) return;
      uint64_t const once = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
      uint64_t const again = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);
      Ring<kStages> stage;
      for (int i = 0; i < steps; ++i, stage.advance()) {
        uint64_t* const full = &shared.full[stage.at];
        if (stage.turn > 0) Empty::wait(&shared.empty[stage.at], (stage.turn - 1) & 1);
        Full::arrive_and_expect_tx(full, (kDown + p.box_rows) * kStep);
        int const column = first_column + i * kStep;
        SM90_TMA_LOAD_3D::copy(&boxes_down, full, once, shared.down[stage.at], column, first_down,
                               p.down.batched ? l : 0);
        SM90_TMA_LOAD_3D::copy(&boxes_across, full, again, shared.across[stage.at], column, first_across,
                               p.across.batched ? l : 0);
      }
      return;
    }
    Ring<C::kSlots> slot;
    for (int i = own.first_slot; i < own.end_slot; ++i, slot.advance()) {
      if (slot.turn > 0) Empty::wait(&shared.terms_empty[slot.at], (slot.turn - 1) & 1);
      copy_terms<C>(p, threadIdx.x - C::kMathThreads - 32, l, first_down, first_across, i, shared.terms[slot.at]);
      cutlass::arch::cpasync_barrier_arrive_noinc(&shared.terms_full[slot.at]);
    }
    commit_copies();
    wait_for_copies<0>();
    return;
  }

  typename C::Mma mma;
  auto thread = mma.get_slice(threadIdx.x);
  constexpr int kCount = kAcross / 2;  // sums of a thread
  Tensor one = partition_fragment_C(mma, Shape<Int<kDown>, Int<kAcross>>{});
  static_assert(decltype(size(one))::value == kCount);
  typename C::Accumulator sums[2][C::kRound][kCount];  // one set is multiplied while the other is added
  float total[kCount] = {};
  auto const stages_of = [&](uint8_t* data, auto rows) {
    return make_tensor(
        make_smem_ptr(reinterpret_cast<Element*>(data)),
        tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<decltype(rows), Int<kStep>, Int<kStages>>{}));
  };
  Tensor fragments_down = thread.make_fragment_A(thread.partition_A(stages_of(shared.down[0], Int<kDown>())));
  Tensor fragments_across = thread.make_fragment_B(thread.partition_B(stages_of(shared.across[0], Int<kAcross>())));
  Ring<kStages> stage, free;  // to multiply next, and to release next
  Ring<C::kSlots> slot;
  constexpr bool kEndsWithinStage = C::kRound * C::kBlock < kStep;  // a round: with the first half of a stage
  int half = 0, loaded_again = steps - kStages, of_slot = 0;

  // What moves no use of the sums across the tensor cores' work.
  auto const fence = [&](auto set) {
    Tensor all = make_tensor(make_rmem_ptr(&sums[set][0][0]), Layout<Int<C::kRound * kCount>>{});
    warpgroup_fence_operand(all);
  };
  auto const multiply = [&](auto set) {
    int at[C::kStagesOfRound];
#pragma unroll
    for (int i = 0; i < C::kStagesOfRound; ++i) {
      if (half == 0) Full::wait(&shared.full[stage.at], stage.turn & 1);
      at[i] = stage.at;
      if (!kEndsWithinStage || half == 1) stage.advance();
    }
    fence(set);
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < C::kRound * C::kStagesOfBlock; ++i) {  // a block, or one of its stages
      Tensor acc = make_tensor(make_rmem_ptr(sums[set][i / C::kStagesOfBlock]), one.layout());
      if (i % C::kStagesOfBlock == 0) mma.accumulate_ = GMMA::ScaleOut::Zero;
      int const from = C::kBlock >= kStep ? 0 : kEndsWithinStage ? 2 * half : 2 * (i % 2);
#pragma unroll
      for (int k = 0; k < std::min(C::kBlock, kStep) / 32; ++k) {
        int const of = at[C::kBlock >= kStep ? i : i / 2];
        gemm(mma, fragments_down(_, _, from + k, of), fragments_across(_, _, from + k, of), acc);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
    }
    if (kEndsWithinStage) half ^= 1;
    warpgroup_commit_batch();
  };
  // The stages of the round before, once the tensor cores are done with them. Only what is loaded into again.
  auto const release = [&] {
#pragma unroll
    for (int i = 0; i < C::kStagesOfRound; ++i, --loaded_again, free.advance()) {
      if (loaded_again > 0 && lane == 0) Empty::arrive(&shared.empty[free.at]);
    }
  };
  int const row = 16 * warp + lane / 4;
  bool const shares_down = !C::kZeroPoints && p.down.blocks.shares_scales();
  int const lines[] = {shares_down ? 0 : row, shares_down ? 0 : row + 8};  // that have the terms
  auto const add_block = [&](auto const& term, auto const& of_block) {
    float of_b[C::kVectors][2];
#pragma unroll
    for (int v = 0; v < C::kVectors; ++v) of_b[v][0] = term(v, lines[0]), of_b[v][1] = term(v, lines[1]);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      float of_a[C::kVectors][2];
#pragma unroll
      for (int v = 0; v < C::kVectors; ++v) {
#pragma unroll
        for (int h = 0; h < 2; ++h) of_a[v][h] = term(v, kDown + 8 * j + lane % 4 * 2 + h);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        auto const a = [&](int v) { return of_a[v][c % 2]; };
        auto const b = [&](int v) { return of_b[v][c / 2]; };
        total[4 * j + c] = add_scaled<C::kZeroPoints>(total[4 * j + c], float(of_block[4 * j + c]), a, b);
      }
    }
  };
  auto const add_round = [&](auto set) {
    fence(set);
#pragma unroll
    for (int r = 0; r < C::kRound; ++r) {
      if (of_slot == 0) {
        Empty::wait(&shared.terms_full[slot.at], slot.turn & 1);
        asm volatile("" ::: "memory");  // to the compiler, the wait alone changes no memory
      }
      auto const term = [&, terms = &shared.terms[slot.at][0][0][of_slot]](int v, int line) {
        return terms[(v * C::kLines + line) * kBlocksOfSlot];
      };
      add_block(term, sums[set][r]);
      if (++of_slot == kBlocksOfSlot) {
        __syncwarp();
        if (elect_one_sync()) Empty::arrive(&shared.terms_empty[slot.at]);
        of_slot = 0, slot.advance();
      }
    }
  };
  auto const step = [&](auto now, auto next) {
    bool const ended = half == 0;  // with a stage, as the next one may not
    multiply(next);
    warpgroup_wait<1>();
    if (ended) release();
    add_round(now);
  };
  auto const last = [&](auto now) {
    warpgroup_wait<0>();
    add_round(now);
  };
  alternate(rounds, multiply, step, last);

  // The sums take the place of the stages, in which no more data arrive: results side by side are of one row.
  auto* const sums_of_tile = reinterpret_cast<float*>(memory);  // [parts][rows of a part][kPitch]
  int const rows_of_part = (kAcross + parts - 1) / parts, first_row = part * rows_of_part;
  int const tile_m = min(kAcross, p.m - first_across), rows = max(0, min(rows_of_part, tile_m - first_row));
  auto const each_sum = [&](auto use) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      use(i / 4 * 8 + lane % 4 * 2 + i % 2, row + i / 2 % 2 * 8, total[i]);
    }
  };
  if (parts == 1) {
    sync_math<C::kMathThreads>();
    each_sum([&](int across, int down, float sum) { sums_of_tile[across * C::kPitch + down] = sum; });
    sync_math<C::kMathThreads>();
  } else {
    if (threadIdx.x == 0) Full::arrive_and_expect_tx(&shared.added, parts * rows * kDown * 4);
    __syncwarp();
    sync_cluster();  // other blocks may be at their stages
    each_sum([&](int across, int down, float sum) {
      if (across >= tile_m) return;
      int const adder = across / rows_of_part, of_adder = across - adder * rows_of_part;
      float* const to = &sums_of_tile[(part * rows_of_part + of_adder) * C::kPitch + down];
      store_shared_remote(__float_as_uint(sum), cast_smem_ptr_to_uint(to), cast_smem_ptr_to_uint(&shared.added), adder);
    });
    __syncwarp();
    if (elect_one_sync()) Full::arrive(&shared.added);
    Full::wait(&shared.added, 0);
    asm volatile("" ::: "memory");  // to the compiler, the wait alone changes no memory
  }
  cudaGridDependencySynchronize();  // the bias is next
  FullOutput const output = p.output.at(l);
  auto const write = [&](auto bits) {
    using Bits = decltype(bits);
    constexpr int kEach = 16 / sizeof(Bits), kThreadsOfRow = kDown / kEach;
    int const column = threadIdx.x % kThreadsOfRow * kEach, n = first_down + column, columns = min(kEach, p.n - n);
    if (columns <= 0) return;
    float bias[kEach] = {};
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j < columns) bias[j] = p.bias.load(l, n + j);
    }
    for (int m = threadIdx.x / kThreadsOfRow; m < rows; m += C::kMathThreads / kThreadsOfRow) {
      float values[kEach] = {};
      for (int of = 0; of < parts; ++of) {
        float const* const sums = &sums_of_tile[(of * rows_of_part + m) * C::kPitch + column];
#pragma unroll
        for (int j = 0; j < kEach; j += 4) {
          float4 const four = *reinterpret_cast<float4 const*>(sums + j);
          values[j] += four.x, values[j + 1] += four.y, values[j + 2] += four.z, values[j + 3] += four.w;
        }
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) values[j] += bias[j];
      int64_t const row = first_across + first_row + m;
      auto* const to = static_cast<Bits*>(p.out) + l * p.out_batch_stride + row * p.n + n;
      if (p.stores_whole) {
        *reinterpret_cast<uint4*>(to) = output.template round<uint4, kEach>(values, values);
      } else {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          if (j < columns) to[j] = output.template round_one<Bits>(values[j], values[j]);
        }
      }
    }
  };
  if (bytes_of(output.dtype) == 2) {
    write(BitsOf<2>());
  } else {
    write(BitsOf<4>());
  }
}

// Blocks of a cluster come to one SM if they can, while others have none: with so much memory they can't.
template <class C, int kParts>
LaunchShape shape_of(unsigned tiles, bool alone) {
  constexpr size_t kBytes = sizeof(typename C::Shared), kOfAll = 228 * 1024;
  size_t const bytes = alone ? std::max(kBytes, kOfAll / 2) : kBytes;
  return {dim3(tiles, kParts), C::kThreads, bytes, dim3(1, kParts)};
}

template <class C, int kParts>
cudaError_t prepare_wgmma(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(wgmma_kernel<C>), shape_of<C, kParts>(1, C::kSplitsK), fits);
}

template <class C, int kParts>
cudaError_t launch_wgmma(BlockQuantizedMm const& problem, Submit const& submit) {
  ParamsSm90 p{};
  p.out = problem.out, p.out_batch_stride = problem.out_batch_stride;
  p.m = problem.m, p.n = problem.n, p.groups = problem.groups();
  p.down = {p.n, problem.of_b, problem.b_batch_stride != 0},
  p.across = {p.m, problem.of_a, problem.a_batch_stride != 0};
  p.tiles_down = int(ceil_div(p.n, C::kDown)), p.tiles_across = int(ceil_div(p.m, C::kAcross));
  p.fours = has_fours(problem), p.stores_whole = problem.stores_whole();
  p.box_rows = std::min(C::kAcross, p.m);
  auto const epilogue = epilogue_args<true>(problem);
  p.bias = epilogue.bias, p.output = epilogue.output;

  CUtensorMap boxes_down, boxes_across;
  auto const make = [&](Side const& side, void const* data, int box_rows, CUtensorMap& boxes) {
    return make_boxes(data, problem.k, side.rows, side.batched ? problem.batch : 1, box_rows, boxes);
  };
  cudaError_t error = make(p.down, problem.b, C::kDown, boxes_down);
  if (error == cudaSuccess) error = make(p.across, problem.a, p.box_rows, boxes_across);
  if (error != cudaSuccess) return error;
  unsigned const tiles = p.tiles_across * p.tiles_down * problem.batch;
  Gpu const* gpu;
  if ((error = current_gpu(gpu))) return error;
  LaunchShape const shape = shape_of<C, kParts>(tiles, kParts > 1 && tiles * kParts <= unsigned(gpu->sm_count));
  return jax_qmm::launch(submit, shape, wgmma_kernel<C>, p, boxes_down, boxes_across);
}

template <class C, int kParts>
Instance instance() {
  Instance i{};
  i.in = C::kIn, i.zero_points = C::kZeroPoints;
  i.shortest = i.longest = C::kBlock;
  i.tile_m = C::kAcross, i.tile_n = C::kDown, i.stages = C::kStages, i.threads = C::kThreads;
  i.blocks_per_sm = C::kBlocksPerSm, i.shared_bytes = sizeof(typename C::Shared);
  i.wgmma = true, i.parts = kParts;
  i.prepare = prepare_wgmma<C, kParts>, i.launch = launch_wgmma<C, kParts>;
  return i;
}

template <DType In, bool kZeroPoints>
void add_wgmma_instances(std::vector<Instance>& to) {
  auto const add_parts = [&](auto config) {
    using C = decltype(config);
    to.push_back(instance<C, 1>());
    if constexpr (C::kSplitsK) to.push_back(instance<C, kMostParts>());
  };
  auto const add = [&](auto block) {
    constexpr int kBlock = block;
    add_parts(ConfigSm90<In, kZeroPoints, kBlock, 16, kBlock == 256 ? 2 : 4>());
    add_parts(ConfigSm90<In, kZeroPoints, kBlock, 32, kBlock == 128 ? 2 : 1>());
    add_parts(ConfigSm90<In, kZeroPoints, kBlock, 64, 1>());
  };
  add(std::integral_constant<int, 64>());
  add(std::integral_constant<int, 128>());
  add(std::integral_constant<int, 256>());
}

}  // namespace jax_qmm::block_quantized
