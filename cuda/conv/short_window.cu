// Convolutions by windows of few bytes, as the first layer of a network has: of 3 or 4 channels. A block brings the
// part of an image that the windows of some lines of 16 output pixels have into shared memory, where a register of the
// tensor cores' operand is one word of it: four channels of a tap, at a place that differs between lanes alone. Weights
// stay in registers while the block takes one tile after the other.
//
// In a fragment of the sums a thread has two neighbours of every 8 columns. Weights are loaded so that these are 8
// neighbours, which the thread stores at once:
//
//   column 2 q + e of fragment j, of thread q of four   is the tile's   8 q + 2 j + e
#include <algorithm>
#include <cmath>

#include "conv/instances.h"
#include "conv/short_window.h"
#include "conv/window.cuh"
#include "core/async_copy.cuh"
#include "core/launch.cuh"
#include "core/mma.cuh"
#include "core/prepare.h"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::conv {
namespace {

using namespace short_window;

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kFragments = kTileN / 8, kEach = 2 * kFragments;  // kEach: columns of a thread
constexpr int kMostShared = 40 * 1024;  // of the two parts of images, so that no block keeps another from an SM

// `Steps` of 32 bytes that a window has at most.
template <int Steps>
struct Config {
  static constexpr int kSteps = Steps, kWords = 8 * Steps;
  static constexpr int kBlocksPerSm = Steps > 2 ? 4 : 6;
};

struct Params {
  uint8_t const* lhs;
  uint8_t const* rhs;
  void* out;
  int n, k;
  int64_t lhs_batch_stride, rhs_batch_stride, out_batch_stride;
  Window window;
  Columns columns;
  int pixels_down, pixels_across;
  int down;  // lines of a tile
  Divisor tiles_of_image, tiles_across;
  int tiles, tiles_n;  // tiles: of all images
  unsigned blocks;     // that share the tiles of some columns
  // In words: a line of an image, what lies between windows and before the first one.
  int line_words, words_of_stride, words_before;
  // Of an image, what a tile's windows have: lines of words, copied in pieces of so many bytes. The first window begins
  // `shift` words behind the first piece.
  int lines, words, shift, copied;
  Divisor pieces;
  bool stores_whole;
  EpilogueArgs<true> epilogue;
};

// What columns share, where 8 of a thread lie side by side.
struct Shared {
  alignas(16) float scale_b[kTileN], bias[kTileN];
  alignas(16) int32_t azp_adj[kTileN], azp_b[kTileN];
};

struct Tile {
  int image, y, x;  // of the first output pixel

  __device__ Tile(Params const& p, int tile) {
    image = p.tiles_of_image.divide(tile);
    y = p.tiles_across.divide(tile) * p.down;
    x = tile * kAcross;
  }
};

// Starts the copies of the part of an image that a tile's windows have, `Bytes` at a time, which lie in the image or
// out of it as a whole. Outside stand zeros, or the zero point.
template <int Bytes>
__device__ void copy(Params const& p, Tile const& at, int l, uint32_t outside, uint32_t to) {
  constexpr int kWords = Bytes / 4;
  Window const& w = p.window;
  int const top = at.y * w.strides[1] - w.before[1], left = at.x * p.words_of_stride - p.words_before;
  uint8_t const* const image = p.lhs + l * p.lhs_batch_stride + at.image * w.image_stride;
  for (int i = threadIdx.x; i < p.lines * p.pieces.divisor; i += kThreads) {
    int piece = i;
    int const line = p.pieces.divide(piece), y = top + line, x = left + kWords * piece;
    bool const inside = unsigned(y) < unsigned(w.image[1]) && unsigned(x) < unsigned(p.line_words);
    if (inside || outside == 0) {
      copy_async<Bytes>(to + Bytes * i, image + (inside ? 4 * (int64_t(y) * p.line_words + x) : 0), inside);
    } else {
#pragma unroll
      for (int j = 0; j < Bytes; j += 4) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + Bytes * i + j), "r"(outside) : "memory");
      }
    }
  }
}

template <class C, class Bits>
__global__ void __launch_bounds__(kThreads, C::kBlocksPerSm) short_window_kernel(Params const p) {
  extern __shared__ __align__(16) uint32_t parts[];  // of images: this tile's, and the next one's
  __shared__ Shared shared;
  int const first_n = int(blockIdx.x % p.tiles_n) * kTileN, l = blockIdx.x / p.tiles_n / p.blocks;
  int tile = blockIdx.x / p.tiles_n % p.blocks;
  Window const& w = p.window;
  auto const copy_tile = [&](int tile, int part) {
    Tile const at(p, tile);
    bool const has_zero_points = p.epilogue.azp.data != nullptr;
    uint32_t const outside = has_zero_points ? 0x01010101 * uint8_t(p.epilogue.azp.load(l, at.image)) : 0;
    uint32_t const to = static_cast<uint32_t>(__cvta_generic_to_shared(parts)) + 4 * part * p.lines * p.words;
    p.copied == 16 ? copy<16>(p, at, l, outside, to) : copy<4>(p, at, l, outside, to);
    commit_copies();
  };
  begin();

  copy_tile(tile, 0);
  if (int const i = threadIdx.x, n = first_n + i; i < kTileN) {  // zeros for those that are not there
    auto const term = [&](auto const& from) { return n < p.n ? from.load(l, n) : 0; };
    shared.scale_b[i] = term(p.epilogue.scale_b);
    shared.bias[i] = term(p.epilogue.bias);
    shared.azp_adj[i] = term(p.epilogue.azp_adj);
    shared.azp_b[i] = term(p.epilogue.azp_b);
  }

  // Weights, and where in the part of an image the lane's words of a window are: those of no tap have weights of 0.
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, member = lane % 4;
  uint32_t weights[C::kSteps][kFragments][2];
  int places[C::kSteps][2];
#pragma unroll
  for (int s = 0; s < C::kSteps; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const byte = 4 * (8 * s + 4 * half + member);
      bool const there = byte < p.k;
      int channel = there ? byte : 0, tap[kSpatial];
      p.columns.find(channel, w.dilation, tap);
      int const before = p.shift + group * p.words_of_stride;
      places[s][half] = before + tap[1] * p.words + (tap[2] * w.channels + channel) / 4;
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        int const n = first_n + group / 2 * kEach + 2 * j + group % 2;
        auto const* const from = p.rhs + l * p.rhs_batch_stride + int64_t(n) * p.k + byte;
        weights[s][j][half] = there && n < p.n ? *reinterpret_cast<uint32_t const*>(from) : 0;
      }
    }
  }

  int const column = member * kEach, n = first_n + column;
  bool const has_zero_points = p.epilogue.has_zero_points();
  FullOutput const output = p.epilogue.output.at(l);
#pragma unroll 1
  for (int turn = 0; tile < p.tiles; turn ^= 1) {
    Tile const at(p, tile);
    float const scale_a = p.epilogue.scale_a.load(l, at.image);
    wait_for_copies<0>();
    __syncthreads();  // all have copied this part, and are done with the other
    tile += p.blocks;
    if (tile < p.tiles) copy_tile(tile, turn ^ 1);
#pragma unroll 1
    for (int y = warp; y < p.down && at.y + y < p.pixels_down; y += kWarps) {
      uint32_t const* const line = parts + turn * p.lines * p.words + y * w.strides[1] * p.words;
      uint32_t const* const line_8 = line + 8 * p.words_of_stride;  // of the pixels of a fragment, from the ninth on
      int32_t acc[kFragments][4] = {};
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s) {
        uint32_t const a[] = {line[places[s][0]], line_8[places[s][0]], line[places[s][1]], line_8[places[s][1]]};
#pragma unroll
        for (int j = 0; j < kFragments; ++j) {
          uint32_t const b[] = {weights[s][j][0], weights[s][j][1]};
          mma(acc[j], a, b);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const x = at.x + 8 * half + group, m = (at.image * p.pixels_down + at.y + y) * p.pixels_across + x;
        if (x >= p.pixels_across || n >= p.n) continue;
        int32_t sums[kEach];
        float values[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) sums[i] = acc[i / 2][2 * half + i % 2];
        if (has_zero_points) {
          int32_t const azp = p.epilogue.azp.load(l, at.image), sums_a = p.epilogue.sums_a.load(l, m);
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            int32_t const adj = shared.azp_adj[column + i], azp_b = shared.azp_b[column + i];
            sums[i] = subtract_zero_points(sums[i], Terms<true, Value>{{0, 0, 0, azp, adj}, sums_a, azp_b});
          }
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          float const scale_b = shared.scale_b[column + i], bias = shared.bias[column + i];
          values[i] = scale(sums[i], Terms<true, Value>{{scale_a, scale_b, bias}});
        }
        struct alignas(kEach * sizeof(Bits) < 16 ? kEach * sizeof(Bits) : 16) Whole {
          Bits bits[kEach];
        };
        Bits* const to = static_cast<Bits*>(p.out) + l * p.out_batch_stride + int64_t(m) * p.n + n;
        Whole const results = output.template round<Whole, kEach>(values, sums);
        if (p.stores_whole) {
          *reinterpret_cast<Whole*>(to) = results;
        } else {
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            if (n + i < p.n) to[i] = results.bits[i];
          }
        }
      }
    }
  }
}

struct Part {
  int64_t lines, words;
  int shift, copied;
};

Part part_of(Conv const& p, int down) {
  int const words_of_pixel = p.channels / 4;
  bool const aligned = reinterpret_cast<uintptr_t>(p.a) % 16 == 0 && int64_t(p.image[2]) * words_of_pixel % 4 == 0;
  auto const across = [&](int axis, int pixels) {
    return (pixels - 1) * int64_t(p.strides[axis]) + (p.taps[axis] - 1) * int64_t(p.dilation[axis]) + 1;
  };
  Part part{across(1, down), across(2, kAcross) * words_of_pixel, 0, 4};
  if (aligned) {
    part.shift = unsigned(-p.before[2] * words_of_pixel) % 4, part.copied = 16;
    part.words = ceil_div(part.words + part.shift, 4) * 4;
  }
  return part;
}

template <class C>
cudaError_t prepare(bool& fits) {
  return prepare_all({reinterpret_cast<void const*>(short_window_kernel<C, uint8_t>),
                      reinterpret_cast<void const*>(short_window_kernel<C, uint16_t>),
                      reinterpret_cast<void const*>(short_window_kernel<C, uint32_t>)},
                     {{}, kThreads, kMostShared}, fits);
}

template <class C>
cudaError_t launch(Conv const& p, Submit const& submit) {
  Gpu const* gpu;
  if (cudaError_t const error = current_gpu(gpu)) return error;
  Tiling const tiling = short_window::tiling(p, C::kBlocksPerSm, *gpu);
  int const tiles_across = int(ceil_div(p.pixels[2], kAcross)), tiles_n = int(ceil_div(p.n, kTileN));
  int const words_of_pixel = p.channels / 4, bytes = bytes_of(p.out_dtype);
  Part const part = part_of(p, tiling.down);
  Params const params{static_cast<uint8_t const*>(p.a),
                      static_cast<uint8_t const*>(p.b),
                      p.out,
                      p.n,
                      p.k,
                      p.a_batch_stride,
                      p.b_batch_stride,
                      p.out_batch_stride,
                      Window(p),
                      Columns(p),
                      p.pixels[1],
                      p.pixels[2],
                      tiling.down,
                      Divisor(int(tiling.tiles) / p.images),
                      Divisor(tiles_across),
                      int(tiling.tiles),
                      tiles_n,
                      unsigned(tiling.blocks),
                      p.image[2] * words_of_pixel,
                      p.strides[2] * words_of_pixel,
                      p.before[2] * words_of_pixel + part.shift,
                      int(part.lines),
                      int(part.words),
                      part.shift,
                      part.copied,
                      Divisor(int(part.words) * 4 / part.copied),
                      p.n % kEach == 0 && reinterpret_cast<uintptr_t>(p.out) % std::min(16, kEach * bytes) == 0,
                      epilogue_args<true>(p)};
  LaunchShape const shape{dim3(unsigned(tiles_n * tiling.blocks * p.batch)), kThreads,
                          size_t(8 * part.lines * part.words)};
  auto* const kernel = bytes == 1   ? short_window_kernel<C, uint8_t>
                       : bytes == 2 ? short_window_kernel<C, uint16_t>
                                    : short_window_kernel<C, uint32_t>;
  return jax_qmm::launch(submit, shape, kernel, params);
}

template <class C>
bool serves(Conv const& p) {
  bool const is_plane = p.taps[0] == 1 && p.image[0] == 1 && p.pixels[0] == 1 && p.before[0] == 0;
  if (!is_plane || p.residual.data != nullptr || p.groups > 1 || p.channels % 4 != 0 || p.k > 4 * C::kWords)
    return false;
  double const reach = double(p.pixels[2]) * p.strides[2] + std::abs(double(p.before[2]));  // from an image's beginning
  if (reach * (p.channels / 4) > kLongest) return false;
  Part const part = part_of(p, kMostDown);
  return std::max(part.lines, part.words) <= kMostShared && 8 * part.lines * part.words <= kMostShared;
}

template <class C>
Instance instance() {
  Instance i{"sm80 windows of " + std::to_string(4 * C::kWords) + " bytes int8", serves<C>, prepare<C>, launch<C>};
  i.steps_of_window = C::kSteps, i.blocks_per_sm = C::kBlocksPerSm;
  return i;
}

}  // namespace

void add_short_window(std::vector<Instance>& to) {
  to.push_back(instance<Config<2>>());
  to.push_back(instance<Config<4>>());
  to.push_back(instance<Config<7>>());
}

}  // namespace jax_qmm::conv
