// What the kernels have in common: their arguments, what is known of them when they are compiled, and how x comes to
// shared memory, and weights with the terms of their blocks to registers.
#pragma once

#include <algorithm>
#include <array>

#include "block_scaled_mm/dequantize.cuh"
#include "block_scaled_mm/instances.h"
#include "core/async_copy.cuh"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::block_scaled {

struct Params {
  void const* x;
  uint8_t const* w;
  void* out;
  int m, n, k;
  unsigned row_bytes, groups;
  unsigned block_inverse;  // 2^32 over twice the units of a block; 0 where a row has one
  BlockScaledMm::Blocks scale, zero_point;
  int64_t x_batch_stride, w_batch_stride;
  bool aligned;      // whether rows of x start at multiples of 16 bytes
  bool stores_four;  // whether four results of a row can be stored at once
  unsigned tiles_m, tiles_n;
  int k_of_part;  // whole steps
  // Of direct.cuh: blocks that share the tiles, and a warp's bytes of shared memory, how many warps have theirs in what
  // is static, steps of a tile, how many of these are on their way, and for how many x has a place: all, or those on
  // their way.
  unsigned blocks_n;
  int warp_bytes, static_warps, steps, stages, x_steps;
  float* parts;  // [parts][batch][m][n], where sums go if K is split over blocks, or null
  int64_t sums_of_part;
  VectorArg<float, false> bias;
  DType out_dtype;
  Activation activation;
  float low, high;

  __device__ FullOutput output() const { return {out_dtype, activation, low, high, quantize::AnyDivisor(1.0f), 0.0f}; }
};

// Adds the sums of all parts of K, [parts][rows_of_part][kPitch], in their order, and writes `rows` of them from
// first_m on, up to column end_n: the results, or sums for add_parts. Most have no activation and whole stores, for
// which the loop is short: blocks run it once, at the speed of its way to the SM.
template <int kRows, int kPitch, int kThreads>
__device__ void write_rows(Params const& p, float const* partial, int parts, int rows_of_part, int rows, int l,
                           int first_m, int first_n, int end_n) {
  constexpr int kEach = 4, kAcross = kRows / kEach, kDown = kThreads / kAcross;
  int const column = threadIdx.x % kAcross * kEach, n = first_n + column, columns = min(kEach, end_n - n);
  if (columns <= 0) return;
  auto const sums_of = [&](int row, float const(&bias)[kEach]) {
    auto const of = [&](int part) {
      return *reinterpret_cast<float4 const*>(&partial[(part * rows_of_part + row) * kPitch + column]);
    };
    float4 sum = of(0);
    for (int part = 1; part < parts; ++part) {
      float4 const more = of(part);
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    return std::array{sum.x + bias[0], sum.y + bias[1], sum.z + bias[2], sum.w + bias[3]};
  };
  int const first_row = threadIdx.x / kAcross;
  int64_t const at = (int64_t(l) * p.m + first_m) * p.n + n;
  float bias[kEach] = {};
  if (p.parts != nullptr) {
    float* const to = p.parts + blockIdx.y * p.sums_of_part + at;
    for (int row = first_row; row < rows; row += kDown) {
      auto const sums = sums_of(row, bias);
      for (int j = 0; j < columns; ++j) to[int64_t(row) * p.n + j] = sums[j];
    }
    return;
  }
  for (int j = 0; j < columns; ++j) bias[j] = p.bias.load(l, n + j);
  int const integers[kEach] = {};
  auto const write = [&](auto bits) {
    using Bits = decltype(bits);
    struct alignas(kEach * sizeof(Bits)) Whole {
      Bits bits[kEach];
    };
    Bits* const to = static_cast<Bits*>(p.out) + at;
    if (p.activation == Activation::kNone && p.stores_four) {
#pragma unroll 4
      for (int row = first_row; row < rows; row += kDown) {
        Whole const whole = PlainOutput{p.out_dtype}.round<Whole, kEach>(sums_of(row, bias), integers);
        *reinterpret_cast<Whole*>(to + int64_t(row) * p.n) = whole;
      }
      return;
    }
    FullOutput const output = p.output();
#pragma unroll 1
    for (int row = first_row; row < rows; row += kDown) {
      Whole const whole = output.template round<Whole, kEach>(sums_of(row, bias), integers);
      Bits* const here = to + int64_t(row) * p.n;
      if (p.stores_four) {
        *reinterpret_cast<Whole*>(here) = whole;
      } else {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          if (j < columns) here[j] = whole.bits[j];
        }
      }
    }
  };
  bytes_of(p.out_dtype) == 2 ? write(BitsOf<2>()) : write(BitsOf<4>());
}

template <class C>
Params make_params(BlockScaledMm const& problem) {
  Params p{};
  p.x = problem.x, p.w = problem.w, p.out = problem.out;
  p.m = problem.m, p.n = problem.n, p.k = problem.k;
  p.row_bytes = problem.row_bytes(), p.groups = problem.groups();
  p.scale = problem.scale, p.zero_point = problem.zero_point;
  p.x_batch_stride = problem.x_batch_stride, p.w_batch_stride = problem.w_batch_stride;
  p.aligned = (reinterpret_cast<uintptr_t>(problem.x) | uintptr_t(problem.k) * bytes_of(problem.in)) % 16 == 0;
  int const out_bytes = bytes_of(problem.out_dtype);
  p.stores_four = problem.n % 4 == 0 && reinterpret_cast<uintptr_t>(problem.out) % (4 * out_bytes) == 0;
  Vector const& bias = problem.bias;
  p.bias = {bias.data, bias.dtype, bias.stride, bias.batch_stride, bias.bytes, -0.0f};
  p.tiles_m = unsigned(ceil_div(problem.m, C::kTileM)), p.tiles_n = unsigned(ceil_div(problem.n, C::kRows));
  p.block_inverse = problem.block >= problem.k ? 0 : unsigned(ceil_div(1ll << 31, problem.block / C::kUnit));
  p.out_dtype = problem.out_dtype;
  p.activation = problem.activation;
  p.low = problem.low, p.high = problem.high;
  p.k_of_part = problem.k;
  p.sums_of_part = sums_of_part(problem);
  return p;
}

// All that is known when the kernel is compiled. `Unit` columns are those between which sums are scaled.
template <class T, int Bits, bool FloatZero, int Unit, int TileM, int TilesOfWarp, int WarpsN, int WarpsK>
struct Config {
  using Value = T;
  using Weights = Dequantizer<T, Bits, FloatZero>;
  static constexpr int kBits = Bits, kUnit = Unit, kTileM = TileM, kTiles = TilesOfWarp, kWarpsN = WarpsN,
                       kWarpsK = WarpsK;
  static constexpr bool kFloatZero = FloatZero;
  static constexpr int kThreads = 32 * WarpsN * WarpsK;
  static constexpr int kRows = 16 * TilesOfWarp * WarpsN;  // of weights, of a block
  static constexpr int kColumns = 512 / Bits;              // of a step of a warp: 64 bytes of a row
  static constexpr int kStep = WarpsK * kColumns;
  static constexpr int kStages = 3;
  static constexpr int kPitch = 2 * kStep, kStageBytes = TileM * kPitch;  // of x in shared memory
  static constexpr int kUnits = kColumns / Unit;                          // of a step of a warp
  static constexpr int kHeld = std::max(1, kUnits / 4);                   // by each lane of four that share a row
  static constexpr int kSumsPitch = kRows + 4;                            // the stores of fragments hit distinct banks
  static constexpr int kSharedBytes = std::max(kStages * kStageBytes, WarpsK * TileM * kSumsPitch * 4);
  // Of direct.cuh, whose warps all share K, two where registers allow it.
  static constexpr int kBlocksPerSm = WarpsN == 1 && !FloatZero && Unit > 16 ? 2 : 1;
  // Where registers are short, what was loaded is moved to where it is multiplied from; elsewhere two steps are
  // unrolled, which take turns.
  static constexpr bool kMoves =
      FloatZero || TileM >= 64 || (TileM >= 32 && Unit < kColumns) || (TileM >= 16 && Unit == 16);
  static_assert(kThreads % (kStep / 8) == 0, "a thread copies the same columns of several rows of x");
};

// A thread's share of a step's x: 8 columns of every few rows. What is beyond x becomes zeros.
template <class C>
class SourceOfX {
 public:
  using Params = block_scaled::Params;
  static constexpr bool kWindows = false;

  static Params make_params(BlockScaledMm const& problem) { return block_scaled::make_params<C>(problem); }

  __device__ SourceOfX(Params const& p, int l, int first_m, int k_begin, int k_end)
      : first_row_(threadIdx.x / kChunks),
        chunk_(threadIdx.x % kChunks),
        rows_(p.m - first_m),
        columns_(k_end - k_begin - 8 * chunk_),
        k_(p.k),
        aligned_(p.aligned),
        from_(static_cast<uint16_t const*>(p.x) + l * p.x_batch_stride + int64_t(first_m + first_row_) * k_ + k_begin +
              8 * chunk_) {}

  // Writes the zeros of rows that are not there, once for all steps.
  __device__ void clear(uint32_t stages) const {
    for (int i = 0; i < C::kTileM; i += kRowsAtOnce) {
      int const row = first_row_ + i;
      if (row < rows_ || row >= C::kTileM) continue;
      for (int s = 0; s < C::kStages; ++s) store(stages + s * C::kStageBytes, row, {});
    }
  }

  // Starts the copies of the next step.
  __device__ void copy(uint32_t to) {
    if (aligned_) {
#pragma unroll
      for (int i = 0; i < C::kTileM; i += kRowsAtOnce) {
        int const row = first_row_ + i;
        if (row >= min(rows_, C::kTileM)) break;
        auto* const from = reinterpret_cast<uint8_t const*>(from_ + i * k_);
        copy_async<16>(to + swizzled<C::kPitch>(row, chunk_), from, columns_ > 0);
      }
    } else {
      copy_elements(to);
    }
    from_ += C::kStep;
    columns_ -= C::kStep;
  }

 private:
  static constexpr int kChunks = C::kStep / 8, kRowsAtOnce = C::kThreads / kChunks;

  // A loop, so that it takes no registers from the other case.
  __device__ void copy_elements(uint32_t to) const {
#pragma unroll 1
    for (int i = 0; i < C::kTileM; i += kRowsAtOnce) {
      int const row = first_row_ + i;
      if (row >= min(rows_, C::kTileM)) break;
      uint32_t words[4] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < columns_) words[j / 2] |= uint32_t(from_[i * k_ + j]) << 16 * (j % 2);
      }
      store(to, row, words);
    }
  }

  __device__ void store(uint32_t to, int row, uint32_t const (&words)[4]) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + swizzled<C::kPitch>(row, chunk_)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }

  int first_row_, chunk_, rows_, columns_;
  int64_t k_;
  bool aligned_;
  uint16_t const* from_;
};

// What a lane holds of a step of its warp: 16 bytes of each of its rows of weights, and of their blocks' scales and
// zero points those that it shares with the other three lanes of these rows.
template <class C>
struct Held {
  uint32_t words[C::kTiles][2][4], scales[C::kTiles][2][C::kHeld], zeros[C::kTiles][2][C::kHeld];
};

// Lanes 4g .. 4g + 3 have rows g and g + 8 of each tile of 16. Rows beyond the matrix repeat its last one.
template <class C>
class SourceOfWeights {
 public:
  __device__ SourceOfWeights(Params const& p, int l, int first_n, int warp_k, int k_begin, int k_end)
      : p_(p),
        scales_(pointer(p.scale, l, first_n)),
        zeros_(pointer(p.zero_point, l, first_n)),
        column_(k_begin + warp_k * C::kColumns),
        end_(k_end),
        held_unit_(threadIdx.x % 4 % C::kUnits) {
    int const row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const n = min(16 * i + 8 * h + row, p.n - 1 - first_n);  // may be negative
        words_[i][h] = p.w + l * p.w_batch_stride + (int64_t(first_n) + n) * p.row_bytes + column_ / 8 * C::kBits +
                       threadIdx.x % 4 * 16;
        first_group_[i][h] = n * int(p.groups);
      }
    }
  }

  // Whether the next step has columns for this warp.
  __device__ bool more() const { return column_ < end_; }

  // Of the next step, if there is one.
  __device__ void load(Held<C>& held) {
    if (more()) {
#pragma unroll
      for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) load(held.words[i][h], words_[i][h]);
      }
#pragma unroll
      for (int u = 0; u < C::kHeld; ++u) {
        int const unit = column_ / C::kUnit + held_unit_ + 4 * u;
        bool const there = C::kUnits == 1 || unit * C::kUnit < end_;  // or it has zeros of x, and shall have one of w
        int const group = there ? __umulhi(2 * unit, p_.block_inverse) : 0;
        load_floats(p_.scale.dtype, scales_, group, there, held.scales, u);
        if (zeros_ == nullptr) continue;
        if (p_.zero_point.dtype == DType::kS8) {
          load_as<uint8_t>(zeros_, group, true, held.zeros, u);
        } else if constexpr (C::kFloatZero) {
          load_floats(p_.zero_point.dtype, zeros_, group, true, held.zeros, u);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) words_[i][h] += 64 * C::kWarpsK;
    }
    column_ += C::kStep;
  }

 private:
  using Values = uint32_t[C::kTiles][2][C::kHeld];

  __device__ void const* pointer(BlockScaledMm::Blocks const& blocks, int l, int n) const {
    if (blocks.data == nullptr) return nullptr;
    int64_t const at = l * blocks.batch_stride + int64_t(n) * p_.groups;
    return static_cast<uint8_t const*>(blocks.data) + at * bytes_of(blocks.dtype);
  }

  template <class T>
  __device__ void load_as(void const* from, int group, bool there, Values& to, int u) const {
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t const bits = static_cast<T const*>(from)[first_group_[i][h] + group];
        to[i][h][u] = there ? bits : 0;
      }
    }
  }

  // The dtype is asked for once, not for each value.
  __device__ void load_floats(DType dtype, void const* from, int group, bool there, Values& to, int u) const {
    if (bytes_of(dtype) == 2) {
      load_as<uint16_t>(from, group, there, to, u);
    } else {
      load_as<uint32_t>(from, group, there, to, u);
    }
  }

  // Weights are read once, and leave the L1 cache to x and scales.
  __device__ static void load(uint32_t (&to)[4], uint8_t const* from) {
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from)
                 : "memory");
  }

  Params const& p_;
  void const *scales_, *zeros_;
  int column_, end_, held_unit_;
  uint8_t const* words_[C::kTiles][2];
  int first_group_[C::kTiles][2];
};

}  // namespace jax_qmm::block_scaled
