// Convolutions of each channel by itself: bound by memory, so without tensor cores. A thread has 4 or 16 channels that
// lie side by side, of one pixel after the other. Bytes of four taps, of four channels each, become a word for each
// channel, which dp4a multiplies by a word of weights.
#include <type_traits>

#include "conv/depthwise.cuh"
#include "conv/instances.h"
#include "conv/window.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::conv {
namespace {

constexpr int kPixels = 2;  // of a thread

struct Params {
  uint8_t const* lhs;
  uint8_t const* rhs;
  void* out;
  int m, n, taps;
  int64_t lhs_batch_stride, rhs_batch_stride, out_batch_stride;
  unsigned blocks_m;
  int threads;  // that have the channels of one pixel
  Window window;
  Divisor taps_y, taps_x;
  EpilogueArgs<true> epilogue;
};

// What the threads of a block share. Taps are filled up to a multiple of four, with weights of zero.
struct Shared {
  struct alignas(16) Tap {
    int z, y, x;  // from where the window begins
  };
  Tap* taps;
  uint32_t* weights;  // (words, channels), of four taps each
  Terms<true, Value>* columns;
  int words, channels;

  __device__ Shared(uint8_t* shared, int taps_of_window, int channels)
      : taps(reinterpret_cast<Tap*>(shared)), words((taps_of_window + 3) / 4), channels(channels) {
    weights = reinterpret_cast<uint32_t*>(taps + 4 * words);
    columns = reinterpret_cast<Terms<true, Value>*>(weights + words * channels);
  }
  static int bytes(int taps, int channels) {
    int const words = int(ceil_div(taps, 4));
    return words * int(4 * sizeof(Tap) + channels * sizeof(uint32_t)) + channels * int(sizeof(Terms<true, Value>));
  }

  __device__ void load(Params const& p, int l, int first_channel) {
    for (int i = threadIdx.x; i < 4 * words; i += kThreads) {
      int x = i, y = p.taps_x.divide(x);
      int const z = p.taps_y.divide(y);
      taps[i] = {z * p.window.dilation[0], y * p.window.dilation[1], x * p.window.dilation[2]};
    }
    uint8_t const* const rhs = p.rhs + l * p.rhs_batch_stride;
    for (int i = threadIdx.x; i < 4 * words * channels; i += kThreads) {
      int const tap = i % (4 * words), channel = i / (4 * words);
      bool const there = tap < p.taps && first_channel + channel < p.n;
      uint8_t const weight = there ? rhs[int64_t(first_channel + channel) * p.taps + tap] : 0;
      reinterpret_cast<uint8_t*>(weights + tap / 4 * channels + channel)[tap % 4] = weight;
    }
    for (int i = threadIdx.x; i < channels; i += kThreads) {
      if (first_channel + i < p.n) p.epilogue.load_column(l, first_channel + i, columns[i]);
    }
  }
};

// Adds products of four taps, whose words have four channels, to the sums of these.
__device__ void multiply(int32_t (&acc)[4], uint32_t const (&taps)[4], uint4 weights) {
  uint32_t words[4];
  transpose(taps, words);
  uint32_t const of_channel[] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
  for (int c = 0; c < 4; ++c) acc[c] = __dp4a(int(words[c]), int(of_channel[c]), acc[c]);
}

// A thread's part of a row of the output: its sums, four words of channels or one.
template <int kWords>
struct Row {
  int l, m, image, first_channel;
  Terms<true, Value> const* columns;
  int32_t (&acc)[kWords][4];

  template <int kBytes>
  __device__ void write(Params const& p, FullOutput const& output) const {
    using Whole = std::conditional_t<kBytes == 1, uint32_t, std::conditional_t<kBytes == 2, uint2, uint4>>;
    auto* const out = reinterpret_cast<Whole*>(static_cast<BitsOf<kBytes>*>(p.out) + l * p.out_batch_stride +
                                               int64_t(m) * p.n + first_channel);
    Terms<true, Value> row{};
    row.scale_a = p.epilogue.scale_a.load(l, image);
    row.azp = p.epilogue.azp.load(l, image);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      int32_t sums[4];
      float values[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        row.sums_a = p.epilogue.sums_a.load(l, m * p.n + first_channel + 4 * w + c);
        auto const pick = [](auto const& arg, auto of_row, auto of_column) { return arg.kOfRow ? of_row : of_column; };
        auto const terms = map_terms<Value>(pick, p.epilogue, row, columns[4 * w + c]);
        sums[c] = subtract_zero_points(acc[w][c], terms);
        values[c] = scale(sums[c], terms);
      }
      out[w] = output.template round<Whole, 4>(values, sums);
    }
  }
};

template <int kWords>
__global__ void __launch_bounds__(kThreads, 6) depthwise_kernel(Params p) {
  using Words = std::conditional_t<kWords == 1, uint32_t, uint4>;
  static_assert(sizeof(Words) == 4 * kWords);
  extern __shared__ __align__(128) uint8_t bytes[];
  int const all = 4 * kWords * p.threads;  // channels of the block
  int const l = blockIdx.x / p.blocks_m, first_of_block = blockIdx.y * all;
  Shared shared(bytes, p.taps, all);
  begin();
  shared.load(p, l, first_of_block);
  __syncthreads();

  int const apart = kThreads / p.threads;  // pixels at once
  int const own_pixel = threadIdx.x / p.threads, channel = 4 * kWords * (threadIdx.x % p.threads);
  int const first_channel = first_of_block + channel;
  if (own_pixel >= apart || first_channel >= p.n) return;
  FullOutput const output = p.epilogue.output.at(l);
  bool const has_zero_points = p.epilogue.azp.data != nullptr;
#pragma unroll 1
  for (int i = 0; i < kPixels; ++i) {
    int const m = (int(blockIdx.x % p.blocks_m) * kPixels + i) * apart + own_pixel;
    if (m >= p.m) return;
    int corner[kSpatial];
    int const image = p.window.corner_of(m, corner);
    uint8_t const* const from = p.lhs + l * p.lhs_batch_stride + image * p.window.image_stride + first_channel;
    uint32_t const outside = has_zero_points ? 0x01010101 * uint8_t(p.epilogue.azp.load(l, image)) : 0;
    int32_t acc[kWords][4] = {};
#pragma unroll 1
    for (int w = 0; w < shared.words; ++w) {
      uint32_t taps[kWords][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        Shared::Tap const tap = shared.taps[4 * w + t];
        uint32_t words[kWords];
#pragma unroll
        for (int v = 0; v < kWords; ++v) words[v] = outside;
        unsigned byte;
        if (p.window.finds(corner[0] + tap.z, corner[1] + tap.y, corner[2] + tap.x, byte)) {
          reinterpret_cast<Words&>(words) = *reinterpret_cast<Words const*>(from + byte);
        }
#pragma unroll
        for (int v = 0; v < kWords; ++v) taps[v][t] = words[v];
      }
      auto const* const weights = reinterpret_cast<uint4 const*>(shared.weights + w * all + channel);
#pragma unroll
      for (int v = 0; v < kWords; ++v) multiply(acc[v], taps[v], weights[v]);
    }
    Row<kWords> const row{l, m, image, first_channel, shared.columns + channel, acc};
    switch (bytes_of(output.dtype)) {
      case 1:
        row.template write<1>(p, output);
        break;
      case 2:
        row.template write<2>(p, output);
        break;
      default:
        row.template write<4>(p, output);
    }
  }
}

template <int kWords>
cudaError_t prepare(bool& fits) {
  auto* const kernel = reinterpret_cast<void const*>(depthwise_kernel<kWords>);
  LaunchShape const shape{{}, kThreads, unsigned(Shared::bytes(Conv::kMostTaps, kMostChannels))};
  return prepare_kernel(kernel, shape, fits);
}

template <int kWords>
cudaError_t launch(Conv const& problem, Submit const& submit) {
  constexpr int kChannels = 4 * kWords;  // of a thread
  int const threads = threads_of_place(problem.n, kChannels);
  int const channels = kChannels * threads;
  int const taps = problem.taps[0] * problem.taps[1] * problem.taps[2];
  unsigned const blocks_m = unsigned(ceil_div(problem.m, kPixels * (kThreads / threads)));
  Params const params{static_cast<uint8_t const*>(problem.a),
                      static_cast<uint8_t const*>(problem.b),
                      problem.out,
                      problem.m,
                      problem.n,
                      taps,
                      problem.a_batch_stride,
                      problem.b_batch_stride,
                      problem.out_batch_stride,
                      blocks_m,
                      threads,
                      Window(problem),
                      Divisor(problem.taps[1]),
                      Divisor(problem.taps[2]),
                      epilogue_args<true>(problem)};
  dim3 const blocks(blocks_m * unsigned(problem.batch), unsigned(ceil_div(problem.n, channels)));
  LaunchShape const shape{blocks, kThreads, unsigned(Shared::bytes(taps, channels))};
  return jax_qmm::launch(submit, shape, depthwise_kernel<kWords>, params);
}

template <int kWords>
bool serves(Conv const& p) {
  return p.is_depthwise() && (reinterpret_cast<uintptr_t>(p.a) | uintptr_t(p.n)) % (4 * kWords) == 0;
}

template <int kWords>
Instance instance() {
  Instance i{"sm80 depthwise " + std::to_string(4 * kWords) + " channels int8", serves<kWords>, prepare<kWords>,
             launch<kWords>, Shared::bytes(Conv::kMostTaps, kMostChannels)};
  i.is_depthwise = true;
  return i;
}

}  // namespace

void add_depthwise(std::vector<Instance>& to) {
  to.push_back(instance<4>());
  to.push_back(instance<1>());
}

}  // namespace jax_qmm::conv
