// What is known of Hopper's kernels at compile time: their tiles, roles, registers and shared memory.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <algorithm>

#include "block_scaled_mm/dequantize_fp8.cuh"
#include "block_scaled_mm/dequantize_int8.cuh"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::block_scaled {

struct NoEpilogue {};

constexpr int kRowBytes = 128;  // of a box of x or of results, the span of TMA's swizzle
constexpr int kStep = 128;      // columns of a stage
constexpr int kBoxBytes = 64;   // of a row of a box of weights

// Of the 16-bit types, fp8 and int8.
template <class T>
struct ElementOf;
template <>
struct ElementOf<__nv_bfloat16> {
  using Type = cutlass::bfloat16_t;
};
template <>
struct ElementOf<__half> {
  using Type = cutlass::half_t;
};
template <>
struct ElementOf<Fp8> {
  using Type = cutlass::float_e4m3_t;
};
template <>
struct ElementOf<int8_t> {
  using Type = int8_t;
};

// `ScaleWeights`: else the sums of each `Unit` columns are scaled. `Windows` on images are the rows of x.
template <class T, int Bits, int TileM, bool ScaleWeights, int Unit = ScaleWeights ? 64 : kStep,
          bool Persistent = false, bool Windows = false>
struct ConfigSm90 {
  using Element = typename ElementOf<T>::Type;
  // With few rows of x and weights of 4 bits a third warpgroup has products while two dequantize.
  static constexpr bool kThree = Persistent && TileM == 16 && Bits == 4;
  static constexpr int kTileM = TileM, kRows = kThree ? 192 : 128;  // of x, of weights
  static constexpr bool kFp8 = std::is_same_v<T, Fp8>, kInt8 = std::is_same_v<T, int8_t>;
  using Scaling = std::conditional_t<kInt8, IntegerDequantizer, ScalingDequantizer<Bits>>;
  using Weights = std::conditional_t<ScaleWeights, Scaling, Dequantizer<T, Bits, false>>;
  using Term = typename Weights::Term;
  using Sum = std::conditional_t<kInt8, int32_t, float>;
  using Epilogue = std::conditional_t<kInt8, EpilogueArgs<false>, NoEpilogue>;  // of rows of x and of weights
  // Columns that are dequantized while those before are multiplied, and those of an instruction.
  static constexpr bool kWholeSteps = Persistent && !kThree && (TileM <= 32 || kFp8);
  static constexpr int kChunk = kInt8 && TileM <= 64 ? kStep : std::min(Unit, kWholeSteps ? kStep : 64);
  static constexpr int kChunks = kStep / kChunk;
  static constexpr int kFragmentK = 32 / int(sizeof(Element)), kFragments = kChunk / kFragmentK;
  static constexpr int kColumnsX = kRowBytes / int(sizeof(Element)), kBoxesX = kStep / kColumnsX;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, Sum,
                                 cute::Shape<cute::_64, cute::Int<TileM>, cute::Int<kFragmentK>>>(),
      cute::Layout<cute::Shape<cute::Int<kRows / 64>, cute::_1, cute::_1>>{}));
  static constexpr int kBits = Bits;
  static constexpr int kPitch = kRows + 4;  // of sums: the stores of fragments hit distinct banks
  static constexpr int kMathWarps = kRows / 16, kMathThreads = 32 * kMathWarps;
  static constexpr bool kScaleWeights = ScaleWeights, kPersistent = Persistent, kWindows = Windows;
  static constexpr int kUnit = Unit;                                 // columns that have a term
  static constexpr int kShare = Persistent && TileM >= 256 ? 2 : 1;  // blocks of a cluster that share x
  static constexpr int kBlocksPerSm = TileM <= 16 && !Persistent ? 2 : 1;
  // Where math warps need more registers than there are for each, the others make a warpgroup, which leaves them some.
  static constexpr bool kMovesRegisters = TileM >= 64 || Persistent;
  static constexpr int kThreads = kMathThreads + (kMovesRegisters ? 128 : 64);
  // Of a lane; together no more than the block has at its launch.
  static constexpr int kRegisters = kThree ? 88 : 72, kMathRegisters = kThree ? 136 : 216;
  static constexpr int kTermsWarps = kMovesRegisters ? 2 : 1;
  // Each block of a cluster loads a box of so many rows of x, and then the next ones.
  static constexpr int kBoxRows = Persistent && !Windows && TileM >= 64 ? 32 : TileM / kShare;
  static constexpr int kBytesX = kRowBytes * TileM, kBoxesW = Bits / 4, kTerms = kStep / kUnit;  // of a stage
  static constexpr int kWords = (kFp8 ? 8 : 4) * kBoxesW;  // that a lane takes of a row of a stage
  static constexpr int kStageBytes =
      kBoxesX * kBytesX + kBoxesW * kRows * kBoxBytes + kTerms * kRows * int(sizeof(Term));
  // What persistent blocks have of results in shared memory: slots, each of so many rows of x.
  static constexpr int kSlotRows = std::min(TileM, 64), kSlotBytes = Persistent ? 2 * kRows * kSlotRows : 0;
  static constexpr int kBytes = 227 * 1024 / kBlocksPerSm - 2048;
  static constexpr int kStages = std::min(8, (kBytes - kSlotBytes) / kStageBytes);
  static constexpr int kSlots =
      Persistent ? std::min(TileM / kSlotRows, (kBytes - kStages * kStageBytes) / kSlotBytes) : 0;
  // Where there are few stages, the halves of a stage's x come and go by themselves.
  static constexpr bool kHalves = TileM >= 128 && kBoxesX == 2;
  struct Stages {
    alignas(1024) uint8_t x[kStages][kBoxesX][kBytesX];
    alignas(128) uint8_t w[kStages][kBoxesW][kRows][kBoxBytes];
    alignas(16) Term terms[kStages][kTerms][kRows];
    uint64_t full[kStages], empty[kStages], second_full[kStages], second_empty[kStages], met, added;
  };
  struct StagesAndSlots : Stages {
    alignas(1024) uint8_t slots[std::max(kSlots, 1)][kRows / 64][kSlotRows][kRowBytes];
  };
  using Shared = std::conditional_t<Persistent, StagesAndSlots, Stages>;
  static_assert(kStages >= 2, "a stage is free again when the next one's products are under way");
  static_assert(Persistent || (TileM + 7) * kPitch * 4 <= kStageBytes * kStages, "sums take the place of the stages");
};

template <class T, int Bits, int TileM, bool ScaleWeights, int Unit = ScaleWeights ? 64 : kStep>
using PersistentSm90 = ConfigSm90<T, Bits, TileM, ScaleWeights, Unit, true>;
template <class T, int Bits, int TileM, bool ScaleWeights>
using WindowsSm90 = ConfigSm90<T, Bits, TileM, ScaleWeights, ScaleWeights ? 64 : kStep, true, true>;

}  // namespace jax_qmm::block_scaled
