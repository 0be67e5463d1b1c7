// A block has 16 rows of w, the 16-row operand of the tensor cores, and up to 32 rows of x; its warps take turns at K.
// A thread has 32 columns beside each other of two rows, 16 bytes each, and all loads of a turn on their way before it
// multiplies. What a fragment calls K is any 32 columns, as long as they are the same of both operands: so w stays in
// the order of memory, and its even columns come before the odd ones, as masks take them out of a word.
#include <algorithm>

#include "core/launch.cuh"
#include "core/load.cuh"
#include "core/mma.cuh"
#include "core/prepare.h"
#include "expanded_mm/expanded_mm.h"

namespace jax_qmm {
namespace {

constexpr int kWarps = 8, kRows = 16;
constexpr int kTurn = 4 * ExpandedMm::kColumns;  // columns of a warp: four threads share a row

// What makes four int8 of four nibbles, each plus 8: with these in the bytes of a word, `nibbles * multiple + shift`
// has 128 more than the int8 in each byte. That is 0 to 255, so whatever bytes borrow in between, none is left.
struct Expansion {
  uint32_t multiple = 0, shift = 0x80808080;

  __device__ uint32_t operator()(uint32_t nibbles) const { return nibbles * multiple + shift ^ 0x80808080; }
};

// The loads of a turn of one row of w.
struct Row {
  uint4 values = {};
  Expansion expansion;

  __device__ void load(ExpandedMm const& p, int l, int n, int column) {
    int const groups = (p.k + p.block - 1) / p.block;
    int64_t const of_block = int64_t(n) * groups + column / p.block;
    values = load_once(p.w + (l * p.w_batch_stride + int64_t(n) * p.k + column) / 2);
    int const multiple = p.multiple[l * p.multiple_batch_stride + of_block];
    int const zero = p.zero_point == nullptr ? 0 : p.zero_point[l * p.zero_point_batch_stride + of_block];
    expansion.multiple = multiple;
    expansion.shift = 0x80808080 - uint32_t(multiple * (8 + zero)) * 0x01010101;
  }
};

// kEights: how often 8 rows of x.
template <int kEights>
__global__ void __launch_bounds__(32 * kWarps) expanded_mm_kernel(ExpandedMm p) {
  __shared__ int32_t partial[kWarps][8 * kEights][kRows + 2];  // padded: the fragments' stores hit distinct banks

  int const l = blockIdx.y, first_n = blockIdx.x * kRows, first_m = blockIdx.z * 8 * kEights;
  int const warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  begin();

  int32_t acc[kEights][4] = {};
  for (int k = warp * kTurn; k < p.k; k += kWarps * kTurn) {
    int const column = k + ExpandedMm::kColumns * member;
    Row rows[2];
    uint4 x[kEights][2] = {};
    if (column < p.k) {
      // Rows beyond the matrix repeat its last one.
      rows[0].load(p, l, min(first_n + group, p.n - 1), column);
      rows[1].load(p, l, min(first_n + 8 + group, p.n - 1), column);
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        int const m = first_m + 8 * i + group;
        if (m >= p.m) continue;
        auto const* const from = reinterpret_cast<uint4 const*>(p.x + l * p.x_batch_stride + int64_t(m) * p.k + column);
        x[i][0] = from[0], x[i][1] = from[1];
      }
    }
    uint32_t const words[2][4] = {{rows[0].values.x, rows[0].values.y, rows[0].values.z, rows[0].values.w},
                                  {rows[1].values.x, rows[1].values.y, rows[1].values.z, rows[1].values.w}};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t of_w[4];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t const bits = words[row][word] ^ 0x88888888;  // plus 8
        of_w[row] = rows[row].expansion(bits & 0x0f0f0f0f);
        of_w[2 + row] = rows[row].expansion(bits >> 4 & 0x0f0f0f0f);
      }
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        uint4 const of_x = x[i][word / 2];
        uint32_t const low = word % 2 == 0 ? of_x.x : of_x.z, high = word % 2 == 0 ? of_x.y : of_x.w;
        mma(acc[i], of_w, {__byte_perm(low, high, 0x6420), __byte_perm(low, high, 0x7531)});
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) partial[warp][8 * i + 2 * member + c % 2][8 * (c / 2) + group] = acc[i][c];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * kEights * kRows; i += 32 * kWarps) {
    int const row = i % kRows, m = first_m + i / kRows, n = first_n + row;
    if (m >= p.m || n >= p.n) continue;
    int32_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w][i / kRows][row];
    p.out[(int64_t(l) * p.m + m) * p.n + n] = sum;
  }
}

using Kernel = void (*)(ExpandedMm);
constexpr Kernel kKernels[] = {expanded_mm_kernel<1>, expanded_mm_kernel<2>, expanded_mm_kernel<4>};

}  // namespace

cudaError_t prepare_expanded_mm() {
  static OncePerDevice once;
  return once([] {
    for (Kernel const kernel : kKernels) {
      bool fits;
      cudaError_t const error = prepare_kernel(reinterpret_cast<void const*>(kernel), {1, 32 * kWarps}, fits);
      if (error) return error;
    }
    return cudaSuccess;
  });
}

cudaError_t launch_expanded_mm(ExpandedMm const& p, Submit const& submit) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return cudaSuccess;
  int const choice = p.m <= 8 ? 0 : p.m <= 16 ? 1 : 2;
  dim3 const grid(unsigned(ceil_div(p.n, kRows)), unsigned(p.batch), unsigned(ceil_div(p.m, 8 << choice)));
  return launch(submit, {grid, 32 * kWarps}, kKernels[choice], p);
}

}  // namespace jax_qmm
