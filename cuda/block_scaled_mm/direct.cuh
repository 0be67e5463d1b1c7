// Products of few rows of 16-bit x, for which reading weights is all that takes time. No barrier stands in the loop:
// each warp has a contiguous part of K, and copies its steps of weights, scales, zero points and x to shared memory of
// its own, two ahead, so that L1 keeps memory for x. (Loads to registers would not be ahead: ptxas gives those of all
// steps one scoreboard, so that the first use waits for all.) A lane makes the terms of one row's blocks, for all.
// Blocks go from one tile of rows of weights to the next, whose first steps are on their way when the sums of the last
// are added, and where x is small, they copy it with the first tile alone.
#pragma once

#include "block_scaled_mm/step.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"

namespace jax_qmm::block_scaled {

// Keeps what is made of a lane's place in a register, where the compiler would make it again at each step.
__device__ inline uint32_t kept(uint32_t value) {
  asm("" : "+r"(value));
  return value;
}
template <class T>
__device__ T* kept(T* pointer) {
  auto bits = reinterpret_cast<uint64_t>(pointer);
  asm("" : "+l"(bits));
  return reinterpret_cast<T*>(bits);
}

__device__ inline uint32_t address_of(uint8_t const* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// The steps of a warp, of all tiles of its block, p.stages of which are on their way.
template <class C>
class StepsOfWarp {
 public:
  using Term = typename C::Weights::Term;

  // Bytes of a stage of a warp: words of all lanes, of which each reads its own, and what terms of all rows are made
  // of.
  __host__ __device__ static int stage_bytes(bool zero_points) { return kWordBytes + block_bytes(zero_points); }
  // Bytes of a warp: its stages, terms of the present step, and rows of x of `x_steps`. An odd multiple of 128: where
  // it is one of 1024, warps that copy to the same banks make a small product take up to 1.3 times as long on an H100.
  static int bytes(int m, bool zero_points, int stages, int x_steps) {
    int const all = stages * stage_bytes(zero_points) + kTermBytes + x_steps * m * kPitch;
    return (all + 127) / 256 * 256 + 128;
  }

  // `first_n` and `end_n` are the rows of weights that the warp goes through, `begin` and `end` its columns.
  __device__ StepsOfWarp(Params const& p, int l, int first_n, int end_n, int begin, int end, uint32_t shared)
      : p_(p), l_(l), first_n_(first_n), end_n_(end_n), begin_(begin), end_(end) {
    int const lane = threadIdx.x % 32;
    bool const zero_points = p.zero_point.data != nullptr;
    bytes_ = int(kept(stage_bytes(zero_points))), x_bytes_ = int(kept(p.m * kPitch));
    uint32_t const terms = shared + p.stages * bytes_, x = terms + kTermBytes;
    scale_bytes_ = kept(bytes_of(p.scale.dtype));
    zero_bytes_ = C::kFloatZero ? kept(bytes_of(p.zero_point.dtype)) : 1;
    own_words_ = kept(shared + lane * 16);
    own_blocks_ = kept(shared + kWordBytes + lane * 4);
    own_terms_ = kept(terms + lane * uint32_t(sizeof(Term)));
    terms_ = kept(terms + lane / 4 * uint32_t(sizeof(Term)));
#pragma unroll
    for (int j = 0; j < kTilesM; ++j) x_[j] = kept(x + min(8 * j + lane % 8, p.m - 1) * kPitch + lane / 8 * 16);
    own_x_ = kept(x + lane / kChunks * kPitch + lane % kChunks * 16);
    from_x_ = kept(static_cast<uint16_t const*>(p.x) + l * p.x_batch_stride + int64_t(lane / kChunks) * p.k +
                   lane % kChunks * 8);
    start();
    for (int i = 0; i < p.stages; ++i) {
      copy();
      next();
    }
    present_x_ = 0;
  }

  // Waits until the next step, if there is one, is there for all lanes.
  __device__ void wait(bool any) const {
    if (p_.stages == 2) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    if (any) make_terms();
    __syncwarp();
  }

  __device__ void load(uint32_t (&words)[C::kTiles][2][4]) const {
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint4 const v = *at<uint4>(own_words_ + stage_ + (2 * i + h) * 512);
        words[i][h][0] = v.x, words[i][h][1] = v.y, words[i][h][2] = v.z, words[i][h][3] = v.w;
      }
    }
  }

  // The term of a unit of columns, of row h of tile i that this lane multiplies.
  __device__ Term term(int unit, int i, int h) const { return at<Term>(terms_)[32 * unit + 16 * i + 8 * h]; }

  // Where this lane's chunk of 8 rows of x is: those that are not there repeat the last one, and give no results.
  __device__ uint32_t x(int eight) const { return x_[eight] + present_x_; }

  // Copies another step to where the present one was, and goes to the next.
  __device__ void release() {
    __syncwarp();
    copy();
    next();
  }

 private:
  static constexpr int kTilesM = C::kTileM / 8;
  static constexpr int kPitch = 2 * C::kColumns + 16;  // of rows of x
  static constexpr int kChunks = C::kColumns / 8, kRowsAtOnce = 32 / kChunks;
  static constexpr int kWordBytes = C::kTiles * 2 * 512, kTermBytes = C::kUnits * 32 * int(sizeof(Term));
  static constexpr int kScales = 128, kZeros = kScales + C::kUnits * 128;  // of all rows, behind where these are
  static_assert(C::kRows == 32, "a lane has the terms of a row");

  __host__ __device__ static int block_bytes(bool zero_points) {
    return zero_points ? kZeros + C::kUnits * 128 : kZeros;
  }

  template <class T>
  __device__ static T* at(uint32_t address) {
    extern __shared__ __align__(128) uint8_t more_shared[];
    return reinterpret_cast<T*>(more_shared + int32_t(address - address_of(more_shared)));
  }

  __device__ void next() {
    stage_ = stage_ + bytes_ == p_.stages * bytes_ ? 0 : stage_ + bytes_;
    present_x_ = present_x_ + x_bytes_ == p_.x_steps * x_bytes_ ? 0 : present_x_ + x_bytes_;
  }

  // Goes to the first step of a tile. Rows beyond the last one repeat it.
  __device__ void start() {
    int const lane = threadIdx.x % 32;
    column_ = begin_;
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const n = min(first_n_ + 16 * i + 8 * h + lane / 4, end_n_ - 1);
        words_[i][h] = kept(p_.w + l_ * p_.w_batch_stride + int64_t(n) * p_.row_bytes + lane % 4 * 16);
      }
    }
    int64_t const first_group = int64_t(min(first_n_ + lane, end_n_ - 1)) * p_.groups;
    scale_ = first_of(p_.scale, scale_bytes_, first_group);
    zero_ = first_of(p_.zero_point, zero_bytes_, first_group);
  }

  __device__ uint8_t const* first_of(BlockScaledMm::Blocks const& blocks, unsigned bytes, int64_t group) const {
    int64_t const at = l_ * blocks.batch_stride + group;
    return kept(static_cast<uint8_t const*>(blocks.data) + at * bytes);
  }

  __device__ void copy() {
    if (first_n_ < end_n_ && column_ < end_) {
      copy_words();
      copy_blocks();
      if (p_.x_steps < p_.steps) {
        copy_x(present_x_);
      } else if (is_first_) {
        copy_x(step_ * x_bytes_);
      }
    }
    commit_copies();
    column_ += C::kColumns;
    if (++step_ == p_.steps) {
      step_ = 0, first_n_ += C::kRows, is_first_ = false;
      if (first_n_ < end_n_) start();
    }
  }

  __device__ void copy_words() const {
    unsigned const column = unsigned(column_) / 8 * C::kBits;
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        copy_async<16>(own_words_ + stage_ + (2 * i + h) * 512, words_[i][h] + column, true);
      }
    }
  }

  // What is beyond x becomes zeros. All blocks of an SM copy the same x, which L1 has for them.
  __device__ void copy_x(int offset) const {
    int const lane = threadIdx.x % 32, k = column_ + lane % kChunks * 8;
    uint32_t to = own_x_ + offset;
    uint16_t const* from = from_x_ + column_;
#pragma unroll 1
    for (int row = lane / kChunks; row < p_.m; row += kRowsAtOnce) {
      if (p_.aligned) {
        copy_async<16, true>(to, reinterpret_cast<uint8_t const*>(from), k < end_);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) at<uint16_t>(to)[i] = k + i < end_ ? from[i] : 0;
      }
      to += kRowsAtOnce * kPitch, from += kRowsAtOnce * p_.k;
    }
  }

  // Scales and zero points of this lane's row, in words that have them, of which another one says where. Beyond x,
  // where it has zeros, there are none, which gives terms of zero.
  __device__ void copy_blocks() const {
    uint32_t const to = own_blocks_ + stage_;
    uint32_t where = 0;
#pragma unroll
    for (int u = 0; u < C::kUnits; ++u) {
      int const column = column_ + u * C::kUnit;
      bool const inside = u == 0 || column < end_;
      unsigned const group = __umulhi(unsigned(column) / C::kUnit * 2, p_.block_inverse);
      where |= copy_word(to + kScales + 128 * u, scale_, scale_bytes_, group, inside) << 4 * u;
      if (p_.zero_point.data != nullptr) {
        where |= copy_word(to + kZeros + 128 * u, zero_, zero_bytes_, group, inside) << 4 * u + 2;
      }
    }
    *at<uint32_t>(to) = where;
  }

  // Copies a word up to an element, and returns at which of its bytes that begins.
  __device__ static unsigned copy_word(uint32_t to, uint8_t const* data, unsigned bytes, unsigned at, bool inside) {
    uint8_t const* const element = data + uint64_t(at) * bytes;
    unsigned const before = reinterpret_cast<uintptr_t>(element) % 4;
    copy_word_async(to, element - before, inside ? before + bytes : 0);
    return before;
  }

  __device__ void make_terms() const {
    uint32_t const from = own_blocks_ + stage_, where = *at<uint32_t>(from);
    auto const element = [&](uint32_t word, int bit) { return *at<uint32_t>(from + word) >> (where >> bit) % 4 * 8; };
#pragma unroll
    for (int u = 0; u < C::kUnits; ++u) {
      float const scale = to_float(element(kScales + 128 * u, 4 * u), p_.scale.dtype);
      uint32_t const zero = p_.zero_point.data != nullptr ? element(kZeros + 128 * u, 4 * u + 2) : 0;
      at<Term>(own_terms_)[32 * u] = C::Weights::term(scale, zero, p_.zero_point.dtype);
    }
  }

  Params const& p_;
  int l_, first_n_, end_n_, begin_, end_, step_ = 0, column_;
  bool is_first_ = true;  // tile that is copied
  // In shared memory: the bytes of a stage and of a step's x, where the present ones are, and of the first ones what
  // this lane copies, makes and multiplies.
  int bytes_, x_bytes_, stage_ = 0, present_x_ = 0;
  uint32_t own_words_, own_blocks_, own_terms_, own_x_, terms_, x_[kTilesM];
  uint32_t scale_bytes_, zero_bytes_;
  uint16_t const* from_x_;
  uint8_t const *words_[C::kTiles][2], *scale_, *zero_;  // at the first column of rows
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) direct_kernel(Params p) {
#if __CUDA_ARCH__ >= 800  // else nothing: select.cc chooses no kernel
  constexpr int kTilesM = C::kTileM / 8;
  // Has the sums of all, and behind them the stages of as many warps as there is room for; the others' are asked for.
  __shared__ __align__(128) uint8_t shared[kStaticBytes];
  extern __shared__ __align__(128) uint8_t more_shared[];
  auto* const partial = reinterpret_cast<float*>(shared);
  int const warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  int const l = blockIdx.x / p.blocks_n, block = blockIdx.x % p.blocks_n;
  int const tiles = p.tiles_n / p.blocks_n, more = p.tiles_n % p.blocks_n;  // the first blocks have one more
  int const first_n = C::kRows * (block * tiles + min(block, more));
  int const end_n = min(p.n, first_n + C::kRows * (tiles + (block < more)));

  int const k_begin = blockIdx.y * p.k_of_part, k_end = min(p.k, k_begin + p.k_of_part);
  int const k_of_warp = (k_end - k_begin + C::kStep - 1) / C::kStep * C::kColumns;
  int const first_k = min(k_end, k_begin + warp * k_of_warp), end_k = min(k_end, first_k + k_of_warp);

  // The first weights, to L2 by the time that the kernel before this one is done.
  if (first_k < end_k) {
    int const n = min(first_n + int(threadIdx.x) % 32, end_n - 1);
    prefetch_l2(p.w + l * p.w_batch_stride + int64_t(n) * p.row_bytes + first_k / 8 * C::kBits);
  }
  begin_in_turn();
  int const sums = C::kWarpsK * p.m * C::kSumsPitch * sizeof(float);
  StepsOfWarp<C> steps(p, l, first_n, end_n, first_k, end_k,
                       warp < p.static_warps ? address_of(shared) + sums + warp * p.warp_bytes
                                             : address_of(more_shared) + (warp - p.static_warps) * p.warp_bytes);

  for (int n = first_n; n < end_n; n += C::kRows) {
    float acc[C::kTiles][kTilesM][4] = {};
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      bool const any = first_k + step * C::kColumns < end_k;
      steps.wait(any);
      if (any) {
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
        multiply_step<C>(words, acc, take, [&](auto piece, auto tile, uint32_t (&b)[4]) {
          load_matrices<64 * decltype(piece)::value>(b[0], b[1], b[2], b[3], steps.x(decltype(tile)::value));
        });
      }
      steps.release();
    }
    if (n > first_n) __syncthreads();  // the sums of the last tile are added
#pragma unroll
    for (int j = 0; j < C::kTiles * kTilesM; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        int const m = j % kTilesM * 8 + 2 * member + c % 2, row = j / kTilesM * 16 + group + c / 2 * 8;
        if (m < p.m) partial[(warp * p.m + m) * C::kSumsPitch + row] = acc[j / kTilesM][j % kTilesM][c];
      }
    }
    __syncthreads();
    write_rows<C::kRows, C::kSumsPitch, C::kThreads>(p, partial, C::kWarpsK, p.m, p.m, l, 0, n, end_n);
  }
#endif
}

template <class C>
cudaError_t prepare_direct(bool& fits) {
  Gpu const* gpu;
  if (cudaError_t const error = current_gpu(gpu)) return error;
  auto* const kernel = reinterpret_cast<void const*>(direct_kernel<C>);
  return prepare_kernel(kernel, {{}, C::kThreads, size_t(gpu->shared_memory - kStaticBytes)}, fits);
}

template <class C>
cudaError_t launch_direct(BlockScaledMm const& problem, int split, Submit const& submit) {
  Gpu const* gpu;
  if (cudaError_t const error = current_gpu(gpu)) return error;
  Params params = make_params<C>(problem);
  int const parts = set_parts<C>(problem, split, params);
  params.steps = int(ceil_div(params.k_of_part, C::kStep));
  // What all blocks of an SM share is a little more than one may have, of which each takes a KiB for itself.
  using Steps = StepsOfWarp<C>;
  int const sums = C::kWarpsK * problem.m * C::kSumsPitch * int(sizeof(float));
  int const of_block = gpu->shared_memory / C::kBlocksPerSm - 512;
  bool const zero_points = problem.zero_point.data != nullptr;
  auto const bytes = [&](int stages, int x_steps) { return Steps::bytes(problem.m, zero_points, stages, x_steps); };
  auto const static_warps = [&](int of_warp) { return std::min((kStaticBytes - sums) / of_warp, C::kWarpsK); };
  auto const asked = [&](int of_warp) { return (C::kWarpsK - static_warps(of_warp)) * of_warp; };
  auto const fits = [&](int of_warp) { return kStaticBytes + asked(of_warp) <= of_block; };
  // As many blocks as are resident share the tiles: of each entry of a batch whole ones, of which none has more tiles
  // than it needs.
  int64_t const resident = std::max(1, gpu->sm_count * C::kBlocksPerSm / parts);
  int64_t const most = ceil_div(int64_t(params.tiles_n) * problem.batch, resident);
  int64_t const blocks = std::max(resident / problem.batch, ceil_div(params.tiles_n, most));
  params.blocks_n = unsigned(std::min<int64_t>(params.tiles_n, blocks));
  params.stages = fits(bytes(2, 2)) ? 2 : 1;
  // x stays for the next tiles, unless it is so much that it had better come again from an L1 that is larger, because
  // nothing else asks for memory.
  int const every = bytes(2, params.steps), few = bytes(2, 2);
  bool const several = params.tiles_n > params.blocks_n, stays = fits(every) && (asked(few) > 0 || every <= 2 * few);
  params.x_steps = several && stays ? params.steps : params.stages;
  params.warp_bytes = bytes(params.stages, params.x_steps);
  params.static_warps = static_warps(params.warp_bytes);
  LaunchShape const shape{
      {params.blocks_n * unsigned(problem.batch), unsigned(parts)}, C::kThreads, size_t(asked(params.warp_bytes))};
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
