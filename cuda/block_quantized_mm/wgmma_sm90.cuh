// Products by Hopper's warpgroup-level tensor cores. The sums of a block of columns are scaled and added to float32
// ones while the tensor cores multiply what comes after: for the other warpgroup, or for this one in a second set of
// registers.
//
// One operand's rows go down a tile, 64 for each warpgroup, and the other's across. That is y^T = b a^T, so that few
// rows of a waste nothing. Where rows of b share their scales it is y = a b^T: a thread has sums of two rows and of a
// quarter of the columns, and what a column has of its own it would read from shared memory for each of them, at the
// tensor cores' cost.
//
//   warps                          role
//   0 ... kMathWarps-1             warpgroups of 64 rows each: multiply, scale, and write the results
//   kMathWarps                     loads a and b by TMA
//   kMathWarps + 1, + 2, + 3       copy the terms of four blocks at a time
//
//   mbarrier            arrivals of a phase                     who waits
//   full[stage]         1 and the bytes of what TMA brings      math warps
//   empty[stage]        kMathWarps of each block of a cluster   the load warp, from the second turn on
//   terms_full[slot]    those of each of their lanes' copies    math warps
//   terms_empty[slot]   kMathWarps                              the three warps, from the second turn on
//
// The blocks of a cluster share what goes across, of which each loads some rows for all of them. Stages of the last
// turn are not released, as blocks that are done may have exited.
#pragma once

#include <algorithm>

#include "block_quantized_mm/instances.h"
#include "block_quantized_mm/sum.cuh"
#include "core/async_copy.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::block_quantized {

constexpr int kStep = 128;        // columns of a stage, the span of TMA's swizzle
constexpr int kBlocksOfSlot = 4;  // whose terms come together
constexpr int kTermsThreads = 96;

// `Block`: its columns. `Round`: blocks that are multiplied between two waits, each into sums of its own. `SharedB`:
// for rows of b that share their scales as far as a tile reaches.
template <DType In, bool ZeroPoints, int Block, int Across, int Groups, int Round, int BlocksPerSm,
          bool SharedB = false>
struct ConfigSm90 {
  using Element = std::conditional_t<In == DType::kS8, int8_t, cutlass::float_e4m3_t>;
  using Accumulator = std::conditional_t<In == DType::kS8, int32_t, float>;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, Accumulator,
                                 cute::Shape<cute::_64, cute::Int<Across>, cute::Int<kStep>>>(),
      cute::Layout<cute::Shape<cute::Int<Groups>, cute::_1, cute::_1>>{}));
  static constexpr DType kIn = In;
  static constexpr bool kZeroPoints = ZeroPoints;
  static constexpr int kBlock = Block, kStagesOfBlock = std::max(1, Block / kStep),
                       kStagesOfRound = std::max(1, Round* Block / kStep);
  static constexpr int kAcross = Across, kDown = 64 * Groups, kRound = Round;
  static constexpr bool kSharedB = SharedB;
  static constexpr int kTileM = SharedB ? kDown : kAcross, kTileN = SharedB ? kAcross : kDown;
  static constexpr int kMathWarps = 4 * Groups, kMathThreads = 32 * kMathWarps, kThreads = kMathThreads + 128;
  static constexpr int kBlocksPerSm = BlocksPerSm;
  // Where math warps need more registers than there are for each.
  static constexpr bool kMovesRegisters = Groups == 2;
  static constexpr int kMathRegisters = 232, kOtherRegisters = 40;  // 504 for three warpgroups
  static constexpr int kVectors = ZeroPoints ? 3 : 1;               // of each row: scale, zero point, sums
  static constexpr int kLines = kDown + (SharedB ? 1 : Across);     // with terms of their own
  static constexpr int kSlots = ZeroPoints ? 3 : Groups == 1 ? 8 : 4;
  using Terms = float[kVectors][kLines][kBlocksOfSlot];
  static constexpr int kStageBytes = (kDown + Across) * kStep;
  static constexpr int kStages =
      std::min(20, (227 * 1024 / BlocksPerSm - 1536 - int(sizeof(Terms)) * kSlots) / kStageBytes);
  struct Shared {
    alignas(1024) uint8_t down[kStages][kDown * kStep];
    alignas(1024) uint8_t across[kStages][Across * kStep];
    alignas(16) Terms terms[kSlots];
    uint64_t full[kStages], empty[kStages], terms_full[kSlots], terms_empty[kSlots];
  };
  // Of sums on their way out: the stores of fragments hit distinct banks.
  static constexpr int kPitch = kTileN + (SharedB ? 8 : 4);
  static_assert(kStages >= 2 && kTileM * kPitch * 4 <= kStageBytes * kStages && !(SharedB && ZeroPoints));
  static_assert(Block >= kStep || (Block == kStep / 2 && (Round == 1 || Round % 2 == 0)));
};

struct ParamsSm90 {
  void* out;
  int m, n;
  int tiles_down, tiles_across;
  int groups;
  struct Side {
    int rows;
    InBlocks blocks;
    bool batched;
  } down, across;
  bool fours;         // whether the terms of four blocks can be loaded at once
  bool stores_whole;  // whether rows of the output start at 16 bytes
  int share;          // blocks of a cluster that share what goes across
  int box_rows;       // of it, that each of them loads
  int64_t out_batch_stride;
  VectorArg<float, false> bias;
  OutputArg<true> output;
};

template <int kThreads>
__device__ void sync_math() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// A ring's next place, and the parity of its turn.
template <int kPlaces>
struct Ring {
  int at = 0, turn = 0;

  __device__ void advance() {
    if (++at == kPlaces) at = 0, ++turn;
  }
};

// Copies the terms of four blocks, by one of the threads that bring them. Behind the last block they become zeros.
template <class C>
__device__ void copy_terms(ParamsSm90 const& p, int thread, int l, int first_down, int first_across, int slot,
                           typename C::Terms& to) {
#pragma unroll
  for (int i = 0; i < (C::kLines + kTermsThreads - 1) / kTermsThreads; ++i) {
    int const line = thread + kTermsThreads * i;
    if (line >= C::kLines) break;
    bool const is_down = line < C::kDown;
    ParamsSm90::Side const& side = is_down ? p.down : p.across;
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

  // Bands of tiles, each from its first row to its last: what runs at once reads few rows of either operand.
  constexpr int kBand = 16;
  int const share = p.share, rank = blockIdx.x % share, cluster = blockIdx.x / share;
  int const clusters_down = (p.tiles_down - 1) / share + 1, of_entry = p.tiles_across * clusters_down;
  int const l = cluster / of_entry, band = cluster % of_entry / (kBand * clusters_down) * kBand;
  int const wide = min(kBand, p.tiles_across - band), in_band = cluster % of_entry - band * clusters_down;
  int const first_across = (band + in_band % wide) * kAcross, first_down = (in_band / wide * share + rank) * kDown;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // What is multiplied, of which the last blocks and the end of the last stage may not be there: zeros.
  int const rounds = (p.groups - 1) / C::kRound + 1, blocks = rounds * C::kRound;
  int const steps = C::kBlock >= kStep ? blocks * C::kStagesOfBlock : (blocks + 1) / 2;

  if (warp == kMathWarps && elect_one_sync()) {
    prefetch_tma_descriptor(&boxes_down);
    prefetch_tma_descriptor(&boxes_across);
    for (int i = 0; i < min(steps, 2); ++i) {  // of b to L2, by the time the kernel before this one is done
      if constexpr (C::kSharedB) {
        SM90_TMA_LOAD_3D::PREFETCH::copy(&boxes_across, i * kStep, first_across + rank * p.box_rows,
                                         p.across.batched ? l : 0);
      } else {
        SM90_TMA_LOAD_3D::PREFETCH::copy(&boxes_down, i * kStep, first_down, p.down.batched ? l : 0);
      }
    }
    for (int s = 0; s < kStages; ++s) {
      Full::init(&shared.full[s], 1);
      Empty::init(&shared.empty[s], share * kMathWarps);
    }
    for (int s = 0; s < C::kSlots; ++s) {
      Empty::init(&shared.terms_full[s], kTermsThreads);
      Empty::init(&shared.terms_empty[s], kMathWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  if (share > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }
  cudaTriggerProgrammaticLaunchCompletion();

  if (warp >= kMathWarps) {
    if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kOtherRegisters>();
    cudaGridDependencySynchronize();
    if (warp == kMathWarps) {
      if (!elect_one_sync()) return;
      int const first_row = rank * p.box_rows;
      uint64_t const once = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
      uint64_t const again = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);
      Ring<kStages> stage;
      for (int i = 0; i < steps; ++i, stage.advance()) {
        uint64_t* const full = &shared.full[stage.at];
        if (stage.turn > 0) Empty::wait(&shared.empty[stage.at], (stage.turn - 1) & 1);
        Full::arrive_and_expect_tx(full, kDown * kStep + share * p.box_rows * kStep);
        SM90_TMA_LOAD_3D::copy(&boxes_down, full, C::kSharedB ? again : once, shared.down[stage.at], i * kStep,
                               first_down, p.down.batched ? l : 0);
        auto* const to = shared.across[stage.at] + first_row * kStep;
        int const entry = p.across.batched ? l : 0;
        if (share > 1) {
          SM90_TMA_LOAD_MULTICAST_3D::copy(&boxes_across, full, uint16_t((1 << share) - 1), again, to, i * kStep,
                                           first_across + first_row, entry);
        } else {
          SM90_TMA_LOAD_3D::copy(&boxes_across, full, again, to, i * kStep, first_across, entry);
        }
      }
      return;
    }
    int const slots = (p.groups - 1) / kBlocksOfSlot + 1;
    Ring<C::kSlots> slot;
    for (int i = 0; i < slots; ++i, slot.advance()) {
      if (slot.turn > 0) Empty::wait(&shared.terms_empty[slot.at], (slot.turn - 1) & 1);
      copy_terms<C>(p, threadIdx.x - C::kMathThreads - 32, l, first_down, first_across, i, shared.terms[slot.at]);
      cutlass::arch::cpasync_barrier_arrive_noinc(&shared.terms_full[slot.at]);
    }
    commit_copies();
    wait_for_copies<0>();
    return;
  }

  if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kMathRegisters>();
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
      if (loaded_again > 0 && lane < share) Empty::arrive(&shared.empty[free.at], share > 1 ? lane : 0, true);
    }
  };
  int const row = 16 * warp + lane / 4;
  auto const add_block = [&](auto const& term, auto const& of_block) {
    float of_b[C::kVectors][2];
#pragma unroll
    for (int v = 0; v < C::kVectors; ++v) of_b[v][0] = term(v, row), of_b[v][1] = term(v, row + 8);
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
      if constexpr (C::kSharedB) {
        float const of_b = term(0, kDown), scales[] = {term(0, row) * of_b, term(0, row + 8) * of_b};
#pragma unroll
        for (int i = 0; i < kCount; ++i) total[i] = fmaf(scales[i / 2 % 2], float(sums[set][r][i]), total[i]);
      } else {
        add_block(term, sums[set][r]);
      }
      if (++of_slot == kBlocksOfSlot) {
        __syncwarp();
        if (elect_one_sync()) Empty::arrive(&shared.terms_empty[slot.at]);
        of_slot = 0, slot.advance();
      }
    }
  };
  // Without branches around products whose sums others take: ptxas would have each wait for those before it.
  constexpr std::integral_constant<int, 0> kFirst;
  constexpr std::integral_constant<int, 1> kSecond;
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
  multiply(kFirst);
  int left = rounds - 1;
#pragma unroll 1
  for (; left >= 2; left -= 2) {
    step(kFirst, kSecond);
    step(kSecond, kFirst);
  }
  if (left == 1) {
    step(kFirst, kSecond);
    last(kSecond);
  } else {
    last(kFirst);
  }

  // The sums take the place of the stages, in which no more data arrive: results side by side are of one row.
  sync_math<C::kMathThreads>();
  auto* const sums_of_tile = reinterpret_cast<float*>(memory);
  int const column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    int const down = row + i / 2 % 2 * 8, across = i / 4 * 8 + column;
    if constexpr (C::kSharedB) {
      *reinterpret_cast<float2*>(&sums_of_tile[down * C::kPitch + across]) = {total[i], total[i + 1]};
    } else {
      sums_of_tile[across * C::kPitch + down] = total[i];
      sums_of_tile[(across + 1) * C::kPitch + down] = total[i + 1];
    }
  }
  sync_math<C::kMathThreads>();
  cudaGridDependencySynchronize();  // the bias is next
  FullOutput const output = p.output.at(l);
  auto const write = [&](auto bits) {
    using Bits = decltype(bits);
    constexpr int kEach = 16 / sizeof(Bits), kThreadsOfRow = C::kTileN / kEach;
    int const first_m = C::kSharedB ? first_down : first_across, first_n = C::kSharedB ? first_across : first_down;
    int const column = threadIdx.x % kThreadsOfRow * kEach, n = first_n + column, columns = min(kEach, p.n - n);
    if (columns <= 0) return;
    float bias[kEach] = {};
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j < columns) bias[j] = p.bias.load(l, n + j);
    }
    for (int m = threadIdx.x / kThreadsOfRow; m < min(C::kTileM, p.m - first_m); m += C::kMathThreads / kThreadsOfRow) {
      float values[kEach];
#pragma unroll
      for (int j = 0; j < kEach; j += 4) {
        float4 const four = *reinterpret_cast<float4 const*>(&sums_of_tile[m * C::kPitch + column + j]);
        values[j] = four.x, values[j + 1] = four.y, values[j + 2] = four.z, values[j + 3] = four.w;
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) values[j] += bias[j];
      auto* const to = static_cast<Bits*>(p.out) + l * p.out_batch_stride + int64_t(first_m + m) * p.n + n;
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

// Has TMA load boxes of so many rows of one stage, and zeros for what is beyond.
inline cudaError_t make_boxes(void const* data, int k, int rows, int entries, int box_rows, CUtensorMap& boxes) {
  cuuint64_t const sizes[] = {cuuint64_t(k), cuuint64_t(rows), cuuint64_t(entries)};
  cuuint64_t const strides[] = {cuuint64_t(k), cuuint64_t(k) * cuuint64_t(rows)};
  cuuint32_t const box[] = {kStep, cuuint32_t(box_rows), 1}, steps[] = {1, 1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &boxes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class C>
LaunchShape shape_of(dim3 grid, int share) {
  return {grid, C::kThreads, sizeof(typename C::Shared), dim3(share)};
}

template <class C, int kShare>
cudaError_t prepare_wgmma(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(wgmma_kernel<C>), shape_of<C>({}, kShare), fits);
}

template <class C, int kShare>
cudaError_t launch_wgmma(BlockQuantizedMm const& problem, Submit const& submit) {
  ParamsSm90 p{};
  p.out = problem.out, p.out_batch_stride = problem.out_batch_stride;
  p.m = problem.m, p.n = problem.n, p.groups = problem.groups();
  ParamsSm90::Side const a{p.m, problem.of_a, problem.a_batch_stride != 0};
  ParamsSm90::Side const b{p.n, problem.of_b, problem.b_batch_stride != 0};
  p.down = C::kSharedB ? a : b, p.across = C::kSharedB ? b : a;
  p.tiles_down = int(ceil_div(p.down.rows, C::kDown)), p.tiles_across = int(ceil_div(p.across.rows, C::kAcross));
  auto const at_16_bytes = [](void const* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  auto const in_fours = [&](InBlocks const& side) {
    return at_16_bytes(side.scale.data) && at_16_bytes(side.zero_point.data) && at_16_bytes(side.sums.data);
  };
  p.fours = p.groups % 4 == 0 && in_fours(problem.of_a) && in_fours(problem.of_b);
  p.stores_whole = int64_t(p.n) * bytes_of(problem.out_dtype) % 16 == 0 && at_16_bytes(p.out);
  p.share = kShare, p.box_rows = kShare > 1 ? C::kAcross / kShare : std::min(C::kAcross, p.across.rows);
  auto const epilogue = epilogue_args<true>(problem);
  p.bias = epilogue.bias, p.output = epilogue.output;

  CUtensorMap boxes_down, boxes_across;
  auto const make = [&](ParamsSm90::Side const& side, void const* data, int box_rows, CUtensorMap& boxes) {
    return make_boxes(data, problem.k, side.rows, side.batched ? problem.batch : 1, box_rows, boxes);
  };
  cudaError_t error = make(p.down, C::kSharedB ? problem.a : problem.b, C::kDown, boxes_down);
  if (error == cudaSuccess) error = make(p.across, C::kSharedB ? problem.b : problem.a, p.box_rows, boxes_across);
  if (error != cudaSuccess) return error;
  unsigned const blocks = kShare * p.tiles_across * unsigned(ceil_div(p.tiles_down, kShare)) * problem.batch;
  return jax_qmm::launch(submit, shape_of<C>(dim3(blocks), kShare), wgmma_kernel<C>, p, boxes_down, boxes_across);
}

template <class C, int kShare>
Instance instance() {
  Instance i{};
  i.in = C::kIn, i.zero_points = C::kZeroPoints;
  i.shortest = i.longest = C::kBlock;
  i.tile_m = C::kTileM, i.tile_n = C::kTileN, i.stages = C::kStages, i.threads = C::kThreads;
  i.blocks_per_sm = C::kBlocksPerSm, i.shared_bytes = sizeof(typename C::Shared);
  i.wgmma = true, i.shared_b = C::kSharedB, i.share = kShare;
  i.prepare = prepare_wgmma<C, kShare>, i.launch = launch_wgmma<C, kShare>;
  return i;
}

template <DType In, bool kZeroPoints>
void add_wgmma_instances(std::vector<Instance>& to) {
  auto const add = [&](auto block) {
    constexpr int kBlock = block;
    to.push_back(instance<ConfigSm90<In, kZeroPoints, kBlock, 16, 1, kBlock == 256 ? 2 : 4, 2>, 1>());
    to.push_back(instance<ConfigSm90<In, kZeroPoints, kBlock, 32, 1, kBlock == 128 ? 2 : 1, 2>, 1>());
    to.push_back(instance<ConfigSm90<In, kZeroPoints, kBlock, 64, 1, 1, 2>, 1>());
    using Largest = ConfigSm90<In, kZeroPoints, kBlock, 128, 2, 1, 1>;
    to.push_back(instance<Largest, 1>());
    to.push_back(instance<Largest, 2>());
  };
  add(std::integral_constant<int, 64>());
  add(std::integral_constant<int, 128>());
  add(std::integral_constant<int, 256>());
  if constexpr (In == DType::kF8E4M3) {  // int8 rounds in another order, by which its results are the reference's
    using Shared = ConfigSm90<In, kZeroPoints, 128, 128, 2, 1, 1, true>;
    to.push_back(instance<Shared, 1>());
    to.push_back(instance<Shared, 2>());
  }
}

}  // namespace jax_qmm::block_quantized
