// What Hopper's kernels have in common: their operands in shared memory, of which TMA brings a stage after the other.
#pragma once

#include <type_traits>

#include "block_quantized_mm/instances.h"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cuda_host_adapter.hpp"

namespace jax_qmm::block_quantized {

constexpr int kStep = 128;  // columns of a stage, the span of TMA's swizzle

// Of the operands, and of a block's sums.
template <DType In>
struct TypesOf {
  using Element = std::conditional_t<In == DType::kS8, int8_t, cutlass::float_e4m3_t>;
  using Sum = std::conditional_t<In == DType::kS8, int32_t, float>;
};

struct Side {
  int rows;
  InBlocks blocks;
  bool batched;
};

// A ring's next place, and the parity of its turn.
template <int kPlaces>
struct Ring {
  int at = 0, turn = 0;

  __device__ void advance() {
    if (++at == kPlaces) at = 0, ++turn;
  }
};

struct TilePlace {
  int l, across, down;
};

// Bands of tiles, each from its first row to its last: what runs at once reads few rows of either operand.
__device__ inline TilePlace place_in_bands(unsigned tile, int tiles_across, int tiles_down) {
  constexpr int kBand = 16;
  int const of_entry = tiles_across * tiles_down, l = tile / of_entry;
  int const band = tile % of_entry / (kBand * tiles_down) * kBand;
  int const wide = min(kBand, tiles_across - band), in_band = tile % of_entry - band * tiles_down;
  return {l, band + in_band % wide, in_band / wide};
}

// Rounds of products into one of two sets of sums in turn: `multiply` begins the first one, `step` the next one into
// the second set it is given while it adds the first, and `last` adds what is left. Without branches around products
// whose sums others take: ptxas would have each wait for those before it.
template <class Multiply, class Step, class Last>
__device__ void alternate(int rounds, Multiply const& multiply, Step const& step, Last const& last) {
  constexpr std::integral_constant<int, 0> kFirst;
  constexpr std::integral_constant<int, 1> kSecond;
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
}

// Whether the terms of four blocks can be loaded at once.
inline bool has_fours(BlockQuantizedMm const& p) {
  auto const of_side = [](InBlocks const& side) {
    auto const address = [](InBlocks::Vector const& vector) { return reinterpret_cast<uintptr_t>(vector.data); };
    return (address(side.scale) | address(side.zero_point) | address(side.sums)) % 16 == 0;
  };
  return p.groups() % kBlocksOfSlot == 0 && of_side(p.of_a) && of_side(p.of_b);
}

inline cudaError_t encode_boxes(void const* data, CUtensorMapDataType type, int bytes, int columns, int rows,
                                int entries, int box_rows, CUtensorMap& boxes) {
  cuuint64_t const sizes[] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(entries)};
  cuuint64_t const row = cuuint64_t(columns) * bytes, strides[] = {row, row * rows};
  cuuint32_t const box[] = {cuuint32_t(kStep / bytes), cuuint32_t(box_rows), 1}, each[] = {1, 1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &boxes, type, 3, const_cast<void*>(data), sizes, strides, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Has TMA load boxes of so many rows of one stage, and zeros for what is beyond.
inline cudaError_t make_boxes(void const* data, int k, int rows, int entries, int box_rows, CUtensorMap& boxes) {
  return encode_boxes(data, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, k, rows, entries, box_rows, boxes);
}

// Has TMA store boxes of 64 rows of 128 bytes of results, without what is beyond.
inline cudaError_t make_boxes_of_results(BlockQuantizedMm const& p, CUtensorMap& boxes) {
  bool const halves = bytes_of(p.out_dtype) == 2;
  auto const type = halves ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  return encode_boxes(p.out, type, halves ? 2 : 4, p.n, p.m, p.batch, 64, boxes);
}

}  // namespace jax_qmm::block_quantized
