// Products of few rows of 16-bit x, for which reading weights is all that takes time. No barrier stands in the
// loop: each warp has a contiguous part of K, and copies its steps of weights and x to shared memory of its own,
// several ahead. (Loads to registers would not be ahead: ptxas gives those of all steps one scoreboard, so that the
// first use waits for all.) A lane makes the terms of one row's blocks, for all. Blocks go from one tile of rows of
// weights to the next, whose first steps are on their way when the sums of the last are added.
#pragma once

#include "block_scaled_mm/step.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"

namespace jax_qmm::block_scaled {

// The steps of a warp, of all tiles of its block, p.stages of which are on their way.
template <class C>
class StepsOfWarp {
 public:
  using Term = typename C::Weights::Term;
  static constexpr int kMostStages = 4;

  // Of a stage of a warp: words of all lanes, of which each reads its own; terms of all rows; rows of x.
  __host__ __device__ static int stage_bytes(int m) { return kWordBytes + kTermBytes + m * kPitch; }

  // `tile` is the first of `tiles` that the warp goes through, `begin` and `end` are its columns.
  __device__ StepsOfWarp(Params const& p, int l, int tile, int tiles, int begin, int end, uint8_t* stages)
      : p_(p),
        l_(l),
        tile_(tile),
        begin_(begin),
        end_(end),
        left_(p.steps * tiles),
        x_(static_cast<uint16_t const*>(p.x) + l * p.x_batch_stride),
        stages_(stages),
        stage_(stages),
        terms_(stages) {
    start();
    for (int i = 0; i < p.stages; ++i) {
      copy();
      next();
    }
  }

  // Waits until the next step is there for all lanes.
  __device__ void wait() const {
    switch (p_.stages) {
      case 4:
        wait_for_copies<3>();
        break;
      case 3:
        wait_for_copies<2>();
        break;
      case 2:
        wait_for_copies<1>();
        break;
      default:
        wait_for_copies<0>();
    }
    __syncwarp();
  }

  __device__ void load(uint32_t (&words)[C::kTiles][2][4]) const {
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint4 const v = *reinterpret_cast<uint4 const*>(stage_ + (2 * i + h) * 512 + threadIdx.x % 32 * 16);
        words[i][h][0] = v.x, words[i][h][1] = v.y, words[i][h][2] = v.z, words[i][h][3] = v.w;
      }
    }
  }

  // The term of a unit of columns, of row h of tile i that this lane multiplies.
  __device__ Term term(int unit, int i, int h) const {
    return reinterpret_cast<Term const*>(stage_ + kWordBytes)[32 * unit + 16 * i + 8 * h + threadIdx.x % 32 / 4];
  }

  // Where this lane's chunk of 8 rows of x is: those that are not there repeat the last one, and give no results.
  __device__ uint32_t x(int first_row) const {
    int const lane = threadIdx.x % 32, row = min(first_row + lane % 8, p_.m - 1);
    return address(stage_ + kWordBytes + kTermBytes + row * kPitch + lane / 8 * 16);
  }

  // Copies another step to where the present one was, and goes to the next.
  __device__ void release() {
    __syncwarp();
    copy();
    next();
  }

 private:
  static constexpr int kRow = 2 * C::kColumns, kPitch = kRow + 16;  // of x
  static constexpr int kWordBytes = C::kTiles * 2 * 512, kTermBytes = C::kUnits * 32 * int(sizeof(Term));
  static_assert(C::kRows == 32, "a lane has the terms of a row");

  __device__ static uint32_t address(void const* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }

  __device__ void next() {
    int const bytes = stage_bytes(p_.m);
    stage_ += bytes;
    if (stage_ == stages_ + p_.stages * bytes) stage_ = stages_;
  }

  // Goes to the first step of a tile. Rows beyond the matrix repeat its last one.
  __device__ void start() {
    int const lane = threadIdx.x % 32, first_n = tile_ * C::kRows;
    column_ = begin_;
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const n = min(first_n + 16 * i + 8 * h + lane / 4, p_.n - 1);
        words_[i][h] =
            p_.w + l_ * p_.w_batch_stride + int64_t(n) * p_.row_bytes + column_ / 8 * C::kBits + lane % 4 * 16;
      }
    }
    first_group_ = int64_t(min(first_n + lane, p_.n - 1)) * p_.groups;
  }

  // Terms come by registers, and are stored a step later, when they are there.
  __device__ void copy() {
    bool const there = left_ > 0 && column_ < end_;
    if (there) {
      copy_words();
      copy_x();
    }
    commit_copies();
    store_terms();
    there_ = there;
    if (there) load_terms();
    if (p_.stages == 1) store_terms();
    if (left_ > 0) {
      --left_;
      column_ += C::kColumns;
      if (++step_ == p_.steps) {
        step_ = 0, tile_ += gridDim.x;
        if (left_ > 0) start();
      }
    }
  }

  __device__ void copy_words() {
    uint32_t const to = address(stage_) + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        copy_async<16>(to + (2 * i + h) * 512, words_[i][h], true);
        words_[i][h] += 64;
      }
    }
  }

  // What is beyond x becomes zeros.
  __device__ void copy_x() const {
    constexpr int kChunks = C::kColumns / 8, kRowsAtOnce = 32 / kChunks;
    int const lane = threadIdx.x % 32, k = column_ + lane % kChunks * 8;
    for (int row = lane / kChunks; row < p_.m; row += kRowsAtOnce) {
      uint8_t* const to = stage_ + kWordBytes + kTermBytes + row * kPitch + lane % kChunks * 16;
      uint16_t const* const from = x_ + int64_t(row) * p_.k + k;
      if (p_.aligned) {
        copy_async<16>(address(to), reinterpret_cast<uint8_t const*>(from), k < end_);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) reinterpret_cast<uint16_t*>(to)[i] = k + i < end_ ? from[i] : 0;
      }
    }
  }

  // Of this lane's row.
  __device__ void load_terms() {
    terms_ = stage_ + kWordBytes;
#pragma unroll
    for (int u = 0; u < C::kUnits; ++u) {
      int const column = column_ + u * C::kUnit;
      // Where there are zeros of x there shall be one of w.
      scales_[u] = u == 0 || column < end_ ? load_term(p_.scale, p_.scale.dtype, column) : 0;
      if (p_.zero_point.data != nullptr)
        zeros_[u] = load_term(p_.zero_point, p_.zero_point.dtype, min(column, end_ - 1));
    }
  }

  __device__ uint32_t load_term(BlockScaledMm::Blocks const& blocks, DType dtype, int column) const {
    int64_t const at = l_ * blocks.batch_stride + first_group_ + __umulhi(2 * (column / C::kUnit), p_.block_inverse);
    if (dtype == DType::kS8) return static_cast<uint8_t const*>(blocks.data)[at];
    if (dtype == DType::kF32) return static_cast<uint32_t const*>(blocks.data)[at];
    return static_cast<uint16_t const*>(blocks.data)[at];
  }

  __device__ void store_terms() const {
    if (!there_) return;
#pragma unroll
    for (int u = 0; u < C::kUnits; ++u) {
      float const scale = to_float(scales_[u], p_.scale.dtype);
      reinterpret_cast<Term*>(terms_)[32 * u + threadIdx.x % 32] =
          C::Weights::term(scale, zeros_[u], p_.zero_point.dtype);
    }
  }

  Params const& p_;
  int l_, tile_, begin_, end_, left_, step_ = 0, column_;
  uint16_t const* x_;
  uint8_t *stages_, *stage_;
  uint8_t const* words_[C::kTiles][2];
  int64_t first_group_;
  // Terms that are on their way: whether there are any, to where, and what they are made of.
  bool there_ = false;
  uint8_t* terms_;
  uint32_t scales_[C::kUnits], zeros_[C::kUnits] = {};
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) direct_kernel(Params p) {
#if __CUDA_ARCH__ >= 800  // else nothing: select.cc chooses no kernel
  constexpr int kTilesM = C::kTileM / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  auto* const partial = reinterpret_cast<float*>(shared);
  int const warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  int const l = blockIdx.x / p.tiles_n, first_tile = blockIdx.x % p.tiles_n;

  begin();
  int const k_begin = blockIdx.y * p.k_of_part, k_end = min(p.k, k_begin + p.k_of_part);
  int const k_of_warp = (k_end - k_begin + C::kStep - 1) / C::kStep * C::kColumns;
  int const first_k = min(k_end, k_begin + warp * k_of_warp), end_k = min(k_end, first_k + k_of_warp);
  int const tiles = (p.tiles_n - first_tile + gridDim.x - 1) / gridDim.x;
  int const stages = p.stages * StepsOfWarp<C>::stage_bytes(p.m);
  StepsOfWarp<C> steps(p, l, first_tile, tiles, first_k, end_k,
                       shared + C::kWarpsK * p.m * C::kSumsPitch * sizeof(float) + warp * stages);

  for (int i = 0; i < tiles; ++i) {
    float acc[C::kTiles][kTilesM][4] = {};
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      steps.wait();
      if (first_k + step * C::kColumns < end_k) {
        using Term = typename C::Weights::Term;
        uint32_t words[C::kTiles][2][4];
        steps.load(words);
        Term terms[C::kTiles][2];  // of the only unit
#pragma unroll
        for (int j = 0; j < 2 * C::kTiles; ++j) terms[j / 2][j % 2] = steps.term(0, j / 2, j % 2);
        auto const take = [&](auto piece, int j, int h, Term& first, Term& second) {
          constexpr int kUnit = 32 * decltype(piece)::value / C::kUnit;
          first = C::kUnits == 1 ? terms[j][h] : steps.term(kUnit, j, h);
          second = C::kUnit == 16 ? steps.term(kUnit + 1, j, h) : first;
        };
        uint32_t x[kTilesM];
#pragma unroll
        for (int j = 0; j < kTilesM; ++j) x[j] = steps.x(8 * j);
        multiply_step<C>(words, acc, take, [&](auto piece, auto tile, uint32_t (&b)[4]) {
          load_matrices<64 * decltype(piece)::value>(b[0], b[1], b[2], b[3], x[decltype(tile)::value]);
        });
      }
      steps.release();
    }
    if (i > 0) __syncthreads();  // the sums of the last tile are added
#pragma unroll
    for (int j = 0; j < C::kTiles * kTilesM; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        int const m = j % kTilesM * 8 + 2 * member + c % 2, row = j / kTilesM * 16 + group + c / 2 * 8;
        if (m < p.m) partial[(warp * p.m + m) * C::kSumsPitch + row] = acc[j / kTilesM][j % kTilesM][c];
      }
    }
    __syncthreads();
    int const first_n = (first_tile + i * gridDim.x) * C::kRows;
    write_rows<C::kRows, C::kSumsPitch, C::kThreads>(p, partial, C::kWarpsK, p.m, p.m, l, 0, first_n);
  }
#endif
}

template <class C>
cudaError_t prepare_direct(bool& fits) {
  Gpu const* gpu;
  if (cudaError_t const error = current_gpu(gpu)) return error;
  auto* const kernel = reinterpret_cast<void const*>(direct_kernel<C>);
  return prepare_kernel(kernel, {{}, C::kThreads, size_t(gpu->shared_memory)}, fits);
}

template <class C>
cudaError_t launch_direct(BlockScaledMm const& problem, int split, Submit const& submit) {
  Gpu const* gpu;
  if (cudaError_t const error = current_gpu(gpu)) return error;
  Params params = make_params<C>(problem);
  int const parts = set_parts<C>(problem, split, params);
  params.steps = int(ceil_div(params.k_of_part, C::kStep));
  // What all blocks of an SM share is a little more than one may have, of which each takes a KiB for itself.
  int const sums = C::kWarpsK * problem.m * C::kSumsPitch * int(sizeof(float));
  int const stage = C::kWarpsK * StepsOfWarp<C>::stage_bytes(problem.m);
  int const fitting = (gpu->shared_memory / C::kBlocksPerSm - 512 - sums) / stage;
  params.stages = std::clamp(fitting, 1, StepsOfWarp<C>::kMostStages);
  // A block that stays for several tiles has x of one entry of the batch.
  unsigned const tiles = params.tiles_n * unsigned(problem.batch);
  unsigned const resident = std::max(1, gpu->sm_count * C::kBlocksPerSm / parts);
  LaunchShape const shape{{problem.batch > 1 ? tiles : std::min(tiles, resident), unsigned(parts)},
                          C::kThreads,
                          size_t(sums + params.stages * stage)};
  cudaError_t const error = jax_qmm::launch(submit, shape, direct_kernel<C>, params);
  return error || parts == 1 ? error : add_parts(problem, parts, submit);
}

template <class C>
Instance direct_instance(DType in) {
  Instance i = describe<C>(in);
  i.direct = true;
  i.prepare = prepare_direct<C>;
  i.launch = launch_direct<C>;
  return i;
}

}  // namespace jax_qmm::block_scaled
