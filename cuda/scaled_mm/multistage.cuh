// What kernels of several stages share: blocks that compute one tile each with warp-level tensor cores, from shared
// memory that cp.async fills some stages ahead; on Turing each copy is waited for. K and the operands' addresses need
// to be multiples of 4.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/async_copy.cuh"
#include "core/mma.cuh"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/kinds.h"
#include "scaled_mm/split_k.h"

namespace jax_qmm::sm80 {

struct Params {
  uint8_t const* a;
  uint8_t const* b;
  void* out;
  int m, n, k;
  int k_of_part;  // of a block; the last ones may have less, or nothing
  int64_t a_batch_stride, b_batch_stride, out_batch_stride;
  unsigned tiles_m, tiles_n;
  int copied;         // at a time, by a thread: 16 bytes, or as many of 8 and 4 as all rows are aligned to
  bool stores_whole;  // whether rows of the output start at whole stores
  void* parts;        // where the sums go if K is split over blocks, or null
  int64_t sums_of_part;
  EpilogueArgs<true> epilogue;
};

// All that is known when the kernel is compiled.
template <DType In, Accum accum, int TileM, int TileN, int TileK, int WarpsM, int WarpsN, int WarpsK, int Stages>
struct Config {
  static constexpr DType kIn = In;
  static constexpr Accum kAccum = accum;
  static constexpr int kTileM = TileM, kTileN = TileN, kTileK = TileK, kStages = Stages;
  static constexpr int kWarpsM = WarpsM, kWarpsN = WarpsN, kWarpsK = WarpsK;
  static constexpr int kThreads = 32 * WarpsM * WarpsN * WarpsK;
  static constexpr int kWarpM = TileM / WarpsM, kWarpN = TileN / WarpsN;  // of a warp's part of the tile
  static constexpr int kFragmentsM = kWarpM / 16, kFragmentsN = kWarpN / 8;
  static constexpr int kSteps = TileK / 32 / WarpsK;  // of a stage, by one warp: mma's K is 32 bytes
  static constexpr int kStageBytes = (TileM + TileN) * TileK;
  using Accumulator = std::conditional_t<In == DType::kS8, int32_t, float>;

  static_assert(TileK == 64 || TileK == 128 || TileK == 256, "see swizzled");
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "fragments of B are loaded two at a time");
  static_assert(kSteps >= 2 && Stages >= 2, "see the order of the main loop");
  static_assert(kThreads % (TileK / 16 * 8) == 0, "the threads copy whole groups of 8 rows at a time");
  static_assert(TileM % (kThreads * 16 / TileK) == 0 && TileN % (kThreads * 16 / TileK) == 0);

  // When the sums are done, shared memory has the terms of rows and columns, and for each warp's part of the tile the
  // sums of its other slices of K, or 16 rows of it on their way to the output.
  static constexpr int kPitch = kWarpN + 8;  // of these rows, in sums: stores of fragments hit distinct banks
  static constexpr int kPartSums = std::max((WarpsK - 1) * kWarpM * kWarpN, 16 * kPitch);
  static constexpr int kTermsBytes = (TileM + TileN) * sizeof(Terms<true, Value>);
  static_assert(kTermsBytes % 16 == 0);
  static constexpr int kSharedBytes =
      std::max(Stages * kStageBytes, kTermsBytes + WarpsM * WarpsN * kPartSums * int(sizeof(Accumulator)));
};

// What a thread copies of each tile of some rows of a matrix: 16 bytes of every few rows. Rows beyond the matrix repeat
// others: one row for all of them would keep one part of L2 busy.
template <class C, int Rows>
class Source {
 public:
  static constexpr bool kMakes = false;  // whether what was copied becomes something else in shared memory
  __device__ Source(uint8_t const* matrix, int first_row, int rows, Params const& p)
      : matrix_(matrix), first_row_(first_row + threadIdx.x / kChunks), rows_(rows), p_(p) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) from_[i] = row(i);
  }

  // Starts the copies of the K bytes from k_begin on, 16 at a time (kWhole) or fewer. Those from k_end on become zeros,
  // wherever they would come from.
  template <bool kWhole>
  __device__ void copy(uint32_t to, int k_begin, int k_end) const {
    int const there = k_end - k_begin - 16 * int(threadIdx.x % kChunks);
    to += swizzled<C::kTileK>(threadIdx.x / kChunks, threadIdx.x % kChunks);
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) copy_async<16>(to + i * kApart, from_[i] + k_begin, there > 0);
    } else if (p_.copied == 8) {
      copy_in_parts<8>(to, k_begin, there);
    } else {
      copy_in_parts<4>(to, k_begin, there);
    }
  }

 private:
  static constexpr int kChunks = C::kTileK / 16, kRowsAtOnce = C::kThreads / kChunks, kCopies = Rows / kRowsAtOnce;
  static constexpr int kApart = kRowsAtOnce * C::kTileK;

  __device__ uint8_t const* row(int i) const {
    int const row = first_row_ + i * kRowsAtOnce;
    int const other = row & ((1 << (31 - __clz(rows_))) - 1);
    return matrix_ + int64_t(row < rows_ ? row : other) * p_.k + 16 * (threadIdx.x % kChunks);
  }

  // A loop, so that it takes no registers from the other case.
  template <int Bytes>
  __device__ void copy_in_parts(uint32_t to, int k_begin, int there) const {
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
#pragma unroll
      for (int part = 0; part < 16; part += Bytes) {
        copy_async<Bytes>(to + i * kApart + part, row(i) + k_begin + part, part < there);
      }
    }
  }

  uint8_t const* matrix_;
  int first_row_, rows_;
  Params const& p_;
  uint8_t const* from_[kCopies];
};

// acc += a * b of one step of K.
template <class C, int M, int N>
__device__ void multiply(typename C::Accumulator (&acc)[M][N][4], uint32_t const (&a)[M][4],
                         uint32_t const (&b)[N][2]) {
  constexpr bool kInt8 = C::kIn == DType::kS8;
#if __CUDA_ARCH__ >= 890
  constexpr bool kWiden = !kInt8 && C::kAccum == Accum::kFull;
#else
  constexpr bool kWiden = !kInt8;
#endif
  if constexpr (kWiden) {
    Widened wide_a[M][4];
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) wide_a[i][r] = Widened(a[i][r]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      Widened const wide_b[2] = {Widened(b[j][0]), Widened(b[j][1])};
#pragma unroll
      for (int i = 0; i < M; ++i) mma(acc[i][j], wide_a[i], wide_b);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
      for (int i = 0; i < M; ++i) {
        if constexpr (kInt8) {
          mma(acc[i][j], a[i], b[j]);
        } else {
          mma_e4m3(acc[i][j], a[i], b[j]);
        }
      }
    }
  }
}

// Where a block, a warp and a lane are in the product.
template <class C>
struct Place {
  int l, first_m, first_n;  // of the block's tile
  int end_n;                // where the columns end that it may have
  int slice, part;          // of the tile's K, and of its rows and columns, that the warp has
  int warp_m, warp_n;       // within the tile
  int k_begin, k_end;

  __device__ explicit Place(Params const& p) {
    // Blocks that run at once take tiles of a few rows and columns, so that what they read stays in L2.
    constexpr unsigned kRowsTogether = 8;
    unsigned const tile = blockIdx.x % (p.tiles_m * p.tiles_n), band = kRowsTogether * p.tiles_n;
    unsigned const first_of_band = tile / band * kRowsTogether, in_band = tile % band;
    unsigned const rows_of_band = min(kRowsTogether, p.tiles_m - first_of_band);
    first_m = (first_of_band + in_band % rows_of_band) * C::kTileM;
    first_n = in_band / rows_of_band * C::kTileN;
    end_n = p.n;
    l = blockIdx.x / (p.tiles_m * p.tiles_n);
    int const warp = threadIdx.x / 32;
    slice = warp / (C::kWarpsM * C::kWarpsN), part = warp % (C::kWarpsM * C::kWarpsN);
    warp_m = part / C::kWarpsN * C::kWarpM, warp_n = part % C::kWarpsN * C::kWarpN;
    k_begin = blockIdx.y * p.k_of_part, k_end = min(p.k, k_begin + p.k_of_part);
  }
};

// The rows of a and of b of the block's tile.
template <class C>
__device__ Source<C, C::kTileM> rows_of_a(Params const& p, Place<C> const& at) {
  return {p.a + at.l * p.a_batch_stride, at.first_m, p.m, p};
}
template <class C>
__device__ Source<C, C::kTileN> rows_of_b(Params const& p, Place<C> const& at) {
  return {p.b + at.l * p.b_batch_stride, at.first_n, at.end_n, p};
}

// Adds the products of the warp's part to acc. `from_a` and `from_b` copy as a Source does, and `from_b` may make
// something else of its copies in place; `copy_more(k)` starts what further copies the stage from k on needs;
// `multiplied(step)` is called when a step is in acc.
template <class C, class FromA, class FromB, class CopyMore, class Multiplied>
__device__ void sum_products(Params const& p, Place<C> const& at, uint32_t stages, FromA const& from_a, FromB&& from_b,
                             typename C::Accumulator (&acc)[C::kFragmentsM][C::kFragmentsN][4], CopyMore copy_more,
                             Multiplied multiplied) {
  constexpr int kM = C::kFragmentsM, kN = C::kFragmentsN;
  int const lane = threadIdx.x % 32;
  constexpr bool kMakes = std::decay_t<FromB>::kMakes;

  // The row and the half of 32 bytes that this lane gives the address of, for A: both halves of 8 rows after each
  // other, for B the other way round. The bits of a step are above those of a half, and so an exclusive or of both.
  uint32_t lane_a = swizzled<C::kTileK>(at.warp_m + lane % 16, lane / 16);
  uint32_t lane_b = C::kTileM * C::kTileK + swizzled<C::kTileK>(at.warp_n + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  asm volatile("" : "+r"(lane_a), "+r"(lane_b));  // or they are computed again for each K tile
  uint32_t fragments_a[2][kM][4], fragments_b[2][kN][2];
  auto const load_fragments = [&](int to, int stage, int step) {
    uint32_t const from = stages + stage * C::kStageBytes, k = 32 * (at.slice * C::kSteps + step);
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      auto& f = fragments_a[to][i];
      load_matrices(f[0], f[1], f[2], f[3], from + (lane_a ^ k) + i * 16 * C::kTileK);
    }
#pragma unroll
    for (int j = 0; j < kN; j += 2) {
      auto &f = fragments_b[to][j], &g = fragments_b[to][j + 1];
      load_matrices(f[0], f[1], g[0], g[1], from + (lane_b ^ k) + j * 8 * C::kTileK);
    }
  };

  auto const make_b = [&](int stage, int k) {
    if constexpr (kMakes) from_b.make(stages + stage * C::kStageBytes + C::kTileM * C::kTileK, k);
  };

  // Without branches, so that copies and loads stand among the products that they are not to delay. Behind the last K
  // tile copies of 16 bytes only write zeros, others nothing.
  auto const main_loop = [&](auto whole) {
    auto const copy_stage = [&](int stage, int k) {
      uint32_t const to = stages + stage * C::kStageBytes;
      if (whole() || k < at.k_end) {  // shorter copies take too many instructions to make zeros of
        from_a.template copy<whole()>(to, k, at.k_end);
        from_b.template copy<whole()>(to + C::kTileM * C::kTileK, k, at.k_end);
      }
      copy_more(k);
      commit_copies();
    };
#pragma unroll
    for (int s = 0; s < C::kStages - 1; ++s) copy_stage(s, at.k_begin + s * C::kTileK);
    p.epilogue.prefetch(C::kThreads);  // hundreds of instructions, while the copies are on their way
    wait_for_copies<C::kStages - 2>();
    make_b(0, at.k_begin);
    __syncthreads();
    load_fragments(0, 0, 0);
    int stage = 0, copied_stage = C::kStages - 1;
#pragma unroll 1
    for (int k = at.k_begin; k < at.k_end; k += C::kTileK) {
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        // The fragments of the next step are on their way while this one's are multiplied. For those of the next stage
        // its copies must be there, and after this barrier nobody loads from this one any more.
        if (step == C::kSteps - 1) {
          wait_for_copies<C::kStages - 2>();
          __syncthreads();
          stage = stage + 1 == C::kStages ? 0 : stage + 1;
        }
        load_fragments((step + 1) % 2, stage, (step + 1) % C::kSteps);
        // The stage to fill was last loaded from before that barrier: its copies may arrive at any time, also at once.
        if (step == 0) {
          copy_stage(copied_stage, k + (C::kStages - 1) * C::kTileK);
          copied_stage = copied_stage + 1 == C::kStages ? 0 : copied_stage + 1;
        }
        multiply<C>(acc, fragments_a[step % 2], fragments_b[step % 2]);
        multiplied(step);
        if (kMakes && step == 0) {
          wait_for_copies<C::kStages - 2>();  // of the next stage, which nobody else has touched
          make_b(stage + 1 == C::kStages ? 0 : stage + 1, k + C::kTileK);
        }
      }
    }
    wait_for_copies<0>();
  };
  if constexpr (kMakes) {
    main_loop(std::true_type());
  } else if (p.copied == 16) {
    main_loop(std::true_type());
  } else {
    main_loop(std::false_type());
  }
}

// The addresses and sizes of a product for tiles of C, its K in `split` parts.
template <class C>
Params make_params(ScaledMm const& p, int split) {
  auto const address = [](void const* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  uintptr_t const in = address(p.a) | address(p.b) | uintptr_t(p.k);
  uintptr_t const out = address(p.out) | uintptr_t(p.n) * bytes_of(p.out_dtype);
  return {static_cast<uint8_t const*>(p.a),
          static_cast<uint8_t const*>(p.b),
          p.out,
          p.m,
          p.n,
          p.k,
          int(ceil_div(ceil_div(p.k, C::kTileK), split) * C::kTileK),
          p.a_batch_stride,
          p.b_batch_stride,
          p.out_batch_stride,
          unsigned(ceil_div(p.m, C::kTileM)),
          unsigned(ceil_div(p.n, C::kTileN)),
          in % 16 == 0  ? 16
          : in % 8 == 0 ? 8
                        : 4,
          out % 16 == 0,
          split > 1 ? p.workspace : nullptr,
          sums_of_part(p),
          epilogue_args<true>(p)};
}

}  // namespace jax_qmm::sm80
