// Convolutions of each channel by itself, by square windows of 3, 5 and 7, which leave tensor cores nothing to share. A
// thread has 4 channels that lie side by side, of a tile of output pixels. Bytes of four pixels below each other, of
// four channels each, become a word for each channel, which dp4a multiplies by a word of weights: for every window that
// has them, in the tile's first line of outputs and in the next ones, whose weights begin further down in their words.
#include <algorithm>

#include "conv/depthwise.cuh"
#include "conv/instances.h"
#include "conv/window.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::conv {
namespace {

template <class T>
struct alignas(16) Four {
  T of[4];
};

// `Taps` by `Taps` pixels, `Stride` apart. A tile has `Down` lines of outputs.
template <int Taps, int Stride, int Down>
struct Square {
  static constexpr int kTaps = Taps, kStride = Stride, kDown = Down, kAcross = 4;
  static constexpr int kLines = (Down - 1) * Stride + Taps, kColumns = (kAcross - 1) * Stride + Taps;  // of the image
  static constexpr int kWords = (kLines + 3) / 4;                          // of a column's pixels
  static constexpr int kPixels = kDown * kAcross, kResults = 4 * kPixels;  // of a tile
  static constexpr int kBlocksPerSm = Taps == 3 ? 4 : 3;

  // What the threads of a block share: of four channels each.
  struct Shared {
    Four<uint32_t> weights[Down][kWords][Taps][kMostChannels / 4];  // of a line of outputs
    Four<float> scale[kMostChannels / 4], bias[kMostChannels / 4];
    Four<int32_t> azp_adj[kMostChannels / 4], azp_b[kMostChannels / 4];
  };
};

struct Params {
  uint8_t const* lhs;
  uint8_t const* rhs;
  void* out;
  int n;
  int64_t lhs_batch_stride, rhs_batch_stride, out_batch_stride, image_stride;
  int tiles;  // of all images
  int tiles_of_thread;
  Divisor tiles_of_image, tiles_across;
  int height, width, pixels_down, pixels_across, above, left;
  unsigned line_stride;
  unsigned blocks_of_entry;
  int threads;  // that have the channels of one tile
  EpilogueArgs<true> epilogue;
};

template <class C>
__device__ void load(Params const& p, int l, int first_channel, int channels, typename C::Shared& shared) {
  uint8_t const* const rhs = p.rhs + l * p.rhs_batch_stride;
  for (int c = threadIdx.x; c < channels; c += kThreads) {
    int const channel = first_channel + c;
    bool const there = channel < p.n;
#pragma unroll
    for (int x = 0; x < C::kTaps; ++x) {
      uint32_t of_column[C::kTaps];
#pragma unroll
      for (int y = 0; y < C::kTaps; ++y) {
        of_column[y] = there ? rhs[int64_t(channel) * (C::kTaps * C::kTaps) + y * C::kTaps + x] : 0;
      }
#pragma unroll
      for (int q = 0; q < C::kDown; ++q) {
#pragma unroll
        for (int w = 0; w < C::kWords; ++w) {
          uint32_t word = 0;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int const y = 4 * w + i - q * C::kStride;
            if (0 <= y && y < C::kTaps) word |= of_column[y] << 8 * i;
          }
          shared.weights[q][w][x][c / 4].of[c % 4] = word;
        }
      }
    }
    if (!there) continue;
    shared.scale[c / 4].of[c % 4] = p.epilogue.scale_b.load(l, channel);
    shared.bias[c / 4].of[c % 4] = p.epilogue.bias.load(l, channel);
    shared.azp_adj[c / 4].of[c % 4] = p.epilogue.azp_adj.load(l, channel);
    shared.azp_b[c / 4].of[c % 4] = p.epilogue.azp_b.load(l, channel);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, C::kBlocksPerSm) depthwise_square_kernel(Params const p) {
  __shared__ __align__(16) typename C::Shared shared;
  int const l = blockIdx.x / p.blocks_of_entry, first_of_block = blockIdx.y * 4 * p.threads;
  begin();
  load<C>(p, l, first_of_block, 4 * p.threads, shared);
  __syncthreads();

  int const apart = kThreads / p.threads;  // tiles at once
  int const own_tile = threadIdx.x / p.threads, of_four = threadIdx.x % p.threads;
  int const first_channel = first_of_block + 4 * of_four;
  if (own_tile >= apart || first_channel >= p.n) return;
  FullOutput const output = p.epilogue.output.at(l);

  // A tile's image and first pixel, and where its windows begin.
  struct Place {
    int image, y, x, top, left;
  };
  int const first_tile = int(blockIdx.x % p.blocks_of_entry) * p.tiles_of_thread * apart + own_tile;
  auto const find = [&](int tile) {
    Place found;
    found.image = p.tiles_of_image.divide(tile);
    found.y = p.tiles_across.divide(tile) * C::kDown, found.x = tile * C::kAcross;
    found.top = found.y * C::kStride - p.above, found.left = found.x * C::kStride - p.left;
    return found;
  };
  // Of pixels outside of the image the nearest one inside is loaded.
  uint32_t pixels[C::kColumns][C::kWords][4];
  auto const load_pixels = [&](Place const& of) {
    uint8_t const* const from = p.lhs + l * p.lhs_batch_stride + of.image * p.image_stride + first_channel;
    unsigned column[C::kColumns];
#pragma unroll
    for (int x = 0; x < C::kColumns; ++x) column[x] = min(max(of.left + x, 0), p.width - 1) * p.n;
#pragma unroll
    for (int y = 0; y < 4 * C::kWords; ++y) {
      int const nearest = min(max(of.top + min(y, C::kLines - 1), 0), p.height - 1);
      uint8_t const* const line = from + unsigned(nearest) * p.line_stride;
#pragma unroll
      for (int x = 0; x < C::kColumns; ++x) {
        pixels[x][y / 4][y % 4] = *reinterpret_cast<uint32_t const*>(line + column[x]);
      }
    }
  };
  if (first_tile >= p.tiles) return;
  Place place = find(first_tile);
  load_pixels(place);
#pragma unroll 1
  for (int turn = 1;; ++turn) {
    int32_t const zero_point = p.epilogue.azp.load(l, place.image);
    float const scale_lhs = p.epilogue.scale_a.load(l, place.image);

    // Bytes of four pixels below each other; of those outside the zero point.
    uint32_t const outside = p.epilogue.azp.data != nullptr ? 0x01010101 * uint8_t(zero_point) : 0;
#pragma unroll
    for (int w = 0; w < C::kWords; ++w) {
      uint32_t has_lines = 0;  // a byte for each
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int const y = place.top + min(4 * w + j, C::kLines - 1);
        has_lines |= unsigned(y) < unsigned(p.height) ? 0xffu << 8 * j : 0;
      }
#pragma unroll
      for (int x = 0; x < C::kColumns; ++x) {
        uint32_t words[4];
        transpose(pixels[x][w], words);
        uint32_t const inside = unsigned(place.left + x) < unsigned(p.width) ? has_lines : 0, rest = outside & ~inside;
#pragma unroll
        for (int c = 0; c < 4; ++c) pixels[x][w][c] = words[c] & inside | rest;
      }
    }

    Terms<true, Value> terms[4];
    Four<float> const scale_rhs = shared.scale[of_four], bias = shared.bias[of_four];
    Four<int32_t> const azp_adj = shared.azp_adj[of_four], azp_b = shared.azp_b[of_four];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      terms[c] = {{scale_lhs, scale_rhs.of[c], bias.of[c], zero_point, azp_adj.of[c]}, 0, azp_b.of[c]};
    }
    int32_t sums[C::kResults];
#pragma unroll
    for (int i = 0; i < C::kResults; ++i) sums[i] = subtract_zero_points(0, terms[i % 4]);
#pragma unroll
    for (int q = 0; q < C::kDown; ++q) {
#pragma unroll
      for (int w = 0; w < C::kWords; ++w) {
        if (q * C::kStride >= 4 * w + 4 || q * C::kStride + C::kTaps <= 4 * w) continue;
#pragma unroll
        for (int x = 0; x < C::kTaps; ++x) {
          Four<uint32_t> const weights = shared.weights[q][w][x][of_four];
#pragma unroll
          for (int i = 0; i < 4 * C::kAcross; ++i) {
            int32_t& sum = sums[4 * C::kAcross * q + i];
            sum = __dp4a(int(pixels[i / 4 * C::kStride + x][w][i % 4]), int(weights.of[i % 4]), sum);
          }
        }
      }
    }

    Place const present = place;
    int const next = first_tile + turn * apart;
    bool const is_last = turn == p.tiles_of_thread || next >= p.tiles;
    if (!is_last) {  // these loads are on their way while results are made of the sums
      place = find(next);
      load_pixels(place);
    }

    // Calls f with each pixel of the tile, whether it is there, and how many results lie before its first one.
    auto const each_pixel = [&](auto f) {
      int const first = (present.image * p.pixels_down + present.y) * p.pixels_across + present.x;
      int64_t const at = int64_t(first) * p.n + first_channel;
#pragma unroll
      for (int i = 0; i < C::kPixels; ++i) {
        int const y = i / C::kAcross, x = i % C::kAcross;
        bool const there = present.y + y < p.pixels_down && present.x + x < p.pixels_across;
        f(i, there, at + unsigned(y * p.pixels_across + x) * unsigned(p.n));
      }
    };
    if (p.epilogue.sums_a.data != nullptr) {
      each_pixel([&](int i, bool there, int64_t at) {
#pragma unroll
        for (int c = 0; there && c < 4; ++c) {
          Terms<true, Value> of_window{};
          of_window.sums_a = p.epilogue.sums_a.load(l, int(at) + c), of_window.azp_b = terms[c].azp_b;
          sums[4 * i + c] = subtract_zero_points(sums[4 * i + c], of_window);
        }
      });
    }
    float values[C::kResults];
#pragma unroll
    for (int i = 0; i < C::kResults; ++i) values[i] = scale(sums[i], terms[i % 4]);
    auto const write = [&](auto pixel) {
      using Pixel = decltype(pixel);
      struct Pixels {
        Pixel of[C::kPixels];
      };
      Pixels const results = output.template round<Pixels, C::kResults>(values, sums);
      auto* const out = reinterpret_cast<uint8_t*>(p.out) + sizeof(Pixel) / 4 * l * p.out_batch_stride;
      each_pixel([&](int i, bool there, int64_t at) {
        auto* const pixel = reinterpret_cast<Pixel*>(out + sizeof(Pixel) / 4 * at);
        if (there) *pixel = results.of[i];
      });
    };
    switch (bytes_of(output.dtype)) {
      case 1:
        write(uint32_t());
        break;
      case 2:
        write(uint2());
        break;
      default:
        write(uint4());
    }
    if (is_last) return;
  }
}

template <class C>
cudaError_t prepare(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(depthwise_square_kernel<C>), {{}, kThreads}, fits);
}

template <class C>
cudaError_t launch(Conv const& problem, Submit const& submit) {
  Gpu const* gpu;
  if (cudaError_t const error = current_gpu(gpu)) return error;
  int const threads = threads_of_place(problem.n, 4);
  Window const window(problem);
  int const down = int(ceil_div(problem.pixels[1], C::kDown)), across = int(ceil_div(problem.pixels[2], C::kAcross));
  int const tiles = problem.images * down * across;
  // All blocks are resident at once, so that of a thread's tiles the first one's pixels alone are waited for.
  int const blocks_n = int(ceil_div(problem.n, 4 * threads)), apart = kThreads / threads;
  int64_t const resident = int64_t(gpu->sm_count) * C::kBlocksPerSm * apart;
  int const tiles_of_thread = int(std::max<int64_t>(1, ceil_div(int64_t(tiles) * blocks_n * problem.batch, resident)));
  unsigned const blocks = unsigned(ceil_div(tiles, int64_t(tiles_of_thread) * apart));
  Params const params{static_cast<uint8_t const*>(problem.a),
                      static_cast<uint8_t const*>(problem.b),
                      problem.out,
                      problem.n,
                      problem.a_batch_stride,
                      problem.b_batch_stride,
                      problem.out_batch_stride,
                      window.image_stride,
                      tiles,
                      tiles_of_thread,
                      Divisor(down * across),
                      Divisor(across),
                      problem.image[1],
                      problem.image[2],
                      problem.pixels[1],
                      problem.pixels[2],
                      problem.before[1],
                      problem.before[2],
                      unsigned(problem.image[2]) * unsigned(problem.n),
                      blocks,
                      threads,
                      epilogue_args<true>(problem)};
  LaunchShape const shape{dim3(blocks * unsigned(problem.batch), unsigned(blocks_n)), kThreads};
  return jax_qmm::launch(submit, shape, depthwise_square_kernel<C>, params);
}

template <class C>
bool serves(Conv const& p) {
  auto const square = [](Sizes const& sizes, int size) { return sizes[1] == size && sizes[2] == size; };
  bool const is_plane = p.taps[0] == 1 && p.image[0] == 1 && p.pixels[0] == 1 && p.before[0] == 0;
  bool const has_pixels = p.image[1] > 0 && p.image[2] > 0;  // one of which stands for those outside
  return p.is_depthwise() && is_plane && has_pixels && square(p.taps, C::kTaps) && square(p.strides, C::kStride) &&
         square(p.dilation, 1) && (reinterpret_cast<uintptr_t>(p.a) | p.n) % 4 == 0;
}

template <class C>
Instance instance() {
  std::string const taps = std::to_string(C::kTaps), stride = C::kStride > 1 ? " stride 2" : "";
  Instance i{"sm80 depthwise " + taps + "x" + taps + stride + " int8", serves<C>, prepare<C>, launch<C>};
  i.is_depthwise = true;
  return i;
}

}  // namespace

void add_depthwise_square(std::vector<Instance>& to) {
  to.push_back(instance<Square<3, 1, 2>>());
  to.push_back(instance<Square<3, 2, 1>>());
  to.push_back(instance<Square<5, 1, 2>>());
  to.push_back(instance<Square<5, 2, 1>>());
  to.push_back(instance<Square<7, 1, 2>>());
}

}  // namespace jax_qmm::conv
