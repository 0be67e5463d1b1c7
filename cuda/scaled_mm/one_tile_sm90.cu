// Products of few waves of tiles, mostly one. Each block computes one tile, or a part of one tile's K, and ends. There
// is no next tile to load meanwhile, so all shared memory is stages of the pipeline. Where several blocks share a
// tile's K (split-K), each sends its sums to the blocks of its cluster through the memory that the stages had: every
// block adds up some rows of the tile from all parts, in a fixed order. Small blocks share an SM, so that one reads
// while another ends.
//
// X is the operand whose rows are the tensor cores' M, Y the other; a is X unless the kernel is swapped.
//
//   warps                  role
//   0 ... kMathWarps - 1   multiply (whole warpgroups); then store their sums, and finish rows of the tile
//   kMathWarps             loads X by TMA
//   kMathWarps + 1         loads Y by TMA; whichever of the two loads a initializes the barriers
//   kMathWarps + 2         copies the tile's part of the epilogue's terms to shared memory
//
//   mbarrier      arrivals of a phase                         who waits, and for what
//   full[stage]   2, the load warps of this block, and the    math warps: both operands of the stage are there
//                 bytes of all boxes that blocks send here
//   empty[stage]  kMathWarps of each of the kSenders blocks   load warps, from the second turn on: every block to which
//                 that share an operand with this one         they send has multiplied what the stage held
//   added         kMathWarps, 1 for the expected bytes, and   math warps: the sums of all parts of K are there
//                 the bytes of the other parts' sums          (split-K alone, one phase)
//
// The phase of full and empty is the parity of the turn, of which a stage has one for every kStages K tiles. Stages of
// the last turn are not released: their load warps do not come back, and a block that is done may have exited.
//
// A block may exit while boxes that it has sent to other blocks are on their way: their source is global memory, they
// arrive in the other blocks' memory and at those blocks' barriers, and nothing of this block takes part any more.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <algorithm>
#include <type_traits>

#include "core/cluster.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/one_tile_sm90.h"

namespace jax_qmm::sm90 {
namespace {

using namespace cute;

template <bool kFull>
struct Params {
  void* out;
  int m, n, k;
  int tile_m;  // rows of a in a tile, which has room for more: TMA is slower at rows that aren't there than at others
  bool a_batched, b_batched;  // or the same for the whole batch
  int64_t out_batch_stride;
  EpilogueArgs<kFull> epilogue;
};

template <DType In, int OutBytes, int TileX, int TileY, int TileK, int ClusterX, int ClusterY, int Split,
          int BlocksPerSm, bool Swap, bool Full>
struct Types {
  using Element = conditional_t<In == DType::kS8, int8_t, cutlass::float_e4m3_t>;
  using Accumulator = conditional_t<In == DType::kS8, int32_t, float>;
  using Bits = BitsOf<OutBytes>;
  using Mma =
      decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, Accumulator, Shape<_64, Int<TileY>, Int<TileK>>>(),
                              Layout<Shape<Int<TileX / 64>, _1, _1>>{}));
  static constexpr int kX = TileX, kY = TileY, kTileK = TileK, kClusterX = ClusterX, kClusterY = ClusterY,
                       kSplit = Split;
  static constexpr int kBlocksPerSm = BlocksPerSm;
  static constexpr bool kSwap = Swap, kFull = Full;
  static constexpr int kM = Swap ? TileY : TileX, kN = Swap ? TileX : TileY;
  static constexpr int kClusterM = Swap ? ClusterY : ClusterX, kClusterN = Swap ? ClusterX : ClusterY;
  static constexpr int kMathThreads = size(Mma{}), kThreads = kMathThreads + 96;
  static constexpr int kSenders = ClusterX + ClusterY - 1;  // blocks whose loads reach this one, itself included
  // Rows that each of the blocks with the same tile of a or of b loads for all.
  static constexpr int box_a(int tile_m) { return (tile_m - 1) / kClusterN + 1; }
  static constexpr int kBoxB = kN / kClusterM;
  static constexpr int kShare = (kM + Split - 1) / Split;  // of the rows, that one block adds up
  // Whether a block stores the sums that it adds up itself without the cluster's network: 3 to 5 % faster, but 1 to 3 %
  // slower where the 8 rows that a warp has at a time are of several blocks, so that it goes both ways.
  static constexpr bool kStoresOwn = kShare >= 8;

  static constexpr int kMostStages = 32;
  template <class T, bool kAlongRows>
  struct OfTile {
    static constexpr bool kOfRow = kAlongRows;
    alignas(16) T values[kOfRow ? kM : kN];
  };
  struct Shared {
    Terms<Full, OfTile> terms;
    uint64_t full[kMostStages], empty[kMostStages], added;
    float out_scale;
    int32_t out_zero_point;
  };
  // In place of the stages when all are multiplied; padded, so that the fragments' stores hit distinct banks.
  using Partial = Accumulator[Split * kShare][kN + (Swap ? 4 : 8)];

  static constexpr int kFixed = sizeof(Shared), kStage = (TileX + TileY) * TileK;
  // Of the 228 KB of an SM, each block takes one more than it asks for.
  static constexpr int kStages = std::min((228 * 1024 / BlocksPerSm - 1024 - kFixed) / kStage, kMostStages);
  static constexpr int kSharedMemory = kStages * kStage + kFixed;
  static_assert(kStages >= 2, "a stage is free again when the next one's products are under way");
  static_assert(sizeof(Partial) <= kStages * kStage);
  static_assert((Split - 1) * kShare < kM, "each block adds up some rows");
  static_assert(TileX % ClusterY == 0 && TileY % ClusterX == 0, "each block of a cluster loads as much");

  template <int Rows>
  using Stages =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<Rows>, Int<TileK>, Int<kStages>>{}));
};

template <bool Multicast>
__device__ void load(CUtensorMap const& boxes, int k, int row, int entry, uint8_t* to, uint64_t* full,
                     uint16_t receivers, TMA::CacheHintSm90 hint) {
  if constexpr (Multicast) {
    SM90_TMA_LOAD_MULTICAST_3D::copy(&boxes, full, receivers, static_cast<uint64_t>(hint), to, k, row, entry);
  } else {
    SM90_TMA_LOAD_3D::copy(&boxes, full, static_cast<uint64_t>(hint), to, k, row, entry);
  }
}

constexpr int kEach = 4;  // consecutive columns that a thread finishes at a time
template <class T>
using Each = cutlass::AlignedArray<T, kEach>;
template <class T, bool kOfRow>
using EachOf = Each<T>;

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm)
    one_tile_kernel(Params<T::kFull> const p, CUTE_GRID_CONSTANT CUtensorMap const boxes_x,
                    CUTE_GRID_CONSTANT CUtensorMap const boxes_y) {
  using Element = typename T::Element;
  using Accumulator = typename T::Accumulator;
  using Bits = typename T::Bits;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kX = T::kX, kY = T::kY, kTileK = T::kTileK, kN = T::kN, kSplit = T::kSplit, kShare = T::kShare;
  constexpr int kClusterX = T::kClusterX, kClusterY = T::kClusterY, kStages = T::kStages,
                kMathThreads = T::kMathThreads;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* const memory_y = memory + kStages * kX * kTileK;
  auto& smem = *reinterpret_cast<typename T::Shared*>(memory + kStages * T::kStage);
  auto& partial = *reinterpret_cast<typename T::Partial*>(memory);
  Tensor stages_x = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(memory)), typename T::template Stages<kX>{});
  Tensor stages_y = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(memory_y)), typename T::template Stages<kY>{});

  // The blocks of a cluster: parts of K first, then tiles along X or Y.
  int const part = blockIdx.x % kSplit, x = blockIdx.x / kSplit, y = blockIdx.y, l = blockIdx.z;
  int const in_x = x % kClusterX, in_y = y % kClusterY;
  auto const rank = [](int part, int in_x, int in_y) { return part + kSplit * (in_x + kClusterX * in_y); };
  int const k_tiles = (p.k - 1) / kTileK + 1;
  int const begin = k_tiles * part / kSplit, end = k_tiles * (part + 1) / kSplit;
  int const first_m = p.tile_m * (T::kSwap ? y : x), first_n = kN * (T::kSwap ? x : y);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The first warps multiply; of the others, one loads X, one Y, and one what the epilogue needs.
  constexpr int kMathWarps = kMathThreads / 32, kLoadsX = kMathWarps, kLoadsY = kMathWarps + 1;
  constexpr int kLoadsA = T::kSwap ? kLoadsY : kLoadsX, kLoadsB = T::kSwap ? kLoadsX : kLoadsY;
  CUtensorMap const& boxes_a = T::kSwap ? boxes_y : boxes_x;
  CUtensorMap const& boxes_b = T::kSwap ? boxes_x : boxes_y;
  bool const multiplies = warp < kMathWarps;

  // What this block loads of b in a stage, and of a: its share of the rows, where blocks of a cluster load for each
  // other.
  auto const box_row = [&](bool of_b, bool of_x) {
    return (of_b ? first_n : first_m) + (of_x ? in_y : in_x) * (of_b ? T::kBoxB : T::box_a(p.tile_m));
  };
  if (warp == kLoadsB) {
    // By the time the kernel before this one is done, what the first loads read of b is in L2, as prefetch_l2 has it.
    // Of 16 to 128 KB and parts of 1/5 to 1, these were the fastest for most weights; more delays the rest by up to 20
    // %.
    constexpr int kAhead = (48 << 10) / (T::kBoxB * kTileK);
    if (elect_one_sync()) {
      prefetch_tma_descriptor(&boxes_b);
      for (int k = begin * kTileK; k < (begin + min(kAhead, (end - begin) / 5)) * kTileK; k += kLine) {
        SM90_TMA_LOAD_3D::PREFETCH::copy(&boxes_b, k, box_row(true, T::kSwap), p.b_batched ? l : 0);
      }
    }
  } else if (warp == kLoadsA) {
    if (elect_one_sync()) {
      prefetch_tma_descriptor(&boxes_a);
      for (int s = 0; s < kStages; ++s) {
        Full::init(&smem.full[s], 2);
        Empty::init(&smem.empty[s], T::kSenders * kMathWarps);
      }
      if (kSplit > 1) Full::init(&smem.added, kMathWarps + 1);
      cutlass::arch::fence_barrier_init();
    }
  }
  if constexpr (T::kSenders > 1) {
    sync_cluster();
  } else {
    __syncthreads();
  }
  // The next kernel may start, and wait for this one's results as this one does for those before it.
  cudaTriggerProgrammaticLaunchCompletion();

  // By X and Y: told by a and b, nvcc 13.0 makes 128x192 of int8 a kernel that stops at an illegal instruction.
  auto const load_all = [&](auto of_x, CUtensorMap const& boxes, uint8_t* to) {
    constexpr bool kOfX = of_x, kOfB = kOfX == T::kSwap;
    constexpr int kShared = kOfX ? kClusterY : kClusterX;  // by so many blocks, which load a part of it each
    // a is read again. EVICT_FIRST for b leaves a part of it in L2: 3 % faster where 6 weights take turns, and 0.6 %
    // slower where 30 do.
    constexpr auto kHint = kOfB ? TMA::CacheHintSm90::EVICT_NORMAL : TMA::CacheHintSm90::EVICT_LAST;
    int const rows = kOfB ? T::kBoxB : T::box_a(p.tile_m), row = box_row(kOfB, kOfX);
    int const entry = (kOfB ? p.b_batched : p.a_batched) ? l : 0;
    to += (kOfX ? in_y : in_x) * rows * kLine;
    uint16_t receivers = 0;
    for (int i = 0; i < kShared; ++i) receivers |= 1 << (kOfX ? rank(part, in_x, i) : rank(part, i, in_y));
    cudaGridDependencySynchronize();
    for (int i = begin, stage = 0, turn = 0; i < end; ++i) {
      if (turn > 0) Empty::wait(&smem.empty[stage], (turn - 1) & 1);
      uint64_t* const full = &smem.full[stage];
      Full::arrive_and_expect_tx(full, kShared * rows * kTileK);
#pragma unroll
      for (int j = 0; j < kTileK; j += kLine) {
        load<(kShared > 1)>(boxes, i * kTileK + j, row, entry, to + (stage * kTileK + j) * (kOfX ? kX : kY), full,
                            receivers, kHint);
      }
      if (++stage == kStages) stage = 0, ++turn;
    }
  };
  typename T::Mma mma;
  auto thread = mma.get_slice(threadIdx.x % kMathThreads);
  Tensor acc = partition_fragment_C(mma, Shape<Int<kX>, Int<kY>>{});
  if (warp == kLoadsX || warp == kLoadsY) {
    if (elect_one_sync()) {
      if (warp == kLoadsX) {
        load_all(true_type{}, boxes_x, memory);
      } else {
        load_all(false_type{}, boxes_y, memory_y);
      }
    }
    __syncwarp();
  } else if (!multiplies) {
    cudaGridDependencySynchronize();
    auto const copy = [&](auto& to, auto const& from) {
      constexpr int kSize = sizeof(to.values) / sizeof(to.values[0]);
      int const first = from.kOfRow ? first_m : first_n, end = from.kOfRow ? p.m : p.n;
#pragma unroll
      for (int i = lane; i < kSize; i += 32) {
        if (first + i < end) to.values[i] = from.load(l, first + i);
      }
    };
    each_term<std::is_same_v<Element, int8_t>>(copy, smem.terms, p.epilogue);
    if constexpr (T::kFull) {
      if (lane == 0) smem.out_scale = p.epilogue.output.scale.load(l, 0);
      if (lane == 1) smem.out_zero_point = p.epilogue.output.zero_point.load(l, 0);
    }
  } else {
    p.epilogue.prefetch(kMathThreads);
    Tensor fragments_x = thread.make_fragment_A(thread.partition_A(stages_x));
    Tensor fragments_y = thread.make_fragment_B(thread.partition_B(stages_y));
    clear(acc);
    auto const release = [&](int stage) {
      if constexpr (T::kSenders > 1) {
        // Those with this block's tile of Y, and the others with its tile of X.
        int const other = lane - kClusterX + 1;
        int const sender = other <= 0 ? rank(part, lane, in_y) : rank(part, in_x, (in_y + other) % kClusterY);
        if (lane < T::kSenders) Empty::arrive(&smem.empty[stage], sender, true);
      } else {
        if (elect_one_sync()) Empty::arrive(&smem.empty[stage]);
      }
    };
    warpgroup_fence_operand(acc);
    int stage = 0, phase = 0, before = -1;
    for (int i = begin; i < end; ++i) {
      Full::wait(&smem.full[stage], phase);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < size<2>(fragments_x); ++k)
        gemm(mma, fragments_x(_, _, k, stage), fragments_y(_, _, k, stage), acc);
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      // Only what is loaded into again: after its last load, a block may have ended, which others must not tell
      // anything.
      if (before >= 0 && i - 1 + kStages < end) release(before);
      before = stage;
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
  }

  // No more data arrive here, and no thread reads this block's stages any more. Other blocks write into them where they
  // add up parts of K, so that the whole cluster must be done.
  __syncthreads();
  if constexpr (kSplit > 1) {
    int const rows = min(kShare, T::kM - part * kShare);
    if (threadIdx.x == 0)
      Full::arrive_and_expect_tx(&smem.added, (kSplit - T::kStoresOwn) * rows * kN * sizeof(Accumulator));
    sync_cluster();
  }
  // Stores sums at their place in the block that adds up this row.
  auto const send = [&](int m, int n, auto value) {
    auto& to = partial[part * kShare + m % kShare][n];
    if constexpr (kSplit > 1) {
      static_assert(sizeof(value) == 4, "blocks that share K are swapped: what passes between them are single sums");
      if (int const adder = m / kShare; adder != part || !T::kStoresOwn) {
        return store_shared_remote(reinterpret_cast<uint32_t&>(value), cast_smem_ptr_to_uint(&to),
                                   cast_smem_ptr_to_uint(&smem.added), rank(adder, in_x, in_y));
      }
    }
    reinterpret_cast<decltype(value)&>(to) = value;
  };
  Tensor places = thread.partition_C(make_identity_tensor(Shape<Int<kX>, Int<kY>>{}));
  if (multiplies) {
#pragma unroll
    for (int i = 0; i < size(acc); i += 2) {
      int const row = get<0>(places(i)), column = get<1>(places(i));
      if constexpr (T::kSwap) {
        send(column, row, acc(i));
        send(column + 1, row, acc(i + 1));
      } else {
        send(row, column, cutlass::AlignedArray<Accumulator, 2>{acc(i), acc(i + 1)});
      }
    }
  }
  if constexpr (kSplit == 1) __syncthreads();
  if (!multiplies) return;
  if constexpr (kSplit > 1) {
    __syncwarp();
    if (elect_one_sync()) Full::arrive(&smem.added);
    Full::wait(&smem.added, 0);
    asm volatile("" ::: "memory");  // to the compiler, the wait alone changes no memory
  }

  // Each thread has some columns, whose scales it keeps, of each of some rows. All are in the matrix or none: TMA takes
  // only rows of whole 16 bytes.
  constexpr int kAcross = kN / kEach, kDown = kMathThreads / kAcross;
  auto const load_each = [](auto const* from) {
    return *reinterpret_cast<Each<remove_cvref_t<decltype(*from)>> const*>(from);
  };
  int const column = threadIdx.x % kAcross * kEach, first_row = part * kShare;
  int const rows = min(kShare, min(p.tile_m, p.m - first_m) - first_row);
  if (threadIdx.x >= kAcross * kDown || first_n + column >= p.n) return;
  auto const load_of_columns = [&](auto& each, auto const& of) {
    if constexpr (!of.kOfRow) each = load_each(&of.values[column]);
  };
  Terms<T::kFull, EachOf> of_columns;
  each_term(load_of_columns, of_columns, smem.terms);
  auto const output = p.epilogue.output.of(smem.out_scale, smem.out_zero_point);
  auto* const out =
      static_cast<Bits*>(p.out) + l * p.out_batch_stride + int64_t(first_m + first_row) * p.n + first_n + column;
  auto const write = [&](auto const& output, auto with_zero_points) {
#pragma unroll 4
    for (int row = threadIdx.x / kAcross; row < rows; row += kDown) {
      auto sums = load_each(&partial[row][column]);
#pragma unroll
      for (int other = 1; other < kSplit; ++other) {
        auto const more = load_each(&partial[other * kShare + row][column]);
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[j] = add(sums[j], more[j]);
      }
      float values[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        auto const value = [&](auto const& each, auto const& of) {
          if constexpr (of.kOfRow)
            return of.values[first_row + row];
          else
            return each[j];
        };
        auto const terms = map_terms<Value>(value, of_columns, smem.terms);
        values[j] = scale(with_zero_points ? subtract_zero_points(sums[j], terms) : sums[j], terms);
      }
      using Out = cutlass::AlignedArray<Bits, kEach>;
      *reinterpret_cast<Out*>(out + int64_t(row) * p.n) = output.template round<Out, kEach>(values, sums);
    }
  };
  if constexpr (!T::kFull) {
    write(output, true_type());
  } else {
    // Each in a loop of its own: a block runs it once, at the speed at which its code comes to the SM, and the code of
    // the others comes too, even to be passed by. What a copy of the output is told the compiler knows.
    auto own = output;
    bool const has_zero_points = p.epilogue.has_zero_points();
    if constexpr (sizeof(Bits) == 1) {
      own.is_usual = true;
      if (has_zero_points || !output.is_usual) return write(output, true_type());
    } else {
      own.activation = Activation::kClamp;
      // Bounds first: of one activation after the other the compiler makes a table of jumps.
      if (output.activation != Activation::kClamp || has_zero_points) {
        if (output.activation != Activation::kNone) {
          return has_zero_points ? write(output, true_type()) : write(output, false_type());
        }
        PlainOutput const plain{output.dtype};
        return has_zero_points ? write(plain, true_type()) : write(plain, false_type());
      }
    }
    write(own, false_type());
  }
}

// Has TMA load a matrix of p.k columns in boxes of so many rows and 128 columns, and L2 at least so much of a row.
cudaError_t make_boxes(void const* data, int rows, int64_t batch_stride, int box_rows, CUtensorMapL2promotion at_least,
                       ScaledMm const& p, CUtensorMap& boxes) {
  bool const batched = batch_stride != 0;
  cuuint64_t const shape[] = {cuuint64_t(p.k), cuuint64_t(rows), batched ? cuuint64_t(p.batch) : 1};
  cuuint64_t const strides[] = {shape[0], batched ? cuuint64_t(batch_stride) : shape[0] * shape[1]};
  cuuint32_t const box[] = {kLine, cuuint32_t(box_rows), 1}, steps[] = {1, 1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &boxes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), shape, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, at_least, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

template <DType In, int OutBytes, int TileX, int TileY, int TileK, int ClusterX, int ClusterY, int Split,
          int BlocksPerSm, bool Swap, bool Full>
cudaError_t OneTile<In, OutBytes, TileX, TileY, TileK, ClusterX, ClusterY, Split, BlocksPerSm, Swap, Full>::prepare(
    bool& fits) {
  using T = Types<In, OutBytes, TileX, TileY, TileK, ClusterX, ClusterY, Split, BlocksPerSm, Swap, Full>;
  LaunchShape const shape{{}, T::kThreads, T::kSharedMemory, dim3(Split * ClusterX, ClusterY)};
  return prepare_kernel(reinterpret_cast<void const*>(one_tile_kernel<T>), shape, fits);
}

template <DType In, int OutBytes, int TileX, int TileY, int TileK, int ClusterX, int ClusterY, int Split,
          int BlocksPerSm, bool Swap, bool Full>
cudaError_t OneTile<In, OutBytes, TileX, TileY, TileK, ClusterX, ClusterY, Split, BlocksPerSm, Swap, Full>::launch(
    ScaledMm const& p, int, Gpu const&, Submit const& submit) {
  using T = Types<In, OutBytes, TileX, TileY, TileK, ClusterX, ClusterY, Split, BlocksPerSm, Swap, Full>;
  auto const tiles = [](int rows, int tile, int cluster) {
    return (rows - 1) / (tile * cluster) * cluster + cluster;  // whole clusters
  };
  int const tiles_m = tiles(p.m, T::kM, T::kClusterM), tiles_n = tiles(p.n, T::kN, T::kClusterN);
  int const tile_m = (p.m - 1) / tiles_m + 1;
  CUtensorMap boxes_a, boxes_b;
  // Where wide tiles alone read a part of b, L2 having two lines of a row for each that is asked for makes them 2 to 3
  // % faster (M of 128, N of 28672 and 57344). Others are up to 2 % slower so, or 6 % with both lines in a K tile.
  auto const line = CU_TENSOR_MAP_L2_PROMOTION_L2_128B, lines = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  bool const ahead = tiles_m == 1 && T::kBoxB >= 192;
  cudaError_t error = make_boxes(p.a, p.m, p.a_batch_stride, T::box_a(tile_m), line, p, boxes_a);
  if (error == cudaSuccess) error = make_boxes(p.b, p.n, p.b_batch_stride, T::kBoxB, ahead ? lines : line, p, boxes_b);
  if (error != cudaSuccess) return error;

  LaunchShape const shape{dim3((Swap ? tiles_n : tiles_m) * Split, Swap ? tiles_m : tiles_n, p.batch), T::kThreads,
                          T::kSharedMemory, dim3(Split * ClusterX, ClusterY)};
  Params<Full> const params{p.out,
                            p.m,
                            p.n,
                            p.k,
                            tile_m,
                            p.a_batch_stride != 0,
                            p.b_batch_stride != 0,
                            p.out_batch_stride,
                            epilogue_args<Full>(p)};
  return jax_qmm::launch(submit, shape, one_tile_kernel<T>, params, Swap ? boxes_b : boxes_a, Swap ? boxes_a : boxes_b);
}

#define GEMM(...)
#define RESIDENT_B(...)
#define ONE_TILE(...) template struct JAX_QMM_ONE_TILE(__VA_ARGS__);
#include "scaled_mm/instances_sm90.def"

}  // namespace jax_qmm::sm90
