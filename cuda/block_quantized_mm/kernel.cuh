// Kernels of several stages whose sums of a block are scaled and added to float32 ones in registers, among the products
// of other warps. The scales, zero points and sums of a stage's rows and columns come along with it by cp.async.
#pragma once

#include "block_quantized_mm/instances.h"
#include "block_quantized_mm/sum.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "scaled_mm/multistage.cuh"
#include "scaled_mm/write_tile.cuh"

namespace jax_qmm::block_quantized {

struct Params {
  sm80::Params product;
  int block, log2_block, groups;
  InBlocks of_a, of_b;
};

constexpr int kTileK = 64;

template <DType In, bool ZeroPoints, bool HalfStages, int TileM, int TileN, int WarpsM, int WarpsN, int Stages,
          int BlocksPerSm>
struct Config : sm80::Config<In, Accum::kFast, TileM, TileN, kTileK, WarpsM, WarpsN, 1, Stages> {
  using Base = sm80::Config<In, Accum::kFast, TileM, TileN, kTileK, WarpsM, WarpsN, 1, Stages>;
  static constexpr bool kZeroPoints = ZeroPoints, kHalfStages = HalfStages;
  static constexpr int kBlocksPerSm = BlocksPerSm;
  static constexpr int kLines = TileM + TileN;               // rows and columns
  static constexpr int kVectors = ZeroPoints ? 3 : 1;        // of each line: scale, zero point, sums
  static constexpr int kBlocksOfStage = HalfStages ? 2 : 1;  // that end in a stage
  static constexpr int kTermsOfBlock = kVectors * kLines;
  // One more than there are stages: a warp may still read those of the stage that it has just multiplied, when another
  // starts the copies of the last but one after it.
  static constexpr int kSlots = Stages + 1;
  static constexpr int kSlotBytes = kBlocksOfStage * kTermsOfBlock * int(sizeof(float));
  static constexpr int kSharedBytes = std::max(Base::kSharedBytes, Stages* Base::kStageBytes + kSlots * kSlotBytes);
  static_assert(Base::kSteps == 2, "a step is a block of 32 columns");
};

// Copies the terms of the blocks that end in a stage.
template <class C>
class SourceOfTerms {
 public:
  __device__ SourceOfTerms(Params const& p, sm80::Place<C> const& at, uint32_t slots) : p_(p), at_(at), slots_(slots) {}

  // Those of the stage from column k on. Behind K they become zeros.
  __device__ void copy(int k) {
    int const first = k >> p_.log2_block;
#pragma unroll
    for (int i = 0; i < (C::kBlocksOfStage * C::kLines + C::kThreads - 1) / C::kThreads; ++i) {
      int const at = i * C::kThreads + threadIdx.x, line = at % C::kLines, of_stage = at / C::kLines;
      if (at >= C::kBlocksOfStage * C::kLines) break;
      int const g = first + of_stage;
      bool const is_row = line < C::kTileM;
      int const index = is_row ? at_.first_m + line : at_.first_n + line - C::kTileM;
      bool const there = index < (is_row ? p_.product.m : p_.product.n) && g < p_.groups;
      InBlocks const& side = is_row ? p_.of_a : p_.of_b;
      uint32_t const to = slots_ + slot_ * C::kSlotBytes + 4 * (of_stage * C::kTermsOfBlock + line);
      copy_one(to, side.scale, index, g, there);
      if constexpr (C::kZeroPoints) {
        copy_one(to + 4 * C::kLines, side.zero_point, index, g, there);
        copy_one(to + 8 * C::kLines, side.sums, index, g, there);
      }
    }
    slot_ = slot_ + 1 == C::kSlots ? 0 : slot_ + 1;
  }

 private:
  __device__ void copy_one(uint32_t to, InBlocks::Vector const& vector, int index, int g, bool there) const {
    auto const* const data = reinterpret_cast<uint8_t const*>(vector.at(at_.l, index, p_.groups) + g);
    copy_async<4>(to, data, there && vector.data != nullptr);
  }

  Params const& p_;
  sm80::Place<C> const& at_;
  uint32_t slots_;
  int slot_ = 0;
};

template <class C>
__device__ void restart(typename C::Accumulator (&acc)[C::kFragmentsM][C::kFragmentsN][4]) {
#pragma unroll
  for (int i = 0; i < C::kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < C::kFragmentsN; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[i][j][c] = Sum<typename C::Accumulator>::kStart;
    }
  }
}

// Adds the sums of a block, whose terms are in shared memory, to the total, and starts those of the next.
template <class C>
__device__ void add_block(float (&total)[C::kFragmentsM][C::kFragmentsN][4],
                          typename C::Accumulator (&acc)[C::kFragmentsM][C::kFragmentsN][4], sm80::Place<C> const& at,
                          float const* terms) {
  int const lane = threadIdx.x % 32;
  float const* const rows = terms + at.warp_m + lane / 4;
  float const* const columns = terms + C::kTileM + at.warp_n + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < C::kFragmentsN; ++j) {
    float2 column[C::kVectors];
#pragma unroll
    for (int v = 0; v < C::kVectors; ++v) {
      column[v] = *reinterpret_cast<float2 const*>(columns + v * C::kLines + 8 * j);
    }
#pragma unroll
    for (int i = 0; i < C::kFragmentsM; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        auto const of_row = [&](int v) { return rows[v * C::kLines + 16 * i + c / 2 * 8]; };
        auto const of_column = [&](int v) { return c % 2 == 0 ? column[v].x : column[v].y; };
        float const sum = Sum<typename C::Accumulator>::value(acc[i][j][c]);
        total[i][j][c] = add_scaled<C::kZeroPoints>(total[i][j][c], sum, of_row, of_column);
      }
    }
  }
  restart<C>(acc);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) block_quantized_mm_kernel(Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  uint32_t const stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  sm80::Place<C> const at(p.product);
  begin();

  constexpr int kSlotsAt = C::kStages * C::kStageBytes;
  SourceOfTerms<C> source(p, at, stages + kSlotsAt);
  float total[C::kFragmentsM][C::kFragmentsN][4] = {};
  typename C::Accumulator acc[C::kFragmentsM][C::kFragmentsN][4];
  restart<C>(acc);
  int slot = 0, multiplied_k = 0;
  auto const multiplied = [&](int step) {
    auto const* const terms = reinterpret_cast<float const*>(shared + kSlotsAt + slot * C::kSlotBytes);
    if constexpr (C::kHalfStages) add_block<C>(total, acc, at, terms + step * C::kTermsOfBlock);
    if (step == 0) return;
    multiplied_k += kTileK;
    if constexpr (!C::kHalfStages) {
      bool const ends = (multiplied_k & p.block - 1) == 0 || multiplied_k >= p.product.k;
      if (ends) add_block<C>(total, acc, at, terms);
    }
    slot = slot + 1 == C::kSlots ? 0 : slot + 1;
  };
  auto const copy_terms = [&](int k) { source.copy(k); };
  auto const from_a = sm80::rows_of_a<C>(p.product, at);
  auto const from_b = sm80::rows_of_b<C>(p.product, at);
  sm80::sum_products<C>(p.product, at, stages, from_a, from_b, acc, copy_terms, multiplied);
  __syncthreads();  // the epilogue's terms take the place of the stages and slots
  sm80::load_terms<C>(p.product, at, shared);
  __syncthreads();
  sm80::write_tile<C>(total, p.product, at, shared);
}

template <class C>
cudaError_t prepare(bool& fits) {
  auto* const kernel = reinterpret_cast<void const*>(block_quantized_mm_kernel<C>);
  return prepare_kernel(kernel, {{}, C::kThreads, C::kSharedBytes}, fits);
}

template <class C>
cudaError_t launch(BlockQuantizedMm const& problem, Submit const& submit) {
  Params const params{sm80::make_params<C>(problem, 1),
                      problem.block,
                      __builtin_ctz(problem.block),
                      problem.groups(),
                      problem.of_a,
                      problem.of_b};
  unsigned const blocks = params.product.tiles_m * params.product.tiles_n * unsigned(problem.batch);
  LaunchShape const shape{blocks, C::kThreads, C::kSharedBytes};
  return jax_qmm::launch(submit, shape, block_quantized_mm_kernel<C>, params);
}

template <class C>
Instance instance() {
  Instance i{C::kIn, C::kZeroPoints};
  i.shortest = C::kHalfStages ? 32 : 64, i.longest = C::kHalfStages ? 32 : BlockQuantizedMm::kLongest;
  i.tile_m = C::kTileM, i.tile_n = C::kTileN, i.stages = C::kStages, i.threads = C::kThreads;
  i.blocks_per_sm = C::kBlocksPerSm, i.shared_bytes = C::kSharedBytes;
  i.prepare = prepare<C>, i.launch = launch<C>;
  return i;
}

template <DType In, bool kZeroPoints>
void add_instances(std::vector<Instance>& to) {
  auto const add = [&](auto half_stages) {
    constexpr bool kHalf = decltype(half_stages)::value;
    to.push_back(instance<Config<In, kZeroPoints, kHalf, 16, 64, 1, 2, 8, 2>>());
    to.push_back(instance<Config<In, kZeroPoints, kHalf, 64, 64, 2, 2, 4, 2>>());
    to.push_back(instance<Config<In, kZeroPoints, kHalf, 128, 128, 2, 4, 4, 1>>());
  };
  add(std::false_type());
  add(std::true_type());
}

}  // namespace jax_qmm::block_quantized
