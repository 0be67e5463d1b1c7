// Writes weights as floats, for XLA to multiply: (q - zero_point) * scale in float32, rounded once. Neighbouring
// threads have neighbouring columns of a row, 8 of which lie in the same place of 4 parts that are 16 bytes apart.
#include "block_scaled_mm/dequantize.cuh"
#include "block_scaled_mm/instances.h"
#include "core/launch.cuh"
#include "core/prepare.h"

namespace jax_qmm::block_scaled {
namespace {

constexpr int kThreads = 256, kColumns = 8;  // of a thread
constexpr int kRows = 4;                     // of a block, for more loads under way

struct Weights {
  uint8_t const* w;
  void* out;
  int n, k, block;
  unsigned row_bytes, groups, tiles_n, tiles_k;
  int64_t w_batch_stride;
  BlockScaledMm::Blocks scale, zero_point;
  bool aligned;  // whether a thread's results can be stored at once
};

__device__ float load(BlockScaledMm::Blocks const& from, int64_t at) {
  if (from.dtype == DType::kS8) return static_cast<int8_t const*>(from.data)[at];
  uint32_t const bits = bytes_of(from.dtype) == 2 ? static_cast<uint16_t const*>(from.data)[at]
                                                  : static_cast<uint32_t const*>(from.data)[at];
  return to_float(bits, from.dtype);
}

template <class T>
__device__ T round_to(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return kIsBf16<T> ? T(__float2bfloat16_rn(value)) : T(__float2half_rn(value));
  }
}

template <class T, int kBits>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(Weights const p) {
  begin();
  unsigned const tile = blockIdx.x / p.tiles_k;
  int const column = (blockIdx.x % p.tiles_k * kThreads + threadIdx.x) * kColumns;
  int const first_n = tile % p.tiles_n * kRows, l = tile / p.tiles_n;
  if (column >= p.k) return;
  constexpr int kChunks = 64 * 8 / kBits / kColumns;  // in 64 bytes
  constexpr int kOfWord = kChunks / 4;                // 4 or 2, beside each other
  unsigned const chunk = column / kColumns, group = min(unsigned(column) / p.block, p.groups - 1);
  unsigned const at = chunk / kChunks * 64 + chunk % kChunks / kOfWord * 4;
  unsigned const shift = chunk % kOfWord * (kBits == 4 ? 4 : 16);

  uint32_t words[kRows][4];
  float scales[kRows], zeros[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    int64_t const n = min(first_n + i, p.n - 1), of_block = n * p.groups + group;
    uint8_t const* const row = p.w + l * p.w_batch_stride + n * p.row_bytes + at;
#pragma unroll
    for (int t = 0; t < 4; ++t) words[i][t] = *reinterpret_cast<uint32_t const*>(row + 16 * t);
    scales[i] = load(p.scale, l * p.scale.batch_stride + of_block);
    if (p.zero_point.data != nullptr) zeros[i] = load(p.zero_point, l * p.zero_point.batch_stride + of_block);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    int const n = first_n + i;
    if (n >= p.n) return;
    struct alignas(16) {
      T values[kColumns];
    } results;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      uint32_t const bits = words[i][j / 2] >> (shift + j % 2 * (kBits == 4 ? 16 : 8));
      int const q = int(bits & ((1 << kBits) - 1)) - (1 << (kBits - 1));
      results.values[j] = round_to<T>((float(q) - zeros[i]) * scales[i]);
    }
    T* const to = static_cast<T*>(p.out) + (int64_t(l) * p.n + n) * p.k + column;
    if (p.aligned) {
      *reinterpret_cast<decltype(results)*>(to) = results;
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (column + j < p.k) to[j] = results.values[j];
      }
    }
  }
}

using Kernel = void (*)(Weights);

template <class T>
Kernel kernel_of(int bits) {
  return bits == 4 ? dequantize_kernel<T, 4> : dequantize_kernel<T, 8>;
}

Kernel kernel_of(DType out, int bits) {
  if (out == DType::kF32) return kernel_of<float>(bits);
  return out == DType::kBF16 ? kernel_of<__nv_bfloat16>(bits) : kernel_of<__half>(bits);
}

}  // namespace

cudaError_t prepare_dequantize_weights() {
  for (DType const out : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (int const bits : {4, 8}) {
      bool fits;
      void const* const kernel = reinterpret_cast<void const*>(kernel_of(out, bits));
      if (cudaError_t const error = prepare_kernel(kernel, {1, kThreads}, fits)) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace jax_qmm::block_scaled

namespace jax_qmm {

cudaError_t dequantize_weights(BlockScaledMm const& problem, Submit const& submit) {
  using namespace block_scaled;
  if (problem.batch == 0 || problem.n == 0 || problem.k == 0) return cudaSuccess;
  Weights p{};
  p.w = problem.w, p.out = problem.out;
  p.n = problem.n, p.k = problem.k, p.block = problem.block;
  p.row_bytes = problem.row_bytes(), p.groups = problem.groups();
  p.tiles_n = unsigned(ceil_div(problem.n, kRows)), p.tiles_k = unsigned(ceil_div(problem.k, kThreads * kColumns));
  p.w_batch_stride = problem.w_batch_stride;
  p.scale = problem.scale, p.zero_point = problem.zero_point;
  p.aligned = problem.k % kColumns == 0 && reinterpret_cast<uintptr_t>(problem.out) % 16 == 0;
  unsigned const blocks = p.tiles_k * p.tiles_n * unsigned(problem.batch);
  return launch(submit, {blocks, kThreads}, kernel_of(problem.out_dtype, problem.bits), p);
}

}  // namespace jax_qmm
