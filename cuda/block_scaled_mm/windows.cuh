// How x comes to shared memory where its rows are windows on images.
#pragma once

#include <climits>

#include "block_scaled_mm/sources.cuh"
#include "conv/window.cuh"

namespace jax_qmm::block_scaled {

struct WindowParams : Params {
  conv::Window window;
  conv::Columns columns;
};

// A thread's share of a step's x: 8 channels of a tap, of every few rows. What is beyond x becomes zeros.
template <class C>
class SourceOfWindows {
 public:
  using Params = WindowParams;
  static constexpr bool kWindows = true;

  static Params make_params(BlockScaledMm const& problem) {
    return {block_scaled::make_params<C>(problem), conv::Window(*problem.windows), conv::Columns(*problem.windows)};
  }

  __device__ SourceOfWindows(Params const& p, int, int first_m, int k_begin, int k_end)
      : p_(p), chunk_(threadIdx.x % kChunks), column_(k_begin + 8 * chunk_), end_(k_end) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      int const row = first_m + threadIdx.x / kChunks + i * kRowsAtOnce;
      int const image = p.window.corner_of(row < p.m ? row : 0, corner_[i]);
      images_[i] = static_cast<uint16_t const*>(p.x) + image * p.window.image_stride;
      if (row >= p.m) corner_[i][0] = INT_MIN;  // outside of each image
    }
  }

  __device__ void clear(uint32_t) const {}  // `copy` writes the zeros

  // Starts the copies of the next step.
  __device__ void copy(uint32_t to) {
    int channel = column_, tap[kSpatial];
    p_.columns.find(channel, p_.window.dilation, tap);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      unsigned at;
      bool const inside =
          p_.window.finds(corner_[i][0] + tap[0], corner_[i][1] + tap[1], corner_[i][2] + tap[2], at) && column_ < end_;
      auto* const from = reinterpret_cast<uint8_t const*>(images_[i] + (inside ? at + channel : 0));
      copy_async<16>(to + swizzled<C::kPitch>(threadIdx.x / kChunks + i * kRowsAtOnce, chunk_), from, inside);
    }
    column_ += C::kStep;
  }

 private:
  static constexpr int kChunks = C::kStep / 8, kRowsAtOnce = C::kThreads / kChunks, kCopies = C::kTileM / kRowsAtOnce;
  static_assert(C::kTileM % kRowsAtOnce == 0, "each thread copies as many rows");

  Params const& p_;
  int chunk_, column_, end_;
  int corner_[kCopies][kSpatial];  // where the window begins, maybe outside of the image
  uint16_t const* images_[kCopies];
};

}  // namespace jax_qmm::block_scaled
