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
  static constexpr int kBlocksPerSm = kColumns * kWords > 8 ? 3 : 5;

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
  bool const has_zero_points = p.epilogue.azp.data != nullptr;
#pragma unroll 1
  for (int i = 0; i < p.tiles_of_thread; ++i) {
    int tile = (int(blockIdx.x % p.blocks_of_entry) * p.tiles_of_thread + i) * apart + own_tile;
    if (tile >= p.tiles) return;
    int const image = p.tiles_of_image.divide(tile);
    int const first_y = p.tiles_across.divide(tile) * C::kDown, first_x = tile * C::kAcross;
    int32_t const zero_point = p.epilogue.azp.load(l, image);
    float const scale_lhs = p.epilogue.scale_a.load(l, image);

    // Of pixels outside of the image the nearest one inside is loaded, and then becomes the zero point.
    uint32_t pixels[C::kColumns][C::kWords][4];
    uint8_t const* const from = p.lhs + l * p.lhs_batch_stride + image * p.image_stride + first_channel;
    uint32_t const outside = has_zero_points ? 0x01010101 * uint8_t(zero_point) : 0;
    int const top = first_y * C::kStride - p.above, left = first_x * C::kStride - p.left;
    unsigned column[C::kColumns];
#pragma unroll
    for (int x = 0; x < C::kColumns; ++x) column[x] = min(max(left + x, 0), p.width - 1) * p.n;
#pragma unroll
    for (int w = 0; w < C::kWords; ++w) {
      uint8_t const* line[4];
      uint32_t has_lines = 0;  // a byte for each
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int const y = top + min(4 * w + j, C::kLines - 1);
        line[j] = from + unsigned(min(max(y, 0), p.height - 1)) * p.line_stride;
        has_lines |= unsigned(y) < unsigned(p.height) ? 0xffu << 8 * j : 0;
      }
#pragma unroll
      for (int x = 0; x < C::kColumns; ++x) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = *reinterpret_cast<uint32_t const*>(line[j] + column[x]);
        transpose(words, pixels[x][w]);
        uint32_t const inside = unsigned(left + x) < unsigned(p.width) ? has_lines : 0, rest = outside & ~inside;
#pragma unroll
        for (int c = 0; c < 4; ++c) pixels[x][w][c] = pixels[x][w][c] & inside | rest;
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

    // Calls f with each pixel of the tile that is there, and how many results lie before its first one.
    auto const each_pixel = [&](auto f) {
      int const first = (image * p.pixels_down + first_y) * p.pixels_across + first_x;
#pragma unroll
      for (int i = 0; i < C::kPixels; ++i) {
        int const y = i / C::kAcross, x = i % C::kAcross;
        bool const there = first_y + y < p.pixels_down && first_x + x < p.pixels_across;
        if (there) f(i, int64_t(first + y * p.pixels_across + x) * p.n + first_channel);
      }
    };
    if (p.epilogue.sums_a.data != nullptr) {
      each_pixel([&](int i, int64_t at) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
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
      each_pixel([&](int i, int64_t at) { *reinterpret_cast<Pixel*>(out + sizeof(Pixel) / 4 * at) = results.of[i]; });
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
  // As many tiles of a thread as leave several blocks to each place on the GPU: weights are loaded once for all.
  int const blocks_n = int(ceil_div(problem.n, 4 * threads));
  double const places = double(gpu->sm_count) * C::kBlocksPerSm * kThreads;
  double const to_do = double(tiles) * threads * blocks_n * problem.batch;
  int const tiles_of_thread = int(std::clamp(to_do / (4 * places), 1.0, 4.0));
  unsigned const blocks = unsigned(ceil_div(tiles, int64_t(tiles_of_thread) * (kThreads / threads)));
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
