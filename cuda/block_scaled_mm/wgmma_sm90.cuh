// Products of 16-bit, fp8 and int8 x by Hopper's warpgroup-level tensor cores: y^T = w x^T. Weights are the operand
// that comes from registers, whose fragments are those of mma.sync: of 16 bits their stored order serves both, of fp8 a
// lane takes the words of two, and of int8 (expanded_mm/streams_sm90.cu) halves of words of a plain row. TMA brings x
// and weights to shared memory, from which each math warp takes 16 rows of weights. Where a block has few rows of x, or
// x is fp8, sums are scaled; else weights are, so that all registers are left to the sums.
//
//   warps                role
//   0 ... kMathWarps-1   warpgroups that dequantize and multiply, each 64 rows of weights; they write the results
//   kMathWarps           loads x and weights by TMA
//   kMathWarps + 1 ...   make the terms of scales and zero points, each of some rows
//   the last one         where blocks share tiles, tells that sums are in memory
//
//   mbarrier       arrivals of a phase                       who waits
//   full[stage]    1 + kTermsWarps, and the bytes of what    math warps
//                  TMA brings
//   empty[stage]   kMathWarps of each block that shares x    the other warps, from the second turn on
//   second_full    1 and the bytes of the second half of x,  math warps
//                  where that is large
//   second_empty   as empty[stage]                           the load warp
//   met            all warps                                 all: what the stages had is done (one phase)
//   added          kMathWarps, 1 for the expected bytes,     math warps: all parts of K are there (one phase)
//                  and the bytes of the parts' sums
//
// The blocks of a cluster share K: each adds up some rows of x from all parts, in their order. Stages of the last turn
// are not released, as blocks that are done may have exited.
//
// Persistent blocks, one on each SM, take one tile after the other, and load for the next one while they write results,
// from registers to shared memory of their own and from there by TMA. They have as many tiles each, or as many steps
// (stream-K): then a tile may begin in one block and end in others, which leave their sums in memory for the first.
// With large tiles two are a cluster, which has neighbouring weights and shares x, of which each loads half for both.
#pragma once

#include "block_scaled_mm/kernel.cuh"
#include "block_scaled_mm/streams_sm90.cuh"
#include "block_scaled_mm/windows_sm90.cuh"
#include "core/boxes.cuh"
#include "core/cluster.cuh"
#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"

namespace jax_qmm::block_scaled {

// What is particular to these kernels.
struct ParamsSm90 {
  int box_rows;  // of x
  bool x_batched, w_batched;
  Streams streams;  // of persistent blocks
  Flag* left;       // of each of them: `is_left` when its sums are in memory
  Flag is_left;
  void* sums;  // FourSums [block][values of a thread / 4][thread]
};
struct WindowParamsSm90 : ParamsSm90 {
  WindowsOfX windows;
};
template <class C>
using OwnParams = std::conditional_t<C::kWindows, WindowParamsSm90, ParamsSm90>;

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    wgmma_kernel(Params const p, OwnParams<C> const own, typename C::Epilogue const epilogue,
                 CUTE_GRID_CONSTANT CUtensorMap const boxes_x, CUTE_GRID_CONSTANT CUtensorMap const boxes_w,
                 CUTE_GRID_CONSTANT CUtensorMap const boxes_out) {
  using namespace cute;
  using Element = typename C::Element;
  using Term = typename C::Term;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kStages = C::kStages, kTileM = C::kTileM, kRows = C::kRows, kPitch = C::kPitch;
  constexpr int kMathWarps = C::kMathWarps, kShare = C::kShare;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(memory);
  auto* const partial = reinterpret_cast<float*>(memory);  // [parts][rows of x][kPitch], when all is multiplied

  int const parts = C::kPersistent ? 1 : gridDim.y, part = C::kPersistent ? 0 : blockIdx.y;
  int const rank = blockIdx.x % kShare;
  unsigned const all_steps = (p.k + kStep - 1) / kStep;
  // Tiles that have the same weights are neighbours, as long as what blocks at work have of x fits in L2: up to
  // kBand tiles of x are passed by all weights before the next ones.
  auto const piece_of = [&](unsigned tile, int first_step, int steps) -> Piece {
    int const across = (p.tiles_n - 1) / kShare + 1, of_entry = p.tiles_m * across, l = tile / of_entry;
    int const band = tile % of_entry / (kBand * across) * kBand, band_m = min(kBand, int(p.tiles_m) - band);
    int const of_band = tile % of_entry - band * across;
    return {l, (band + of_band % band_m) * kTileM, (of_band / band_m * kShare + rank) * kRows, first_step, steps};
  };
  // Blocks start in the order of their numbers, and wait for none that starts after them: the last ones have the first
  // steps.
  int const together = C::kPersistent ? own.streams.together : 1, first = blockIdx.x / kShare;
  int const stream = (gridDim.x / kShare - 1 - first) / together, member = first % together * kShare + rank;
  int const block = member * own.streams.count + stream;
  unsigned const begin = C::kPersistent ? own.streams.begin(stream) : 0;
  unsigned const end = C::kPersistent ? own.streams.begin(stream + 1) : 0;
  auto const piece_at = [&](unsigned at) -> Piece {
    if constexpr (C::kPersistent) {
      unsigned const tile = at / all_steps, first_step = at - tile * all_steps;
      return piece_of(tile * together + first % together, first_step, min(all_steps - first_step, end - at));
    } else {
      int const first_step = part * (p.k_of_part / kStep), steps = all_steps - first_step;
      return piece_of(blockIdx.x, first_step, min(steps, p.k_of_part / kStep));
    }
  };
  auto const each_piece = [&](auto use) {
    if constexpr (C::kPersistent) {
#pragma unroll 1
      for (unsigned at = begin; at < end;) {
        Piece const piece = piece_at(at);
        use(piece);
        at += piece.steps;
      }
    } else {
      use(piece_at(0));
    }
  };
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  auto const load_w = [&](Piece const& piece, int i, auto load) {  // what is stored of kStep columns
#pragma unroll
    for (int box = 0; box < C::kBits / 4; ++box) {
      load((piece.first_step + i) * (kStep / 8 * C::kBits) + box * kBoxBytes, box);
    }
  };
  if (warp == kMathWarps && elect_one_sync()) {
    prefetch_tma_descriptor(&boxes_x);
    prefetch_tma_descriptor(&boxes_w);
    // To L2, by the time the kernel before this one is done.
    Piece const piece = piece_at(begin);
    for (int i = 0; i < min(piece.steps, 2); ++i) {
      load_w(piece, i, [&](int byte, int) {
        SM90_TMA_LOAD_3D::PREFETCH::copy(&boxes_w, byte, piece.first_n, own.w_batched ? piece.l : 0);
      });
    }
    for (int s = 0; s < kStages; ++s) {
      Full::init(&shared.full[s], 1 + C::kTermsWarps);
      Empty::init(&shared.empty[s], kShare * kMathWarps);
      if constexpr (C::kHalves) {
        Full::init(&shared.second_full[s], 1);
        Empty::init(&shared.second_empty[s], kShare * kMathWarps);
      }
    }
    Full::init(&shared.met, C::kThreads / 32);
    Full::init(&shared.added, kMathWarps + 1);
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (kShare > 1) {
    sync_cluster();
  } else {
    __syncthreads();
  }
  cudaTriggerProgrammaticLaunchCompletion();

  // What the stages had is not needed any more, and no more data arrive there. Other blocks write there if they add up
  // parts of K, so that the whole cluster must be done.
  int const rows_of_part = (kTileM + parts - 1) / parts;
  auto const rows_of = [&](Piece const& piece) {
    return min(rows_of_part, min(kTileM, p.m - piece.first_m) - part * rows_of_part);
  };
  // Neither block may exit while the other one has data or arrivals for it.
  auto const finish_cluster = [&] {
    __syncwarp();
    sync_cluster();
  };
  auto const finish_stages = [&](Piece const& piece) {
    // The roles come here from places of their own, which barriers of a block are not for.
    __syncwarp();
    if (elect_one_sync()) Full::arrive(&shared.met);
    Full::wait(&shared.met, 0);
    asm volatile("" ::: "memory");  // to the compiler, the wait alone changes no memory
    if (parts > 1) {
      if (threadIdx.x == 0) Full::arrive_and_expect_tx(&shared.added, parts * max(rows_of(piece), 0) * kRows * 4);
      __syncwarp();  // of lanes that the wait or the branch may have parted: sync_cluster is for whole warps
      sync_cluster();
    }
  };
  if (warp >= kMathWarps) {
    if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kRegisters>();
    if (warp == kMathWarps && elect_one_sync()) {
      cudaGridDependencySynchronize();
      int stage = 0, turn = 0;
      constexpr int kRowsAtOnce = kShare * C::kBoxRows;
      BoxesOfTile<kStages, kTileM / kRowsAtOnce> boxes;
      each_piece([&](Piece const& piece) {
        boxes.start((p.m - piece.first_m + kRowsAtOnce - 1) / kRowsAtOnce, piece.steps);
        for (int i = 0; i < piece.steps; ++i) {
          uint64_t* full = &shared.full[stage];
          int const count = boxes.count(i), bytes_x = count * kShare * own.box_rows * kRowBytes;
          if (turn > 0) Empty::wait(&shared.empty[stage], (turn - 1) & 1);
          Full::arrive_and_expect_tx(full, sizeof(shared.w[stage]) + (C::kHalves ? 1 : C::kBoxesX) * bytes_x);
          load_w(piece, i, [&](int byte, int box) {
            SM90_TMA_LOAD_3D::copy(&boxes_w, full, static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                                   shared.w[stage][box], byte, piece.first_n, own.w_batched ? piece.l : 0);
          });
#pragma unroll
          for (int b = 0; b < C::kBoxesX; ++b) {
            if (C::kHalves && b == 1) {
              full = &shared.second_full[stage];
              if (turn > 0) Empty::wait(&shared.second_empty[stage], (turn - 1) & 1);
              Full::arrive_and_expect_tx(full, bytes_x);
            }
            int const column = (piece.first_step + i) * kStep + b * C::kColumnsX, entry = own.x_batched ? piece.l : 0;
            uint64_t const hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);
            for (int j = 0; j < count; ++j) {
              int const row = (j * kShare + rank) * own.box_rows, m = piece.first_m + row;
              uint8_t* const box = shared.x[stage][b] + row * kRowBytes;
              if constexpr (C::kWindows) {
                own.windows.template load<kShare, sizeof(Element)>(boxes_x, full, box, column, m);
              } else if constexpr (kShare > 1) {
                SM90_TMA_LOAD_MULTICAST_3D::copy(&boxes_x, full, uint16_t((1 << kShare) - 1), hint, box, column, m,
                                                 entry);
              } else {
                SM90_TMA_LOAD_3D::copy(&boxes_x, full, hint, box, column, m, entry);
              }
            }
          }
          if (++stage == kStages) stage = 0, ++turn;
        }
      });
    }
    __syncwarp();
    if (C::kPersistent && warp == C::kThreads / 32 - 1 && begin % all_steps != 0) {
      cudaGridDependencySynchronize();
      sync_left<C::kMathThreads>();
      __threadfence();
      if (elect_one_sync()) atomicExch(&own.left[block], own.is_left);
    }
    int const terms_warp = warp - kMathWarps - 1;
    if (terms_warp >= 0 && terms_warp < C::kTermsWarps) {
      cudaGridDependencySynchronize();
      // Of some steps at once: lanes that load neighbours of a row ask less of L1. Without branches between loads, or
      // each would wait for the one before it.
      auto const make_terms = [&](auto scale_type, auto has_zeros) {
        constexpr int kMost = kStages < 4 ? 1 : kStages < 8 ? 2 : 4;  // half of the stages
        constexpr int kTerms = C::kTerms, kSteps = std::max(1, std::min(4 / kTerms, kMost));
        constexpr int kUnits = kTerms * kSteps, kOfWarp = kRows / C::kTermsWarps, kCount = kOfWarp * kUnits / 32;
        static_assert(32 % kUnits == 0);
        int const step = lane % kUnits / kTerms, unit_of_step = lane % kTerms;
        int const first_row = terms_warp * kOfWarp + lane / kUnits;
        int stage = 0, turn = 0;
        each_piece([&](Piece const& piece) {
          int const l = piece.l, steps = piece.steps;
          auto const* const scales = static_cast<decltype(scale_type) const*>(p.scale.data) + l * p.scale.batch_stride;
          auto const* const zeros = static_cast<uint8_t const*>(p.zero_point.data) + l * p.zero_point.batch_stride;
          uint32_t scale_bits[kCount], zero_bits[kCount] = {};
          auto const load = [&](int first) {
            unsigned const unit = (piece.first_step + first + step) * kTerms + unit_of_step;
            unsigned const group = min(__umulhi(2 * unit, p.block_inverse), p.groups - 1);  // a unit may be beyond K
#pragma unroll
            for (int j = 0; j < kCount; ++j) {
              int64_t const at = int64_t(min(piece.first_n + first_row + 32 / kUnits * j, p.n - 1)) * p.groups + group;
              scale_bits[j] = scales[at];
              if constexpr (has_zeros) zero_bits[j] = zeros[at];
            }
          };
          load(0);
#pragma unroll 1
          for (int first = 0; first < steps; first += kSteps) {
            int const begin = stage, many = min(kSteps, steps - first);
            for (int i = 0; i < many; ++i) {
              if (turn > 0) Empty::wait(&shared.empty[stage], (turn - 1) & 1);
              if (++stage == kStages) stage = 0, ++turn;
            }
            if (step < many) {
              Term(&terms)[kTerms][kRows] = shared.terms[(begin + step) % kStages];
#pragma unroll
              for (int j = 0; j < kCount; ++j) {
                Term& term = terms[unit_of_step][first_row + 32 / kUnits * j];
                if constexpr (C::kInt8) {
                  term = C::Weights::term(scale_bits[j], zero_bits[j]);
                } else {
                  term = C::Weights::term(to_float(scale_bits[j], p.scale.dtype), zero_bits[j], DType::kS8);
                }
              }
            }
            __syncwarp();
            if (elect_one_sync()) {
              for (int i = 0; i < many; ++i) Full::arrive(&shared.full[(begin + i) % kStages]);
            }
            load(first + kSteps);
          }
        });
      };
      auto const with_zeros = [&](auto scale_type) {
        if (p.zero_point.data != nullptr) {
          make_terms(scale_type, std::true_type());
        } else {
          make_terms(scale_type, std::false_type());
        }
      };
      if constexpr (C::kInt8) {
        with_zeros(uint8_t());
      } else if (bytes_of(p.scale.dtype) == 2) {
        with_zeros(uint16_t());
      } else {
        with_zeros(uint32_t());
      }
    }
    if constexpr (!C::kPersistent) finish_stages(piece_at(begin));
    if constexpr (kShare > 1) finish_cluster();
    return;
  }

  if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kMathRegisters>();
  typename C::Mma mma;
  auto thread = mma.get_slice(threadIdx.x);
  Tensor sums = partition_fragment_C(mma, Shape<Int<kRows>, Int<kTileM>>{});
  constexpr int kCount = decltype(size(sums))::value;
  Tensor boxes_of_x = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(shared.x)),
                                  tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                                Shape<Int<kTileM>, Int<C::kColumnsX>, Int<C::kBoxesX * kStages>>{}));
  Tensor fragments_x = thread.make_fragment_B(thread.partition_B(boxes_of_x));
  uint32_t fragments[2][C::kFragments][4];  // of a chunk and the next
  uint32_t words[2][C::kWords];             // of rows `row` and `row` + 8
  Term terms[2][C::kTerms];
  int const row = 16 * warp + lane / 4;
  int stage = 0, phase = 0, before = -1;
  [[maybe_unused]] int slot = 0;
  cudaGridDependencySynchronize();

  each_piece([&](Piece const& piece) {
    int const steps = piece.steps;
    // Where few rows of x are multiplied, only at the end: else 3 % more instructions in the loop are for keeping them.
    constexpr bool kAhead = C::kTileM >= 64;
    ColumnTerms<C> columns;
    if constexpr (kAhead) columns.load(p, epilogue, piece, row);
    using Sum = typename C::Sum;
    [[maybe_unused]] Sum scaled_sums[kCount] = {};
    // In place, as there are no registers for copies.
    Sum(&acc)[kCount] = C::kScaleWeights ? reinterpret_cast<Sum(&)[kCount]>(*sums.data()) : scaled_sums;
    // What step i has in a stage is free, if it is loaded again.
    auto const release = [&](uint64_t* empty, int i) {
      if (i >= 0 && (C::kPersistent || i + kStages < steps) && lane < kShare) {
        Empty::arrive(empty, kShare > 1 ? lane : part, true);  // by their rank in the cluster
      }
    };
    auto const load = [&] {
      Full::wait(&shared.full[stage], phase);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < C::kWords; i += 4) {
          if constexpr (C::kInt8) {
            uint8_t const* const weights = shared.w[stage][0][row + 8 * h];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              int const at = 16 * (j ^ (row / 2 + 4 * h) % 4) + lane % 4 / 2 * 4;  // as TMA swizzles rows of 64 bytes
              words[h][j] = C::Weights::gather(*reinterpret_cast<uint32_t const*>(weights + at),
                                               *reinterpret_cast<uint32_t const*>(weights + at + 8), lane);
            }
            continue;
          }
          int const box = C::kFp8 ? 0 : i / 4, part = C::kFp8 ? lane % 2 * 2 + i / 4 : lane % 4;
          uint4 const four = *reinterpret_cast<uint4 const*>(&shared.w[stage][box][row + 8 * h][16 * part]);
          words[h][i] = four.x, words[h][i + 1] = four.y, words[h][i + 2] = four.z, words[h][i + 3] = four.w;
        }
#pragma unroll
        for (int u = 0; u < C::kTerms; ++u) terms[h][u] = shared.terms[stage][u][row + 8 * h];
      }
    };
    // Chunks take the registers of fragments in turn.
    auto const dequantize = [&](auto chunk, auto parity) {
      auto& to = fragments[(chunk + parity) % 2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Term const& term = terms[h][chunk * C::kChunk / C::kUnit];
        if constexpr (C::kInt8) {
#pragma unroll
          for (int f = 0; f < C::kFragments; ++f) {
            Term const& term = terms[h][(chunk * C::kChunk + f * C::kFragmentK) / C::kUnit];
            term.make_in_order(words[h][chunk * C::kFragments + f], to[f][h], to[f][2 + h]);
          }
        } else if constexpr (C::kFp8) {
#pragma unroll
          for (int f = 0; f < C::kFragments; ++f) {
            int const word = chunk * C::kFragments + f;
            C::Weights::fours(words[h][word], words[h][4 + word], lane, term, to[f][h], to[f][2 + h]);
          }
        } else {
          constexpr int kPairs = 16 / C::kBits, kWords = C::kWords / C::kChunks;  // of a word, of a chunk
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            uint32_t pairs[kPairs];
            C::Weights::pairs(words[h][chunk * kWords + w], term, term, pairs);
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
              int const at = w * kPairs + j;
              to[at / 2][at % 2 * 2 + h] = pairs[j];
            }
          }
        }
      }
    };
    auto const multiply = [&](auto chunk, auto parity) {
      auto& from = fragments[(chunk + parity) % 2];
#pragma unroll
      for (int j = 0; j < C::kFragments; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) warpgroup_fence_operand(from[j][c]);
      }
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      constexpr int kOfBox = C::kColumnsX / C::kFragmentK;
#pragma unroll
      for (int j = 0; j < C::kFragments; ++j) {
        Tensor fragment = make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(from[j])),
                                      Layout<Shape<Int<16 / sizeof(Element)>, _1>>{});
        if (chunk * C::kChunk % C::kUnit == 0 && j == 0 && !C::kScaleWeights) mma.accumulate_ = GMMA::ScaleOut::Zero;
        int const at = chunk * C::kFragments + j, box = C::kBoxesX * stage + at / kOfBox;
        gemm(mma, fragment, fragments_x(_, _, at % kOfBox, box), sums);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
    };
    constexpr std::integral_constant<int, 0> kFirst;
    auto const step = [&](int i, auto parity) {
      constexpr std::integral_constant<int, (parity + C::kChunks) % 2> kNextParity;
      unroll<C::kChunks>([&](auto chunk) {
        constexpr int kAt = chunk, kNext = kAt + 1, kUnitAt = kAt * C::kChunk / C::kUnit;
        if constexpr (C::kHalves && kAt == 1) Full::wait(&shared.second_full[stage], phase);
        multiply(chunk, parity);
        if constexpr (kAt == 0) release(C::kHalves ? &shared.second_empty[before] : &shared.empty[before], i - 1);
        if constexpr (C::kHalves && kAt == 1) release(&shared.empty[stage], i);
        [[maybe_unused]] Term const of_rows[] = {terms[0][kUnitAt], terms[1][kUnitAt]};
        if constexpr (kNext < C::kChunks) {
          dequantize(std::integral_constant<int, kNext>(), parity);
        } else {
          before = stage;
          if (++stage == kStages) stage = 0, phase ^= 1;
          if (i + 1 < steps) {
            load();
            dequantize(kFirst, kNextParity);
          }
        }
        if constexpr (!C::kScaleWeights) {
          if constexpr (kNext * C::kChunk % C::kUnit == 0) {
            warpgroup_wait<0>();
            warpgroup_fence_operand(sums);
#pragma unroll
            for (int j = 0; j < kCount; ++j) acc[j] = fmaf(of_rows[j / 2 % 2].scale, sums(j), acc[j]);
          }
        }
      });
    };
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    load();
    dequantize(kFirst, kFirst);
#pragma unroll 1
    for (int i = 0; i < steps;) {
      unroll<C::kChunks % 2 + 1>([&](auto parity) {
        if (i < steps) step(i++, parity);
      });
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    if constexpr (!kAhead) columns.load(p, epilogue, piece, row);
    if constexpr (C::kPersistent) {
      release(C::kHalves ? &shared.second_empty[before] : &shared.empty[before], 0);
      // What a block leaves is of the first piece it has, and for a tile of the stream before its own.
      auto const sums_of = [&](int block) {
        return static_cast<FourSums<Sum>*>(own.sums) + int64_t(block) * (kCount / 4 * C::kMathThreads);
      };
      int const next = block + 1;
      if (piece.first_step > 0) return leave_sums<C::kMathThreads>(acc, sums_of(block));
      int others = 0;
      if (steps < int(all_steps)) {
        while (own.streams.begin(stream + 1 + others) < end - steps + all_steps) ++others;
        add_sums<C::kMathThreads>(acc, sums_of(next), &own.left[next], own.is_left, others);
      }
      write_sums<C>(p, epilogue, boxes_out, shared, acc, columns, piece, slot);
    } else {
      int const rows = rows_of(piece), tile_m = min(kTileM, p.m - piece.first_m);
      finish_stages(piece);
      auto const each = [&](auto store) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          store(i / 4 * 8 + lane % 4 * 2 + i % 2, 16 * warp + lane / 4 + i / 2 % 2 * 8, acc[i]);
        }
      };
      if (parts == 1) {
        each([&](int m, int row, float sum) { partial[m * kPitch + row] = sum; });
        sync_math<C::kMathThreads>();
      } else {
        unsigned const inverse = 0xffffffffu / rows_of_part + 1;  // of the quotient of a small number
        each([&](int m, int row, float sum) {
          int const adder = rows_of_part == 1 ? m : __umulhi(m, inverse);
          float* const to = &partial[(part * rows_of_part + m - adder * rows_of_part) * kPitch + row];
          if (m < tile_m) {
            store_shared_remote(__float_as_uint(sum), cast_smem_ptr_to_uint(to), cast_smem_ptr_to_uint(&shared.added),
                                adder);
          }
        });
        __syncwarp();
        if (elect_one_sync()) Full::arrive(&shared.added);
        Full::wait(&shared.added, 0);
        asm volatile("" ::: "memory");
      }
      auto const write = [&](int parts) {
        write_rows<kRows, kPitch, C::kMathThreads>(p, partial, parts, rows_of_part, rows, piece.l,
                                                   piece.first_m + part * rows_of_part, piece.first_n, p.n);
      };
      parts == 1 ? write(1) : write(parts);  // the code for one is short
    }
  });
  if constexpr (C::kPersistent) {
    if (threadIdx.x % 128 == 0) tma_store_wait<0>();
  }
  if constexpr (kShare > 1) finish_cluster();
}

}  // namespace jax_qmm::block_scaled
