// A block has 16 rows of w, the 16-row operand of the tensor cores, and up to 32 rows of x; its warps take turns at K.
// A thread has 32 columns beside each other of two rows, 16 bytes each, and all loads of a turn on their way before it
// multiplies. What a fragment calls K is any 32 columns, as long as they are the same of both operands: so w stays in
// the order of memory, and its even columns come before the odd ones, as masks take them out of a word.
#include <algorithm>

#include "core/launch.cuh"
#include "core/load.cuh"
#include "core/mma.cuh"
#include "core/prepare.h"
#include "expanded_mm/expansion.cuh"
#include "expanded_mm/instances.h"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::expanded {
namespace {

constexpr int kWarps = 8, kRows = 16;
constexpr int kTurn = 4 * ExpandedMm::kColumns;  // columns of a warp: four threads share a row

struct Params {
  uint8_t const *a, *w;
  void* out;
  int m, n, k;
  int64_t a_batch_stride, w_batch_stride, out_batch_stride;  // bytes, but of the last
  Blocks blocks;
  EpilogueArgs<false> epilogue;
};

// The loads of a turn of one row of w.
struct Row {
  uint4 values = {};
  OfBlock block;

  __device__ void load(Params const& p, int l, int n, int column) {
    values = load_once(p.w + l * p.w_batch_stride + (int64_t(n) * p.k + column) / 2);
    block = OfBlock(p.blocks, l, n, column / p.blocks.block);
  }
};

__device__ void write(Params const& p, int l, int m, int n, int32_t sum) {
  float const value = scale(sum, p.epilogue.load(l, m, n));
  PlainOutput const output = p.epilogue.output.at(l);
  int64_t const at = l * p.out_batch_stride + int64_t(m) * p.n + n;
  if (bytes_of(output.dtype) == 2) {
    static_cast<uint16_t*>(p.out)[at] = output.round_one<uint16_t>(value, sum);
  } else {
    static_cast<uint32_t*>(p.out)[at] = output.round_one<uint32_t>(value, sum);
  }
}

// kEights: how often 8 rows of x.
template <int kEights>
__global__ void __launch_bounds__(32 * kWarps) few_rows_kernel(Params p) {
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
        auto const* const from = reinterpret_cast<uint4 const*>(p.a + l * p.a_batch_stride + int64_t(m) * p.k + column);
        x[i][0] = from[0], x[i][1] = from[1];
      }
    }
    uint32_t const words[2][4] = {{rows[0].values.x, rows[0].values.y, rows[0].values.z, rows[0].values.w},
                                  {rows[1].values.x, rows[1].values.y, rows[1].values.z, rows[1].values.w}};
    Expansion const expansions[2] = {rows[0].block.expansion(), rows[1].block.expansion()};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t of_w[4];
#pragma unroll
      for (int row = 0; row < 2; ++row) expansions[row].make(words[row][word], of_w[row], of_w[2 + row]);
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
    write(p, l, m, n, sum);
  }
}

template <int kEights>
cudaError_t prepare(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(few_rows_kernel<kEights>), {1, 32 * kWarps}, fits);
}

template <int kEights>
cudaError_t launch(ExpandedMm const& p, Submit const& submit) {
  Params const params{static_cast<uint8_t const*>(p.a),
                      static_cast<uint8_t const*>(p.b),
                      p.out,
                      p.m,
                      p.n,
                      p.k,
                      p.a_batch_stride,
                      p.b_batch_stride / 2,
                      p.out_batch_stride,
                      Blocks(p),
                      epilogue_args<false>(p)};
  dim3 const grid(unsigned(ceil_div(p.n, kRows)), unsigned(p.batch), unsigned(ceil_div(p.m, 8 * kEights)));
  return jax_qmm::launch(submit, {grid, 32 * kWarps}, few_rows_kernel<kEights>, params);
}

template <int kEights>
Instance instance() {
  Instance i{"sm80 few rows " + std::to_string(8 * kEights) + "x16 int4", prepare<kEights>, launch<kEights>};
  i.tile_m = 8 * kEights, i.few_rows = true;
  return i;
}

}  // namespace

void add_few_rows(std::vector<Instance>& to) {
  to.push_back(instance<1>());
  to.push_back(instance<2>());
  to.push_back(instance<4>());
}

}  // namespace jax_qmm::expanded
