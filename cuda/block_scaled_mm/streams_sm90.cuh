// What persistent blocks do at the end of a tile, or of a part of it: they leave sums for another block, add those that
// others have left, and write results, by TMA.
#pragma once

#include <algorithm>
#include <cuda/atomic>
#include <random>

#include "block_scaled_mm/config_sm90.cuh"
#include "block_scaled_mm/sources.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "quantize/chunk.cuh"

namespace jax_qmm::block_scaled {

// Steps of a tile that a block multiplies at once.
struct Piece {
  int l, first_m, first_n, first_step, steps;
};

// Nobody clears flags beforehand, which would be a kernel more: workspace has any values but this one, which is drawn
// for each process, and who has seen it in a flag takes it away.
using Flag = unsigned long long;
inline Flag is_left() {
  static Flag const drawn = [] {
    std::random_device draw;
    return Flag(draw()) << 32 | draw();
  }();
  return drawn;
}

template <int kThreads>
__device__ void sync_math() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Of a thread's sums, which go to memory and come from there.
template <class Sum>
using FourSums = std::conditional_t<std::is_same_v<Sum, int32_t>, int4, float4>;

// Leaves a piece's sums for the block in which the tile begins: each math thread its own, while the warp that comes to
// the same barrier makes them known, so that no other waits for stores.
template <int kThreads>
__device__ void sync_left() {
  asm volatile("bar.sync 5, %0;" ::"n"(kThreads + 32) : "memory");
}
template <int kThreads, class Sum, int kCount>
__device__ void leave_sums(Sum const (&acc)[kCount], FourSums<Sum>* to) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    __stcg(to + i / 4 * kThreads + threadIdx.x, FourSums<Sum>{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]});
  }
  asm volatile("bar.arrive 5, %0;" ::"n"(kThreads + 32) : "memory");
}

// Has the compiler take a sum's value from here, and read memory anew.
__device__ inline void keep(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }
__device__ inline void keep(int32_t& sum) { asm volatile("" : "+r"(sum)::"memory"); }

// Adds what `count` blocks have left, in their order, once it is there.
template <int kThreads, class Sum, int kCount>
__device__ void add_sums(Sum (&acc)[kCount], FourSums<Sum> const* from, Flag* left, Flag is_left, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) {
    cuda::atomic_ref<Flag, cuda::thread_scope_device> const flag(left[i]);
    while (flag.load(cuda::memory_order_acquire) != is_left) {
    }
    flag.store(0, cuda::memory_order_relaxed);
  }
  sync_math<kThreads>();
  // Of several blocks, where there are registers, so that not all wait one after the other.
  constexpr int kAtOnce = std::min(kCount, 64), kOthers = 64 / kAtOnce;
#pragma unroll 1
  for (int other = 0; other < count; other += kOthers) {
#pragma unroll
    for (int first = 0; first < kCount; first += kAtOnce) {
      FourSums<Sum> more[kOthers][kAtOnce / 4];
#pragma unroll
      for (int j = 0; j < kOthers; ++j) {
        if (other + j >= count) continue;
#pragma unroll
        for (int i = 0; i < kAtOnce; i += 4) {
          more[j][i / 4] = __ldcg(from + ((other + j) * kCount + first + i) / 4 * kThreads + threadIdx.x);
        }
      }
#pragma unroll
      for (int j = 0; j < kOthers; ++j) {
        if (other + j >= count) continue;
#pragma unroll
        for (int i = 0; i < kAtOnce; i += 4) {
          Sum* const to = &acc[first + i];
          to[0] += more[j][i / 4].x, to[1] += more[j][i / 4].y, to[2] += more[j][i / 4].z, to[3] += more[j][i / 4].w;
        }
      }
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) keep(acc[i]);
    }
  }
}

// What is the same for a column of results: of columns `row` and `row` + 8 of a piece.
template <class C>
struct ColumnTerms {
  float bias[2], scale[2];

  __device__ void load(Params const& p, typename C::Epilogue const& epilogue, Piece const& piece, int row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const n = min(piece.first_n + row + 8 * h, p.n - 1);
      if constexpr (C::kInt8) {
        bias[h] = epilogue.bias.load(piece.l, n), scale[h] = epilogue.scale_b.load(piece.l, n);
      } else {
        bias[h] = p.bias.load(piece.l, n);
      }
    }
  }
};

// Results between bounds, two at once: rounding keeps their order, so that what is rounded may be compared with bounds
// that are.
template <class T>
struct BoundedOutput {
  using Pair = quantize::Pair<T>;
  Pair low, high;

  __device__ BoundedOutput(float low, float high) : low(rounded(low, low)), high(rounded(high, high)) {}

  template <class Out, int N>
  __device__ Out round(float const (&values)[N], int const (&)[N]) const {
    Pair pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      pairs[i / 2] = quantize::max_nan(quantize::min_nan(rounded(values[i], values[i + 1]), high), low);
    }
    Out out;
    memcpy(&out, pairs, sizeof(Out));
    return out;
  }

  __device__ static Pair rounded(float first, float second) {
    uint32_t const pair = round_pair(first, second, T());
    return reinterpret_cast<Pair const&>(pair);
  }
};

// Writes the results of a tile, of 16 bits. A warpgroup has 64 columns, the span of TMA's swizzle, of some rows in a
// slot after the other; `slot` is the next one.
template <class C, int kCount>
__device__ void write_sums(Params const& p, typename C::Epilogue const& epilogue, CUtensorMap const& boxes_out,
                           typename C::Shared& shared, typename C::Sum const (&acc)[kCount],
                           ColumnTerms<C> const& columns, Piece const& piece, int& slot) {
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
  bool const leads = threadIdx.x % 128 == 0;
  auto const sync_group = [&] { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); };
  // Of the rows of a slot that a thread has, which are loaded while the slot before is written.
  using RowScales = float[C::kSlotRows / 4];
  [[maybe_unused]] RowScales row_scales[2];
  auto const load_row_scales = [&](int slot) {
    if constexpr (C::kInt8) {
      auto const& vector = epilogue.scale_a;
      RowScales& scales = row_scales[slot % 2];
#pragma unroll
      for (float& scale : scales) scale = vector.absent;
      vector.with_data([&](auto const* data) {
#pragma unroll
        for (int i = 0; i < C::kSlotRows / 4; ++i) {
          int const row = C::kSlotRows * slot + i / 2 * 8 + lane % 4 * 2 + i % 2;
          int const m = min(piece.first_m + row, p.m - 1);
          scales[i] = float(data[piece.l * vector.batch_stride + m * vector.stride]);
        }
      });
    }
  };
  load_row_scales(0);
  // The results of two rows of x.
  auto const results_of = [&](auto const* two, float const* row_scales, int h, float* y) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (C::kInt8) {
        y[i] = scale(two[i], Terms<false, Value>{row_scales[i], columns.scale[h], columns.bias[h]});
      } else {
        y[i] = two[i] + columns.bias[h];
      }
    }
  };
  // Lane 8i + r has the place of row r of matrix i, of four: columns 0 and 8 of rows 0, then of rows 8.
  int const row = lane / 16 * 8 + lane % 8, eight = 2 * (warp % 4) + lane / 8 % 2;
  int const at = row * kRowBytes + (eight ^ row % 8) * 16;
  auto const write = [&](auto const& output) {
#pragma unroll
    for (int first = 0; first < C::kTileM; first += C::kSlotRows) {
      float const* const scales = row_scales[first / C::kSlotRows % 2];
      if (first + C::kSlotRows < C::kTileM) load_row_scales(first / C::kSlotRows + 1);
      if (leads) cute::tma_store_wait<C::kSlots - 1>();
      sync_group();
      uint8_t* const to = shared.slots[slot][group][0] + at;
#pragma unroll
      for (int m = 0; m < C::kSlotRows; m += 16) {
        float y[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          results_of(&acc[(first + m) / 2 + 2 * i], &scales[m / 4 + i / 2 * 2], i % 2, &y[2 * i]);
        }
        int const integers[8] = {};
        uint4 const pairs = output.template round<uint4, 8>(y, integers);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         cute::cast_smem_ptr_to_uint(to + m * kRowBytes)),
                     "r"(pairs.x), "r"(pairs.y), "r"(pairs.z), "r"(pairs.w)
                     : "memory");
      }
      cutlass::arch::fence_view_async_shared();
      sync_group();
      if (leads) {
        cute::SM90_TMA_STORE_3D::copy(&boxes_out, shared.slots[slot][group], piece.first_n + 64 * group,
                                      piece.first_m + first, piece.l);
        cute::tma_store_arrive();
      }
      slot = slot + 1 == C::kSlots ? 0 : slot + 1;
    }
  };
  // Each in a loop of its own, which would take up to twice as long with the code of all of them, even to pass it by.
  constexpr bool kHalf = std::is_same_v<typename C::Element, cutlass::half_t>;
  if (p.activation == Activation::kNone) {
    write(PlainOutput{p.out_dtype});
  } else if (p.activation == Activation::kClamp && p.out_dtype == (kHalf ? DType::kF16 : DType::kBF16)) {
    write(BoundedOutput<std::conditional_t<kHalf, __half, __nv_bfloat16>>(p.low, p.high));
  } else {
    write(p.output());
  }
}

}  // namespace jax_qmm::block_scaled
