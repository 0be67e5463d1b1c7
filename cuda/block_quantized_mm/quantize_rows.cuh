// Quantizing a few rows of floats in blocks of columns on the way to a product, bit for bit as quantizers do.
#pragma once

#include "quantize/chunk.cuh"

namespace jax_qmm::block_quantized {

struct QuantizedBlock {
  float scale, zero_point;
  int32_t sum;  // of its values less their zero point, if it is asked for
};

constexpr int kPiece = 256;  // columns that a warp quantizes at a time, 8 in each lane

// A lane's values, in chunks of 16 bytes.
template <class In>
struct Eight {
  static constexpr int kOfChunk = 16 / sizeof(In);
  using Part = quantize::Chunk<In, kOfChunk>;
  Part parts[8 / kOfChunk];

  __device__ void load(In const* x) {
#pragma unroll
    for (int i = 0; i < 8 / kOfChunk; ++i) parts[i].load(x + i * kOfChunk);
  }
  __device__ void clear() {
    for (auto& part : parts) part.clear();
  }
  __device__ float operator[](int i) const { return parts[i / kOfChunk][i % kOfChunk]; }

  template <quantize::Kind kind>
  __device__ quantize::Range range() const {
    quantize::Bounds<kind, typename Part::Lane> bounds;
    for (auto const& part : parts) bounds.include(part);
    return bounds.range();
  }

  // All of them in 8 bits, as `quotient_of` and the zero point have them.
  template <quantize::Kind kind, bool kBounded, class Quotient>
  __device__ uint2 converted(float zero_point, Quotient const& quotient_of) const {
    auto const four = [&](int first) {
      auto const value = [&](int i) {
        return quantize::shift<kind, kBounded>(quotient_of((*this)[first + i]), zero_point);
      };
      return quantize::convert<kind>(value(0), value(1), value(2), value(3));
    };
    return {four(0), four(4)};
  }
};

// A place among the pieces of some rows.
struct Place {
  int row, piece;

  __device__ void advance(int by, int pieces) {
    for (piece += by; piece >= pieces; ++row) piece -= pieces;
  }
};

// Combines what `lanes` neighbours have.
template <class T, class Combine>
__device__ T of_lanes(T value, int lanes, Combine const& combine) {
  for (int apart = 1; apart < lanes; apart *= 2) value = combine(value, __shfl_xor_sync(0xffffffff, value, apart));
  return value;
}

// Quantizes columns [first, end) of rows of k floats, with a scale for each 2^log2_block of them. Both ends are
// multiples of 8. Calls keep_values(row, column - first, words) with 8 values side by side, beyond the end with zeros
// for all of a piece, and keep_block(row, (column - first) / block, ...) with what each block has.
template <quantize::Kind kind, bool kSums, int kWarps, class In, class KeepValues, class KeepBlock>
__device__ void quantize_rows(In const* x, int rows, int k, int first, int end, int log2_block,
                              KeepValues const& keep_values, KeepBlock const& keep_block) {
  using namespace quantize;
  constexpr int kAtOnce = 4;                                         // pieces whose loads a warp starts together
  int const lane = threadIdx.x % 32, lanes = (1 << log2_block) / 8;  // of a block
  int const pieces = (end - first + kPiece - 1) / kPiece;
  Place place{0, 0};
  place.advance(threadIdx.x / 32, pieces);
  while (place.row < rows) {
    Eight<In> loaded[kAtOnce];
    Place ahead = place;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const column = first + ahead.piece * kPiece + 8 * lane;
      loaded[i].clear();
      if (ahead.row < rows && column < end) loaded[i].load(x + int64_t(ahead.row) * k + column);
      ahead.advance(kWarps, pieces);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (place.row >= rows) break;
      int const column = place.piece * kPiece + 8 * lane;
      auto const larger = [](uint32_t a, uint32_t b) { return max(a, b); };
      Range range = loaded[i].template range<kind>();
      range.high = of_lanes(range.high, lanes, larger);
      if (kind == Kind::kInt8ZeroPoint) range.low = of_lanes(range.low, lanes, larger);
      Scale<kind> const scale(range);
      // Padding is common, and zeros stay the same zeros whatever divides them.
      Divisor const divisor(range.high == 0 && range.low == 0 ? 1.0f : scale.scale);
      float const zero_point = static_cast<float>(scale.zero_point);
      uint2 words;
      if (divisor.quick) {
        auto const divide = [&](float value) { return divisor.divide_quickly<true>(value); };
        words = loaded[i].template converted<kind, true>(zero_point, divide);
      } else {  // minute, huge or NaN
        words = loaded[i].template converted<kind, false>(zero_point, [&](float value) { return value / scale.scale; });
      }
      bool const is_there = first + column < end;
      if (!is_there) words = {0, 0};
      keep_values(place.row, column, words);
      int32_t sum = 0;
      if constexpr (kSums) {
        constexpr int kOnes = 0x01010101;
        sum = __dp4a(static_cast<int>(words.x), kOnes, __dp4a(static_cast<int>(words.y), kOnes, 0));
        if (is_there) sum -= 8 * scale.zero_point;
        sum = of_lanes(sum, lanes, [](int a, int b) { return a + b; });
      }
      if (lane % lanes == 0) keep_block(place.row, column >> log2_block, QuantizedBlock{scale.scale, zero_point, sum});
      place.advance(kWarps, pieces);
    }
  }
}

}  // namespace jax_qmm::block_quantized
