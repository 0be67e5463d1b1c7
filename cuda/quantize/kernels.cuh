// The kernels of the quantizers.
#pragma once

#include "core/launch.cuh"
#include "quantize/chunk.cuh"

namespace jax_qmm::quantize {

// The largest blocks: of those that share a row or tensor, and of those that hold a row.
constexpr int kPieceThreads = 256;
template <int V, int N>
constexpr bool kSmallRows = V > 1 && N < 8;
template <int V, int N>
constexpr int kRowThreads = kSmallRows<V, N> ? 512 : 1024;

// Where several rows share a warp: of a block, and chunks of a thread.
constexpr int kShortThreads = 128, kShortChunks = 4;

// Of an SM, to which the compiler fits registers. Turing's has no more.
#if __CUDA_ARCH__ >= 800
constexpr int kSmThreads = 1536;
#else
constexpr int kSmThreads = 1024;
#endif

// The maximum and the sum of the lanes of a warp, for which Turing has no instructions.
constexpr unsigned kAllLanes = 0xffffffff;
__device__ inline uint32_t max_of_lanes(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
  for (int apart = 16; apart > 0; apart /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, apart));
  return x;
#endif
}
__device__ inline int32_t sum_of_lanes(int32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, x);
#else
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(kAllLanes, x, apart);
  return x;
#endif
}

// The union of the ranges of all threads of the warp, or of the block if it has one row of threads.
template <Kind kind>
__device__ Range reduce(Range range) {
  range.high = max_of_lanes(range.high);
  if (kind == Kind::kInt8ZeroPoint) range.low = max_of_lanes(range.low);
  if (blockDim.x > 32) {
    __shared__ Range warps[32];
    int const lane = threadIdx.x % 32;
    if (lane == 0) warps[threadIdx.x / 32] = range;
    __syncthreads();
    range = lane < blockDim.x / 32 ? warps[lane] : Range{};
    range.high = max_of_lanes(range.high);
    if (kind == Kind::kInt8ZeroPoint) range.low = max_of_lanes(range.low);
  }
  return range;
}

// Writes what a chunk becomes, and gives the sum of that, if it is asked for.
template <Kind kind, bool kBounded, bool kSums, class In, int V>
__device__ int32_t store(Chunk<In, V> const& c, uint8_t* out, Divisor divisor, float zero_point) {
  auto const quantized = [&](float x) {
    return shift<kind, kBounded>(divisor.divide_quickly<kBounded>(x), zero_point);
  };
  int32_t sum = 0;
  if constexpr (V == 1) {
    uint8_t const value = convert<kind>(quantized(c[0]));
    *out = value;
    if constexpr (kSums) sum = static_cast<int8_t>(value);
  } else {
    uint32_t words[V / 4];
#pragma unroll
    for (int w = 0; w < V / 4; ++w) {
      words[w] =
          convert<kind>(quantized(c[4 * w]), quantized(c[4 * w + 1]), quantized(c[4 * w + 2]), quantized(c[4 * w + 3]));
      if constexpr (kSums) sum = __dp4a(static_cast<int>(words[w]), 0x01010101, sum);
    }
    if constexpr (V == 4) {
      *reinterpret_cast<uint32_t*>(out) = words[0];
    } else {
      *reinterpret_cast<uint2*>(out) = {words[0], words[1]};
    }
  }
  return sum;
}

// N chunks of each of the blockDim.x threads that share a row of x: elements [first, first + blockDim.x * N * V) of it,
// as far as they exist.
template <class In, Kind kind, int V, int N>
struct Piece {
  static constexpr int kPerThread = N * V;
  Chunk<In, V> chunks[N];

  __device__ void load(In const* x, int64_t first, int64_t cols) {
    int const count = static_cast<int>(min(cols - first, int64_t{blockDim.x} * kPerThread));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      int const i = (j * blockDim.x + threadIdx.x) * V;
      chunks[j].clear();
      if (i < count) chunks[j].load(x + first + i);
    }
  }

  // Gives the sum of this thread's values, if it is asked for.
  template <bool kBounded, bool kSums>
  __device__ int32_t store(uint8_t* q, int64_t first, int64_t cols, Divisor divisor, float zero_point) const {
    int32_t sum = 0;
    int const count = static_cast<int>(min(cols - first, int64_t{blockDim.x} * kPerThread));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      int const i = (j * blockDim.x + threadIdx.x) * V;
      if (i >= count) break;
      sum += quantize::store<kind, kBounded, kSums>(chunks[j], q + first + i, divisor, zero_point);
    }
    return sum;
  }
};

// Every `step`th of the elements [first, end) of a row whose scale is none that Divisor is quick for: zero, minute,
// huge, negative or NaN. Rare, so one element at a time. Gives the sum of this thread's values, if it is asked for.
template <Kind kind, bool kSums, class In>
__device__ int32_t quantize_slowly(In const* x, uint8_t* q, int64_t first, int64_t end, unsigned step, float scale,
                                   float zero_point) {
  int32_t sum = 0;
#pragma unroll 1
  for (int64_t i = first; i < end; i += step) {
    uint8_t const value = convert<kind>(shift<kind, false>(static_cast<float>(x[i]) / scale, zero_point));
    q[i] = value;
    if constexpr (kSums) sum += static_cast<int8_t>(value);
  }
  return sum;
}

// Where the sums of the int8 values of each row go, if they are asked for: an argument without them, so that the
// kernels that compute none keep their machine code.
template <bool kSums>
struct Sums {
  int32_t* of_rows;
};
template <>
struct Sums<false> {};

// What all threads of a warp have of a row, in memory: without a barrier, as the other warps add theirs.
template <bool kSums>
__device__ void add_to_row(Sums<kSums> const& sums, int64_t row, int32_t of_thread) {
  if constexpr (kSums) {
    int32_t const sum = sum_of_lanes(of_thread);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums.of_rows[row], sum);
  }
}

// Dynamic, one scale for each row. Each row of threads takes one row of x, a piece at a time; where that is one piece,
// x is read once, otherwise a second time, from the L2 cache if it is not too long, starting with the piece at hand.
// Small rows always are one piece.
template <class In, Kind kind, int V, int N, bool kSums>
__global__ void __launch_bounds__(kRowThreads<V, N>, kSmThreads / kRowThreads<V, N>)
    quantize_rows(In const* x, uint8_t* q, int64_t rows, int64_t cols, float* scales, int32_t* zero_points,
                  Sums<kSums> sums) {
  begin();
  int64_t const row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  x += row * cols;
  q += row * cols;
  Piece<In, kind, V, N> piece;
  Bounds<kind, typename Chunk<In, V>::Lane> bounds;
  int64_t const step = int64_t{blockDim.x} * piece.kPerThread;
  int64_t first = 0;
  while (true) {
    piece.load(x, first, cols);
#pragma unroll
    for (auto const& chunk : piece.chunks) bounds.include(chunk);
    if (kSmallRows<V, N> || first + step >= cols) break;
    first += step;
  }

  if constexpr (kSums) {
    if (threadIdx.x == 0) sums.of_rows[row] = 0;  // before others of the block add to it, after a barrier
  }
  Range const range = reduce<kind>(bounds.range());
  Scale<kind> const scale(range);
  if (threadIdx.x == 0) {
    scales[row] = scale.scale;
    if (kind == Kind::kInt8ZeroPoint) zero_points[row] = scale.zero_point;
  }
  // Padding is common, and zeros stay the same zeros whatever divides them.
  Divisor const divisor(range.high == 0 && range.low == 0 ? 1.0f : scale.scale);
  float const zero_point = static_cast<float>(scale.zero_point);
  if (!divisor.quick)
    return add_to_row(sums, row,
                      quantize_slowly<kind, kSums>(x, q, threadIdx.x, cols, blockDim.x, scale.scale, zero_point));
  int32_t sum = 0;
  while (true) {
    sum += piece.template store<true, kSums>(q, first, cols, divisor, zero_point);
    if (kSmallRows<V, N> || first == 0) break;
    first -= step;
    piece.load(x, first, cols);
  }
  add_to_row(sums, row, sum);
}

// Dynamic, one scale for each row of `kOfThread << log2_lanes` chunks, which up to a warp's lanes share. Each thread
// has kShortChunks, whose loads are on their way together: of one row, so that what is done once for a row is done for
// as many values as may be, or of several rows that are short.
template <class In, Kind kind, int kOfThread, bool kSums>
__global__ void __launch_bounds__(kShortThreads)
    quantize_short_rows(In const* x, uint8_t* q, int64_t rows, int log2_lanes, float* scales, int32_t* zero_points,
                        Sums<kSums> sums) {
  begin();
  constexpr int V = 16 / sizeof(In), kRows = kShortChunks / kOfThread;
  int const lanes = 1 << log2_lanes, lane = threadIdx.x & (lanes - 1);
  auto const row_of = [&](int i) {
    return (int64_t{blockIdx.x} * kRows + i) * kShortThreads + threadIdx.x >> log2_lanes;
  };
  auto const first_of = [&](int i, int j) { return (((row_of(i) * kOfThread + j) << log2_lanes) + lane) * V; };
  Chunk<In, V> chunks[kRows][kOfThread];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) {
      chunks[i][j].clear();
      if (row_of(i) < rows) chunks[i][j].load(x + first_of(i, j));
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    int64_t const row = row_of(i);
    bool const is_there = row < rows, is_first = is_there && lane == 0;
    Bounds<kind, typename Chunk<In, V>::Lane> bounds;
#pragma unroll
    for (auto const& chunk : chunks[i]) bounds.include(chunk);
    Range range = bounds.range();
    for (int apart = lanes / 2; apart > 0; apart /= 2) {
      range.high = max(range.high, __shfl_xor_sync(kAllLanes, range.high, apart));
      if (kind == Kind::kInt8ZeroPoint) range.low = max(range.low, __shfl_xor_sync(kAllLanes, range.low, apart));
    }
    Scale<kind> const scale(range);
    if (is_first) {
      scales[row] = scale.scale;
      if (kind == Kind::kInt8ZeroPoint) zero_points[row] = scale.zero_point;
    }
    // Padding is common, and zeros stay the same zeros whatever divides them.
    Divisor const divisor(range.high == 0 && range.low == 0 ? 1.0f : scale.scale);
    float const zero_point = static_cast<float>(scale.zero_point);
    int32_t sum = 0;
    if (is_there) {
#pragma unroll
      for (int j = 0; j < kOfThread; ++j) {
        int64_t const first = first_of(i, j);
        if (divisor.quick) {
          sum += store<kind, true, kSums>(chunks[i][j], q + first, divisor, zero_point);
        } else {
          sum += quantize_slowly<kind, kSums>(x, q, first, first + V, 1, scale.scale, zero_point);
        }
      }
    }
    if constexpr (kSums) {
      for (int apart = lanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
      if (is_first) sums.of_rows[row] = sum;
    }
  }
}

__global__ void clear(uint32_t* words) {
  begin();
  words[threadIdx.x] = 0;
}

__global__ void __launch_bounds__(kPieceThreads) clear_sums(int32_t* of_rows, int64_t rows) {
  begin();
  int64_t const row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row < rows) of_rows[row] = 0;
}

// The range of a whole tensor, into two words that were zero.
template <class In, Kind kind, int V, int N>
__global__ void __launch_bounds__(kPieceThreads) find_range(In const* x, int64_t size, uint32_t* words) {
  begin();
  Bounds<kind, typename Chunk<In, V>::Lane> bounds;
  Piece<In, kind, V, N> piece;
  int64_t const step = int64_t{blockDim.x} * piece.kPerThread;
  for (int64_t first = blockIdx.x * step; first < size; first += gridDim.x * step) {
    piece.load(x, first, size);
#pragma unroll
    for (auto const& chunk : piece.chunks) bounds.include(chunk);
  }
  Range const range = reduce<kind>(bounds.range());
  if (threadIdx.x == 0) {
    atomicMax(&words[0], range.high);
    if (kind == Kind::kInt8ZeroPoint) atomicMax(&words[1], range.low);
  }
}

// Given scales, each of `scale_stride` rows apart, or the range of the tensor in `words`: then the scale follows from
// it and is written. Pieces of a row are independent; the last goes first, because find_range has left it in the L2
// cache. Sums that are asked for were zero.
template <class In, Kind kind, int V, int N, bool kSums>
__global__ void __launch_bounds__(kPieceThreads, V > 1 && kSmThreads > 1024 ? 5 : 4)
    quantize_given(In const* x, uint8_t* q, int64_t rows, int64_t cols, float* scales, int32_t* zero_points,
                   int scale_stride, uint32_t const* words, Sums<kSums> sums) {
  begin();
  Piece<In, kind, V, N> piece;
  int64_t const step = int64_t{blockDim.x} * piece.kPerThread;
  int64_t const first = (gridDim.x - 1 - blockIdx.x) * step;
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < rows; row += gridDim.y * blockDim.y) {
    piece.load(x + row * cols, first, cols);
    auto const scale = [&]() -> Scale<kind> {
      if (words != nullptr) return Scale<kind>(Range{words[0], words[1]});
      return {scales[row * scale_stride], kind == Kind::kInt8ZeroPoint ? zero_points[row * scale_stride] : 0};
    }();
    if (words != nullptr && first == 0 && row == 0 && threadIdx.x == 0) {
      scales[0] = scale.scale;
      if (kind == Kind::kInt8ZeroPoint) zero_points[0] = scale.zero_point;
    }
    Divisor const divisor(scale.scale);
    float const zero_point = static_cast<float>(scale.zero_point);
    int32_t sum;
    if (divisor.quick) {
      sum = piece.template store<false, kSums>(q + row * cols, first, cols, divisor, zero_point);
    } else {
      sum = quantize_slowly<kind, kSums>(x + row * cols, q + row * cols, first + threadIdx.x, min(first + step, cols),
                                         blockDim.x, scale.scale, zero_point);
    }
    add_to_row(sums, row, sum);
  }
}

}  // namespace jax_qmm::quantize
