// Convolutions of each channel by itself whose windows are 3x3, as most are. A thread has four channels that lie side
// by side, and goes along a row of images: it loads each column of a window once, and makes a word for each channel of
// the column's bytes. dp4a multiplies that by a column of weights, for each of the windows that it is in. With a stride
// of one, a column of four rows serves two rows of the output, whose weights are a byte apart.
#include <algorithm>

#include "conv/instances.h"
#include "conv/window.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::conv {
namespace {

constexpr int kThreads = 128, kChannels = 4, kWindow = 3;

struct Params {
  uint8_t const* lhs;
  uint8_t const* rhs;
  void* out;
  int n, threads, length;  // length: outputs of a thread in a row
  int64_t lhs_batch_stride, rhs_batch_stride, out_batch_stride;
  Window window;
  Divisor words, strips, rows, images;  // words: of four channels; rows: of the output, of which a thread has some
  EpilogueArgs<true> epilogue;
};

// The bytes of a column's rows, for each channel.
__device__ void transpose(uint32_t const (&rows)[4], uint32_t (&of_channel)[kChannels]) {
  uint32_t const first[] = {__byte_perm(rows[0], rows[1], 0x5140), __byte_perm(rows[0], rows[1], 0x7362)};
  uint32_t const last[] = {__byte_perm(rows[2], rows[3], 0x5140), __byte_perm(rows[2], rows[3], 0x7362)};
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    of_channel[c] = __byte_perm(first[c / 2], last[c / 2], c % 2 == 0 ? 0x5410 : 0x7632);
  }
}

template <int kStride, int kBytes>
__global__ void __launch_bounds__(kThreads, 4) depthwise_3x3_kernel(Params p) {
  using Whole = std::conditional_t<kBytes == 1, uint32_t, std::conditional_t<kBytes == 2, uint2, uint4>>;
  constexpr int kRows = kStride == 1 ? 2 : 1, kInputs = kStride * (kRows - 1) + kWindow;
  constexpr int kOpen = kStride == 1 ? 3 : 2;  // outputs that a column belongs to, and whose sums are not done
  constexpr int kColumns = kOpen * kStride;    // at a time, after which the sums have the same registers again
  begin();
  int const index = int(blockIdx.x * kThreads + threadIdx.x);
  if (index >= p.threads) return;
  int channel = index, strip = p.words.divide(channel), row = p.strips.divide(strip), image = p.rows.divide(row);
  int const l = p.images.divide(image);
  channel *= kChannels;
  Window const& window = p.window;
  int const first_y = row * kRows, first_x = strip * p.length, end_x = min(first_x + p.length, window.pixels_x.divisor);
  int const in_y = first_y * kStride - window.before[1], in_x = first_x * kStride - window.before[2];

  uint32_t packed[9], weights[kRows][kWindow][kChannels];  // a column each, from the lowest byte on
  auto const* const rhs = reinterpret_cast<uint32_t const*>(p.rhs + l * p.rhs_batch_stride + channel * 9);
#pragma unroll
  for (int i = 0; i < 9; ++i) packed[i] = rhs[i];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll
    for (int x = 0; x < kWindow; ++x) {
      uint32_t word = 0;
#pragma unroll
      for (int y = 0; y < kWindow; ++y) {
        int const at = c * 9 + y * kWindow + x;
        word |= (packed[at / 4] >> (at % 4 * 8) & 0xff) << (8 * y);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) weights[r][x][c] = word << (8 * r);
    }
  }
  Terms<true, Value> terms[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    p.epilogue.load_column(l, channel + c, terms[c]);
    terms[c].scale_a = p.epilogue.scale_a.load(l, image);
    terms[c].azp = p.epilogue.azp.load(l, image);
    terms[c].sums_a = 0;
  }
  FullOutput const output = p.epilogue.output.at(l);
  bool const has_sums = p.epilogue.sums_a.data != nullptr;
  uint32_t const outside = p.epilogue.azp.data != nullptr ? 0x01010101 * uint8_t(terms[0].azp) : 0;

  int const row_bytes = window.image[2] * window.channels;
  uint8_t const* const from = p.lhs + l * p.lhs_batch_stride + image * window.image_stride + channel;
  uint8_t const* of_row[kInputs];
  bool inside[kInputs];
#pragma unroll
  for (int r = 0; r < kInputs; ++r) {
    inside[r] = unsigned(in_y + r) < unsigned(window.image[1]);
    of_row[r] = from + (inside[r] ? int64_t(in_y + r) * row_bytes : 0);
  }
  auto const load = [&](int x, uint32_t (&to)[4]) {
    bool const there = unsigned(x) < unsigned(window.image[2]);
    int const at = x * window.channels;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      to[r] = r < kInputs ? outside : 0;
      if (r < kInputs && there && inside[r < kInputs ? r : 0]) {
        to[r] = *reinterpret_cast<uint32_t const*>(of_row[r < kInputs ? r : 0] + at);
      }
    }
  };
  auto const write = [&](int y, int x, int32_t const(&acc)[kChannels]) {
    int const m = (image * window.pixels_y.divisor + y) * window.pixels_x.divisor + x;
    int32_t sums[kChannels];
    float values[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (has_sums) terms[c].sums_a = p.epilogue.sums_a.load(l, m * p.n + channel + c);
      sums[c] = subtract_zero_points(acc[c], terms[c]);
      values[c] = scale(sums[c], terms[c]);
    }
    auto* const out = static_cast<BitsOf<kBytes>*>(p.out) + l * p.out_batch_stride + int64_t(m) * p.n + channel;
    *reinterpret_cast<Whole*>(out) = output.template round<Whole, kChannels>(values, sums);
  };

  int32_t acc[kOpen][kRows][kChannels] = {};
  uint32_t next[kColumns][4];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) load(in_x + j, next[j]);
#pragma unroll 1
  for (int x = first_x; x < end_x + (kWindow - 1) / kStride; x += kOpen) {  // where the last window ends
    uint32_t columns[kColumns][kChannels];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) transpose(next[j], columns[j]);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) load((x + kOpen) * kStride - window.before[2] + j, next[j]);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int tap = 0; tap < kWindow; ++tap) {
        if ((j - tap + kStride) % kStride != 0) continue;
        int const before = (j - tap + kColumns) / kStride - kOpen;  // the output, from x on
        auto& sums = acc[(before + kOpen) % kOpen];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c)
            sums[r][c] = __dp4a(int(columns[j][c]), int(weights[r][tap][c]), sums[r][c]);
          if (tap + 1 < kWindow) continue;
          if (x + before >= first_x && x + before < end_x && first_y + r < window.pixels_y.divisor) {
            write(first_y + r, x + before, sums[r]);
          }
#pragma unroll
          for (int c = 0; c < kChannels; ++c) sums[r][c] = 0;
        }
      }
    }
  }
}

bool serves(Conv const& p) {
  auto const all = [](Sizes const& sizes, int is) { return sizes[1] == is && sizes[2] == is; };
  return p.is_depthwise() && p.image[0] * p.pixels[0] * p.taps[0] == 1 && p.before[0] == 0 && all(p.taps, kWindow) &&
         all(p.dilation, 1) && (all(p.strides, 1) || all(p.strides, 2));
}

template <class Launch>
cudaError_t with_kernel(int stride, int bytes, Launch launch) {
  if (stride == 1) {
    return bytes == 1   ? launch(depthwise_3x3_kernel<1, 1>)
           : bytes == 2 ? launch(depthwise_3x3_kernel<1, 2>)
                        : launch(depthwise_3x3_kernel<1, 4>);
  }
  return bytes == 1   ? launch(depthwise_3x3_kernel<2, 1>)
         : bytes == 2 ? launch(depthwise_3x3_kernel<2, 2>)
                      : launch(depthwise_3x3_kernel<2, 4>);
}

cudaError_t prepare(bool& fits) {
  for (int stride = 1; stride <= 2; ++stride) {
    for (int bytes = 1; bytes <= 4; bytes *= 2) {
      cudaError_t const error = with_kernel(stride, bytes, [&](auto* kernel) {
        return prepare_kernel(reinterpret_cast<void const*>(kernel), {{}, kThreads}, fits);
      });
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch(Conv const& p, Submit const& submit) {
  int const words = p.n / kChannels, rows = int(ceil_div(p.pixels[1], p.strides[1] == 1 ? 2 : 1));
  // Long strips load less twice, short ones are more threads: enough for a large GPU.
  auto const count = [&](int length) {
    return int64_t(words) * rows * ceil_div(p.pixels[2], length) * p.images * p.batch;
  };
  int length = 24;
  while (length > 6 && count(length) < 200'000) length /= 2;
  Params const params{static_cast<uint8_t const*>(p.a),
                      static_cast<uint8_t const*>(p.b),
                      p.out,
                      p.n,
                      int(count(length)),
                      length,
                      p.a_batch_stride,
                      p.b_batch_stride,
                      p.out_batch_stride,
                      Window(p),
                      Divisor(words),
                      Divisor(int(ceil_div(p.pixels[2], length))),
                      Divisor(rows),
                      Divisor(p.images),
                      epilogue_args<true>(p)};
  LaunchShape const shape{dim3(unsigned(ceil_div(params.threads, kThreads))), kThreads};
  return with_kernel(p.strides[1], bytes_of(p.out_dtype),
                     [&](auto* kernel) { return jax_qmm::launch(submit, shape, kernel, params); });
}

}  // namespace

void add_depthwise_3x3(std::vector<Instance>& to) {
  Instance i{"sm80 depthwise 3x3 int8", serves, prepare, launch};
  i.is_depthwise = true;
  to.push_back(i);
}

}  // namespace jax_qmm::conv
