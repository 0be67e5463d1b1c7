// A block has 16 or 32 rows of w, the 16-row operand of the tensor cores, and up to 32 rows of x; its warps take turns
// at K. More rows of w read x less often, more warps have more loads on their way where there are few blocks. A thread
// has 32 columns beside each other of two rows, 16 bytes each, and all loads of a turn on their way before it
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
#include "scaled_mm/write_one.cuh"

namespace jax_qmm::expanded {
namespace {

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
  write_one(p.epilogue.output.at(l), p.out, l * p.out_batch_stride + int64_t(m) * p.n + n, value, sum);
}

// kEights: how often 8 rows of x. kTiles: how often 16 rows of w.
template <int kEights, int kTiles, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) few_rows_kernel(Params p) {
  constexpr int kRows = 16 * kTiles;
  __shared__ int32_t partial[kWarps][8 * kEights][kRows + 2];  // padded: the fragments' stores hit distinct banks

  int const l = blockIdx.y, first_n = blockIdx.x * kRows, first_m = blockIdx.z * 8 * kEights;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  uint8_t const* const w = p.w + l * p.w_batch_stride;
  // The first weights, to L2 by the time that the kernel before this one is done.
  if (lane < kRows && warp * kTurn < p.k) {
    prefetch_l2(w + (int64_t(min(first_n + lane, p.n - 1)) * p.k + warp * kTurn) / 2);
  }
  begin_in_turn();

  int32_t acc[kTiles][kEights][4] = {};
  for (int k = warp * kTurn; k < p.k; k += kWarps * kTurn) {
    int const column = k + ExpandedMm::kColumns * member;
    Row rows[kTiles][2];
    uint4 x[kEights][2] = {};
    if (column < p.k) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        int const n = min(first_n + 8 * i + group, p.n - 1);  // rows beyond the matrix repeat its last one
        rows[i / 2][i % 2].load(p, l, n, column);
      }
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        int const m = first_m + 8 * i + group;
        if (m >= p.m) continue;
        auto const* const from = reinterpret_cast<uint4 const*>(p.a + l * p.a_batch_stride + int64_t(m) * p.k + column);
        x[i][0] = from[0], x[i][1] = from[1];
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      Expansion const expansions[2] = {rows[tile][0].block.expansion(), rows[tile][1].block.expansion()};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t of_w[4];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          uint4 const values = rows[tile][row].values;
          uint32_t const words[4] = {values.x, values.y, values.z, values.w};
          expansions[row].make(words[word], of_w[row], of_w[2 + row]);
        }
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
          uint4 const of_x = x[i][word / 2];
          uint32_t const low = word % 2 == 0 ? of_x.x : of_x.z, high = word % 2 == 0 ? of_x.y : of_x.w;
          mma(acc[tile][i], of_w, {__byte_perm(low, high, 0x6420), __byte_perm(low, high, 0x7531)});
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles * kEights; ++i) {
    int const tile = i / kEights, eight = i % kEights;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      partial[warp][8 * eight + 2 * member + c % 2][16 * tile + 8 * (c / 2) + group] = acc[tile][eight][c];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * kEights * kRows; i += 32 * kWarps) {
    int const row = i % kRows, m = first_m + i / kRows, n = first_n + row;
    if (m >= p.m || n >= p.n) continue;
    int32_t sum = 0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) sum += partial[part][i / kRows][row];
    write(p, l, m, n, sum);
  }
}

template <int kEights, int kTiles, int kWarps>
cudaError_t prepare(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(few_rows_kernel<kEights, kTiles, kWarps>), {1, 32 * kWarps},
                        fits);
}

template <int kEights, int kTiles, int kWarps>
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
  dim3 const grid(unsigned(ceil_div(p.n, 16 * kTiles)), unsigned(p.batch), unsigned(ceil_div(p.m, 8 * kEights)));
  return jax_qmm::launch(submit, {grid, 32 * kWarps}, few_rows_kernel<kEights, kTiles, kWarps>, params);
}

template <int kEights, int kTiles, int kWarps>
Instance instance(int blocks_per_sm, int tile_cycles, int step_cycles, int busy_cycles) {
  constexpr int kTileM = 8 * kEights, kTileN = 16 * kTiles, kTileK = kWarps * kTurn;
  Instance i{"sm80 few rows " + words_of_tile(kTileM, kTileN, kTileK) + " int4", prepare<kEights, kTiles, kWarps>,
             launch<kEights, kTiles, kWarps>};
  i.tile_m = kTileM, i.tile_n = kTileN, i.tile_k = kTileK, i.blocks_per_sm = blocks_per_sm;
  i.few_rows = true;
  i.tile_cycles = tile_cycles, i.step_cycles = step_cycles, i.busy_cycles = busy_cycles;
  return i;
}

}  // namespace

void add_few_rows(std::vector<Instance>& to) {
  to.push_back(instance<1, 1, 8>(5, 0, 2250, 575));
  to.push_back(instance<1, 1, 16>(2, 900, 1700, 1250));
  to.push_back(instance<1, 2, 16>(2, 0, 3250, 2300));
  to.push_back(instance<2, 1, 8>(4, 0, 2150, 715));
  to.push_back(instance<2, 1, 16>(2, 1000, 2200, 1400));
  to.push_back(instance<2, 2, 8>(3, 0, 2950, 1200));
  to.push_back(instance<4, 1, 8>(2, 0, 2000, 1000));
  to.push_back(instance<4, 1, 16>(1, 2750, 2300, 0));
  to.push_back(instance<4, 2, 8>(2, 0, 2900, 1550));
  to.push_back(instance<4, 2, 4>(4, 0, 2600, 775));
}

}  // namespace jax_qmm::expanded
