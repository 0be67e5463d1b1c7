// The product for operands that TMA can't describe: any alignment, any N and K, K = 0 too. Warp-level tensor cores on
// 64 x 64 tiles.
#include "core/launch.cuh"
#include "core/mma.cuh"
#include "core/prepare.h"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/generic.h"

namespace jax_qmm {
namespace {

constexpr int kTile = 64;           // rows, columns and K bytes of a tile
constexpr int kPitch = kTile + 16;  // bytes between rows in shared memory: the fragments' loads hit 32 distinct banks
constexpr int kThreads = 128;       // 2 x 2 warps of 32 x 32
constexpr int kWordsPerThread = kTile * kTile / 4 / kThreads;

template <bool kFull>
struct Params {
  uint8_t const* a;
  uint8_t const* b;
  void* out;
  int m, n, k;
  int64_t a_batch_stride, b_batch_stride;
  int vector_bytes;  // what every row's start is aligned to: 4 or 1
  EpilogueArgs<kFull> epilogue;
};

// This thread's share of a tile, zeros beyond the matrix; consecutive threads take consecutive words of a row.
__device__ void load_tile(uint32_t (&words)[kWordsPerThread], uint8_t const* base, int row_begin, int rows, int k_begin,
                          int k, int vector_bytes) {
#pragma unroll
  for (int i = 0; i < kWordsPerThread; ++i) {
    int index = i * kThreads + threadIdx.x;
    int row = row_begin + index / (kTile / 4), column = k_begin + index % (kTile / 4) * 4;
    words[i] = 0;
    if (row >= rows) continue;
    uint8_t const* p = base + int64_t(row) * k + column;
    if (vector_bytes == 4) {
      if (column < k) words[i] = *reinterpret_cast<uint32_t const*>(p);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column + j < k) words[i] |= uint32_t(p[j]) << (8 * j);
      }
    }
  }
}

__device__ void store_tile(uint8_t* smem, uint32_t const (&words)[kWordsPerThread]) {
#pragma unroll
  for (int i = 0; i < kWordsPerThread; ++i) {
    int index = i * kThreads + threadIdx.x;
    *reinterpret_cast<uint32_t*>(smem + index / (kTile / 4) * kPitch + index % (kTile / 4) * 4) = words[i];
  }
}

template <class Accumulator, class Bits, bool kFull>
__global__ void __launch_bounds__(kThreads, 2) generic_kernel(Params<kFull> p) {
  __shared__ alignas(4) uint8_t smem_a[kTile * kPitch], smem_b[kTile * kPitch];

  int const tiles_m = (p.m + kTile - 1) / kTile, tiles_n = (p.n + kTile - 1) / kTile;
  int const tile_m = blockIdx.x % tiles_m, tile_n = blockIdx.x / tiles_m % tiles_n, l = blockIdx.x / tiles_m / tiles_n;
  int const warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  int const warp_m = warp / 2 * 32, warp_n = warp % 2 * 32;
  uint8_t const* a = p.a + l * p.a_batch_stride;
  uint8_t const* b = p.b + l * p.b_batch_stride;

  begin();
  Accumulator acc[2][4][4] = {};
  uint32_t words_a[kWordsPerThread], words_b[kWordsPerThread];
  load_tile(words_a, a, tile_m * kTile, p.m, 0, p.k, p.vector_bytes);
  load_tile(words_b, b, tile_n * kTile, p.n, 0, p.k, p.vector_bytes);
  for (int k = 0; k < p.k; k += kTile) {
    __syncthreads();
    store_tile(smem_a, words_a);
    store_tile(smem_b, words_b);
    __syncthreads();
    // The next tile is on its way while this one is multiplied.
    load_tile(words_a, a, tile_m * kTile, p.m, k + kTile, p.k, p.vector_bytes);
    load_tile(words_b, b, tile_n * kTile, p.n, k + kTile, p.k, p.vector_bytes);
#pragma unroll
    for (int step = 0; step < kTile; step += 32) {
      auto word = [&](uint8_t const* smem, int row, int column) {
        return *reinterpret_cast<uint32_t const*>(smem + row * kPitch + step + column + member * 4);
      };
      uint32_t fragments_a[2][4], fragments_b[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int row = warp_m + i * 16 + group;
        fragments_a[i][0] = word(smem_a, row, 0);
        fragments_a[i][1] = word(smem_a, row + 8, 0);
        fragments_a[i][2] = word(smem_a, row, 16);
        fragments_a[i][3] = word(smem_a, row + 8, 16);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int row = warp_n + j * 8 + group;
        fragments_b[j][0] = word(smem_b, row, 0);
        fragments_b[j][1] = word(smem_b, row, 16);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mma(acc[i][j], fragments_a[i], fragments_b[j]);
      }
    }
  }

  auto const output = p.epilogue.output.at(l);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const m = tile_m * kTile + warp_m + i * 16 + h * 8 + group;
      if (m >= p.m) continue;
      Terms<kFull, Value> terms;
      p.epilogue.load_row(l, m, terms);
      Bits* out = static_cast<Bits*>(p.out) + (int64_t(l) * p.m + m) * p.n;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          int const n = tile_n * kTile + warp_n + j * 8 + member * 2 + c;
          if (n >= p.n) continue;
          Accumulator const sum = acc[i][j][h * 2 + c];
          p.epilogue.load_column(l, n, terms);
          float const value = apply(sum, terms);
          out[n] = output.template round_one<Bits>(value, sum);
        }
      }
    }
  }
}

// The kernel for operands of a dtype and results of so many bytes.
template <bool kFull>
auto kernel_for(DType in, int out_bytes) {
  bool const int8 = in == DType::kS8;
  if constexpr (kFull) {
    if (out_bytes == 1) return int8 ? generic_kernel<int32_t, uint8_t, true> : generic_kernel<float, uint8_t, true>;
  }
  if (out_bytes == 2) return int8 ? generic_kernel<int32_t, uint16_t, kFull> : generic_kernel<float, uint16_t, kFull>;
  return int8 ? generic_kernel<int32_t, uint32_t, kFull> : generic_kernel<float, uint32_t, kFull>;
}

template <bool kFull>
cudaError_t prepare() {
  for (DType in : {DType::kS8, DType::kF8E4M3}) {
    for (int out_bytes : {1, 2, 4}) {
      bool fits;
      void const* const kernel = reinterpret_cast<void const*>(kernel_for<kFull>(in, out_bytes));
      if (cudaError_t const error = prepare_kernel(kernel, {1, kThreads}, fits)) return error;
    }
  }
  return cudaSuccess;
}

template <bool kFull>
cudaError_t launch(ScaledMm const& p, Submit const& submit) {
  auto address = [](void const* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  bool const words = (address(p.a) | address(p.b) | uintptr_t(p.k)) % 4 == 0;
  Params<kFull> params{static_cast<uint8_t const*>(p.a),
                       static_cast<uint8_t const*>(p.b),
                       p.out,
                       p.m,
                       p.n,
                       p.k,
                       p.a_batch_stride,
                       p.b_batch_stride,
                       words ? 4 : 1,
                       epilogue_args<kFull>(p)};
  int64_t const tiles = int64_t(p.m + kTile - 1) / kTile * ((p.n + kTile - 1) / kTile) * p.batch;
  if (tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  return jax_qmm::launch(submit, {unsigned(tiles), kThreads}, kernel_for<kFull>(p.in, bytes_of(p.out_dtype)), params);
}

}  // namespace

cudaError_t prepare_generic() {
  cudaError_t const error = prepare<false>();
  return error ? error : prepare<true>();
}

cudaError_t launch_generic(ScaledMm const& p, Submit const& submit) {
  return needs_full_epilogue(p) ? launch<true>(p, submit) : launch<false>(p, submit);
}

}  // namespace jax_qmm
