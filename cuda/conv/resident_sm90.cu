// Convolutions by the kernel of scaled_mm/resident.cuh: of many pixels, with weights that fit into shared memory, and
// without zero points.
#include "conv/im2col_sm90.cuh"
#include "conv/instances.h"
#include "conv/residual.cuh"
#include "conv/window.cuh"
#include "scaled_mm/resident.cuh"

namespace jax_qmm::conv {
namespace {

using namespace resident;

// The residual of int8, whose rows begin at whole pieces as those of the output do.
struct AddsInt8 {
  Residual residual;

  __device__ uint4 load(int64_t at) const { return *reinterpret_cast<uint4 const*>(residual.data + at); }
  __device__ void add(float (&values)[kEach], uint4 piece) const {
    uint32_t const words[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[i] = residual.scaled(int8_t(words[i / 4] >> i % 4 * 8), values[i]);
  }
};

template <class Added>
struct Pixels {
  static constexpr bool kHasZeroPoints = false;
  Added added;
  Window window;
  int k, channels, chunks, taps_x;  // the channels of a tap come in so many steps

  struct Place {
    int image, corner[kSpatial];
    int chunk, x, y;  // of the tap
  };

  // Whether an output channel has weights for a channel of a step, and where.
  template <class C>
  __device__ bool find(int n, int step, int byte, int64_t& at) const {
    int const tap = step / chunks, channel = step % chunks * C::kTileK + byte;
    at = int64_t(n) * k + tap * channels + channel;
    return channel < channels;
  }
  __device__ Place begin(int pixel) const {
    Place at{};
    at.image = window.corner_of(pixel, at.corner);
    return at;
  }

  // Begins to load some channels of 64 pixels at a tap, and goes on to the next ones.
  template <class C>
  __device__ void load(CUtensorMap const& boxes, uint64_t* full, uint8_t* to, Place& at) const {
    cute::SM90_TMA_LOAD_IM2COL_4D::copy(&boxes, full, to, at.chunk * C::kTileK, at.corner[2], at.corner[1], at.image,
                                        uint16_t(at.x * window.dilation[2]), uint16_t(at.y * window.dilation[1]));
    if (++at.chunk < chunks) return;
    at.chunk = 0;
    if (++at.x == taps_x) at.x = 0, ++at.y;
  }

  // Of a pixel's scale.
  __device__ int entry_of(int pixel) const { return window.image_of(pixel); }
  __device__ auto adder() const {
    if constexpr (std::is_same_v<Added, NoResidual>) {
      return AddsNothing{};
    } else {
      return AddsInt8{added.at(0)};
    }
  }
};

template <class C>
int steps_of(Conv const& p) {
  return int(ceil_div(p.channels, C::kTileK)) * p.taps[1] * p.taps[2];
}

template <class C>
cudaError_t launch_resident(Conv const& p, Submit const& submit) {
  Gpu const* gpu;
  if (cudaError_t const error = current_gpu(gpu)) return error;
  CUtensorMap boxes;
  if (cudaError_t const error = make_image_boxes(p, kTileM, C::kTileK, boxes)) return error;
  int const chunks = int(ceil_div(p.channels, C::kTileK));
  return with_residual(p, p.n, kEach, [&](auto added) {
    Pixels<decltype(added)> const pixels{added, Window(p), p.k, p.channels, chunks, p.taps[2]};
    return resident::launch<C>(p, pixels, 1, steps_of<C>(p), boxes, *gpu, submit);
  });
}

template <class C>
bool serves(Conv const& p) {
  auto const is_whole = [&](void const* data) { return (reinterpret_cast<uintptr_t>(data) | p.n) % 16 == 0; };
  bool const adds_whole = p.residual.data == nullptr || (p.residual.dtype == DType::kS8 && is_whole(p.residual.data));
  return is_whole(p.out) && bytes_of(p.out_dtype) == 1 && adds_whole && !p.has_zero_points() && p.groups == 1 &&
         p.batch == 1 && suits_im2col(p) && stages(steps_of<C>(p), C::kTileK) >= kLeastStages;
}

template <class C>
cudaError_t prepare(bool& fits) {
  return prepare_all({reinterpret_cast<void const*>(kernel<C, Pixels<NoResidual>>),
                      reinterpret_cast<void const*>(kernel<C, Pixels<ResidualArg>>)},
                     {{}, kThreads, kSharedMemory}, fits);
}

template <class C>
void add(std::vector<Instance>& to) {
  Instance i{"sm90 resident weights " + words_of_tile(kTileM, kTileN, C::kTileK) + " int8", serves<C>, prepare<C>,
             launch_resident<C>, kSharedMemory};
  i.tile_m = kTileM, i.tile_n = kTileN, i.tile_k = C::kTileK, i.blocks_per_sm = 1;
  i.wgmma = i.is_resident = true;
  to.push_back(std::move(i));
}

}  // namespace

void add_resident(std::vector<Instance>& to) {
  add<Config<64>>(to);
  add<Config<128>>(to);
}

}  // namespace jax_qmm::conv
