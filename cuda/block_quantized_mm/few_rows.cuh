// Kernels for few rows of a, which read b at the rate of memory. A block has 16 or 32 rows of b, the 16-row operand of
// the tensor cores, and 8 or 16 of a; its warps take turns at K. Sums of a block of columns are whole in one warp,
// which leaves them in shared memory. After some turns all threads scale what is there, for each output block after
// block: so results of int8 are those of other kernels, bit for bit, though many warps share K.
#pragma once

#include <type_traits>

#include "block_quantized_mm/instances.h"
#include "block_quantized_mm/sum.cuh"
#include "core/async_copy.cuh"
#include "core/launch.cuh"
#include "core/load.cuh"
#include "core/mma.cuh"
#include "core/prepare.h"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/write_one.cuh"

namespace jax_qmm::block_quantized::few_rows {

constexpr int kTurn = 128;  // columns that a warp multiplies at a time, a part of a block or some of them

struct Params {
  uint8_t const *a, *b;
  void* out;
  int m, n, k;
  int64_t a_batch_stride, b_batch_stride, out_batch_stride;
  int log2_block, groups;
  InBlocks of_a, of_b;
  EpilogueArgs<true> epilogue;
};

// kOf32: blocks of 32 columns. kEights: how often 8 rows of a. kTiles: how often 16 rows of b.
template <DType In, bool ZeroPoints, bool Of32, int Eights, int Tiles, int Warps>
struct Config {
  static constexpr DType kIn = In;
  static constexpr bool kZeroPoints = ZeroPoints, kOf32 = Of32;
  static constexpr int kEights = Eights, kTiles = Tiles, kWarps = Warps, kThreads = 32 * Warps;
  static constexpr int kTileM = 8 * Eights, kTileN = 16 * Tiles, kLines = kTileM + kTileN;
  static_assert(BlockQuantizedMm::kShared % kTileN == 0, "rows of b of a tile share a scale, or none do");
  static constexpr int kVectors = ZeroPoints ? 3 : 1;  // of each line: scale, zero point, sums
  using Accumulator = std::conditional_t<In == DType::kS8, int32_t, float>;
  template <int kCount>
  struct Blocks {
    alignas(16) Accumulator sums[kCount][kTileM][kTileN + 4];  // padded: the fragments' stores hit distinct banks
    alignas(16) float terms[kVectors][kCount][kLines + 4];
  };
  // Blocks that are scaled at once, so many that each warp has a turn of them, and twice as many where they fit.
  static constexpr bool kTwice = Of32 || sizeof(Blocks<4 * Warps>) <= kStaticBytes;
  static constexpr int kBlocks = (kTwice ? 4 : 2) * Warps;
  static constexpr int kOutputs = kTileM * kTileN;
  static constexpr int kEach = kOutputs >= 512 ? 4 : 1;  // outputs side by side that a thread scales
  static constexpr int kTimes = (kOutputs / kEach + kThreads - 1) / kThreads;
  using Shared = Blocks<kBlocks>;

  // XLA has an SM keep little L1 for kernels of its graphs that ask for shared memory when they are launched. Loads on
  // their way take room there: 28672 x 4096 with one row, 33 us on an H200, took 43.
  static constexpr bool kDynamic = sizeof(Shared) > kStaticBytes;
};

// A thread's 32 columns of a turn. What a fragment calls K is any 32 columns, as long as they are the same of both
// operands and of one block: so these are 16 bytes of each 64 columns, or where blocks have 32, 8 of each 32.
template <bool kOf32, bool kOnce>
__device__ void load_turn(uint32_t (&words)[8], uint8_t const* row, int turn, int k) {
  constexpr int kBytes = kOf32 ? 8 : 16;
#pragma unroll
  for (int i = 0; i < 32 / kBytes; ++i) {
    int const column = turn + kBytes * (4 * i + threadIdx.x % 4);
    uint32_t* const to = words + i * kBytes / 4;
    if (column >= k) {
#pragma unroll
      for (int word = 0; word < kBytes / 4; ++word) to[word] = 0;
    } else if constexpr (kOf32) {
      load_two<kOnce>(to, row + column);
    } else {
      uint4 const four = kOnce ? load_once(row + column) : load(row + column);
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }
  }
}

__device__ inline void multiply(int32_t (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) { mma(c, a, b); }
__device__ inline void multiply(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
#if __CUDA_ARCH__ >= 890
  mma_e4m3(c, a, b);
#else
  mma(c, a, b);
#endif
}

// Starts the copies of what the lines have of the blocks from `first` on.
template <class C>
__device__ void copy_terms(Params const& p, typename C::Shared& shared, int l, int first_m, int first_n, int first) {
  for (int i = threadIdx.x; i < C::kLines * C::kBlocks; i += C::kThreads) {
    int const line = i / C::kBlocks, block = i % C::kBlocks;
    bool const of_a = line < C::kTileM;
    if (!C::kZeroPoints && line > C::kTileM && p.of_b.shares_scales()) continue;
    int const row = of_a ? first_m + line : first_n + line - C::kTileM;
    if (first + block >= p.groups || row >= (of_a ? p.m : p.n)) continue;
    InBlocks const& side = of_a ? p.of_a : p.of_b;
    auto const copy = [&](int vector, InBlocks::Vector const& from) {
      float& to = shared.terms[vector][block][line];
      if (from.data == nullptr) {
        to = 0;
        return;
      }
      auto const* const data = reinterpret_cast<uint8_t const*>(from.at(l, row, p.groups) + first + block);
      copy_async<4>(static_cast<uint32_t>(__cvta_generic_to_shared(&to)), data, true);
    };
    copy(0, side.scale);
    if constexpr (C::kZeroPoints) {
      copy(1, side.zero_point);
      copy(2, side.sums);
    }
  }
  commit_copies();
}

// Leaves the sums that the warp has of the blocks from `first` on.
template <class C>
__device__ void sum_blocks(Params const& p, typename C::Shared& shared, int l, int first_m, int first_n, int first) {
  using Accumulator = typename C::Accumulator;
  int const warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  uint8_t const* const a = p.a + l * p.a_batch_stride;
  uint8_t const* const b = p.b + l * p.b_batch_stride;
  int const block = 1 << p.log2_block, unit = max(kTurn, block);  // columns: whole turns, and whole blocks
  int const begin = first * block, end = begin + min(p.k - begin, C::kBlocks * block);
  Accumulator acc[C::kTiles][C::kEights][4];
  auto const each_sum = [&](auto use) {
#pragma unroll
    for (int i = 0; i < C::kTiles * C::kEights * 4; ++i) {
      int const tile = i / 4 / C::kEights, eight = i / 4 % C::kEights, c = i % 4;
      use(acc[tile][eight][c], 8 * eight + 2 * member + c % 2, 16 * tile + 8 * (c / 2) + group);
    }
  };
  auto const restart = [&] { each_sum([](Accumulator& sum, int, int) { sum = Sum<Accumulator>::kStart; }); };
  restart();
  for (int of_unit = begin + warp * unit; of_unit < end; of_unit += C::kWarps * unit) {
    for (int turn = of_unit; turn < of_unit + unit; turn += kTurn) {
      uint32_t of_a[C::kEights][8] = {}, of_b[C::kTiles][2][8];
#pragma unroll
      for (int i = 0; i < 2 * C::kTiles; ++i) {
        int const n = min(first_n + 8 * i + group, p.n - 1);  // rows beyond the matrix repeat its last one
        load_turn<C::kOf32, true>(of_b[i / 2][i % 2], b + int64_t(n) * p.k, turn, p.k);
      }
#pragma unroll
      for (int i = 0; i < C::kEights; ++i) {
        int const m = first_m + 8 * i + group;
        if (m >= p.m) continue;
        load_turn<C::kOf32, false>(of_a[i], a + int64_t(m) * p.k, turn, p.k);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
          auto const& [top, bottom] = of_b[tile];
#pragma unroll
          for (int i = 0; i < C::kEights; ++i) {
            multiply(acc[tile][i], {top[2 * j], bottom[2 * j], top[2 * j + 1], bottom[2 * j + 1]},
                     {of_a[i][2 * j], of_a[i][2 * j + 1]});
          }
        }
        int const behind = turn + 32 * (j + 1);
        bool const ends = (C::kOf32 || j % 2 == 1) && behind % block == 0;
        if (!ends) continue;
        auto& sums = shared.sums[behind / block - 1 - first];
        each_sum([&](Accumulator sum, int m, int n) {
          if (first_m + m < p.m) sums[m][n] = sum;
        });
        restart();
      }
    }
  }
}

template <class C>
__device__ typename C::Shared& shared_of() {
  if constexpr (C::kDynamic) {
    extern __shared__ __align__(16) uint8_t memory[];
    return *reinterpret_cast<typename C::Shared*>(memory);
  } else {
    __shared__ typename C::Shared shared;
    return shared;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads) few_rows_kernel(Params p) {
  typename C::Shared& shared = shared_of<C>();
  int const l = blockIdx.y, first_n = blockIdx.x * C::kTileN, first_m = blockIdx.z * C::kTileM;
  // The first weights, to L2 by the time that the kernel before this one is done.
  int const lane = threadIdx.x % 32, column = threadIdx.x / 32 * max(kTurn, 1 << p.log2_block);
  if (lane < C::kTileN && column < p.k) {
    prefetch_l2(p.b + l * p.b_batch_stride + int64_t(min(first_n + lane, p.n - 1)) * p.k + column);
  }
  begin_in_turn();

  float y[C::kTimes][C::kEach] = {};
  // Calls use(outputs, m, n) with those of the tile that lie side by side from there on.
  auto const each_output = [&](auto use) {
#pragma unroll
    for (int i = 0; i < C::kTimes; ++i) {
      int const output = (i * C::kThreads + threadIdx.x) * C::kEach, m = output / C::kTileN;
      if (m < C::kTileM && first_m + m < p.m) use(y[i], m, output % C::kTileN);
    }
  };
  bool const shares_b = !C::kZeroPoints && p.of_b.shares_scales();
  for (int first = 0; first < p.groups; first += C::kBlocks) {
    copy_terms<C>(p, shared, l, first_m, first_n, first);
    sum_blocks<C>(p, shared, l, first_m, first_n, first);
    wait_for_copies<0>();
    __syncthreads();
    int const count = min(C::kBlocks, p.groups - first);
    each_output([&](float (&outputs)[C::kEach], int m, int n) {
#pragma unroll 4
      for (int block = 0; block < count; ++block) {
        auto const of_a = [&](int v) { return shared.terms[v][block][m]; };
#pragma unroll
        for (int j = 0; j < C::kEach; ++j) {
          auto const of_b = [&](int v) { return shared.terms[v][block][C::kTileM + (shares_b ? 0 : n + j)]; };
          float const sum = Sum<typename C::Accumulator>::value(shared.sums[block][m][n + j]);
          outputs[j] = add_scaled<C::kZeroPoints>(outputs[j], sum, of_a, of_b);
        }
      }
    });
    __syncthreads();
  }

  FullOutput const output = p.epilogue.output.at(l);
  each_output([&](float const(&outputs)[C::kEach], int of_tile_m, int of_tile_n) {
    int const m = first_m + of_tile_m;
#pragma unroll
    for (int j = 0; j < C::kEach; ++j) {
      int const n = first_n + of_tile_n + j;
      if (n >= p.n) break;
      float const value = scale(outputs[j], p.epilogue.load(l, m, n));
      write_one(output, p.out, l * p.out_batch_stride + int64_t(m) * p.n + n, value, outputs[j]);
    }
  });
}

template <class C>
LaunchShape shape_of(dim3 grid) {
  return {grid, C::kThreads, C::kDynamic ? sizeof(typename C::Shared) : 0};
}

template <class C>
cudaError_t prepare(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(few_rows_kernel<C>), shape_of<C>({}), fits);
}

template <class C>
cudaError_t launch(BlockQuantizedMm const& p, Submit const& submit) {
  Params const params{static_cast<uint8_t const*>(p.a),
                      static_cast<uint8_t const*>(p.b),
                      p.out,
                      p.m,
                      p.n,
                      p.k,
                      p.a_batch_stride,
                      p.b_batch_stride,
                      p.out_batch_stride,
                      __builtin_ctz(p.block),
                      p.groups(),
                      p.of_a,
                      p.of_b,
                      epilogue_args<true>(p)};
  dim3 const grid(unsigned(ceil_div(p.n, C::kTileN)), unsigned(p.batch), unsigned(ceil_div(p.m, C::kTileM)));
  return jax_qmm::launch(submit, shape_of<C>(grid), few_rows_kernel<C>, params);
}

template <class C>
Instance instance(int blocks_per_sm, FewRowsCycles cycles) {
  Instance i{C::kIn, C::kZeroPoints};
  i.shortest = C::kOf32 ? 32 : 64, i.longest = C::kOf32 ? 32 : BlockQuantizedMm::kLongest;
  i.tile_m = C::kTileM, i.tile_n = C::kTileN, i.tile_k = C::kWarps * kTurn;
  i.threads = C::kThreads, i.blocks_per_sm = blocks_per_sm, i.shared_bytes = sizeof(typename C::Shared);
  i.few_rows = cycles;
  i.prepare = prepare<C>, i.launch = launch<C>;
  return i;
}

}  // namespace jax_qmm::block_quantized::few_rows

namespace jax_qmm::block_quantized {

template <DType In, bool kZeroPoints>
void add_few_rows(std::vector<Instance>& to) {
  using few_rows::Config, few_rows::instance;
  to.push_back(instance<Config<In, kZeroPoints, false, 1, 1, 4>>(7, {0, 2600, 35}));
  to.push_back(instance<Config<In, kZeroPoints, false, 1, 1, 8>>(3, {130, 3300, 20}));
  to.push_back(instance<Config<In, kZeroPoints, false, 1, 2, 8>>(2, {2800, 3000, 180}));
  to.push_back(instance<Config<In, kZeroPoints, false, 1, 2, 16>>(1, {2900, 740, 3600}));
  to.push_back(instance<Config<In, kZeroPoints, false, 2, 2, 8>>(2, {4000, 3550, 220}));
  to.push_back(instance<Config<In, kZeroPoints, true, 1, 2, 8>>(2, {2700, 5800, 840}));
}

}  // namespace jax_qmm::block_quantized
