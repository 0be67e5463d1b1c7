// How TMA brings x to shared memory where its rows are windows on images.
#pragma once

#include "conv/im2col_sm90.cuh"
#include "conv/window.cuh"
#include "cute/arch/copy_sm90_tma.hpp"

namespace jax_qmm::block_scaled {

// Of a problem's windows.
struct WindowsOfX {
  conv::Window window;
  conv::Columns columns;
  int images, k;

  WindowsOfX(Windows const& windows, int k) : window(windows), columns(windows), images(windows.images), k(k) {}

  // Loads, for all blocks of the cluster, what the windows of some rows of x from m on have in a column and those after
  // it: the channels of one tap. Beyond K that is zeros, as beyond the last image.
  template <int kShare, int kValueBytes>
  __device__ void load(CUtensorMap const& boxes, uint64_t* full, uint8_t* to, int column, int m) const {
    int channel = column, tap[kSpatial], corner[kSpatial], image = window.corner_of(m, corner);
    columns.find(channel, window.dilation, tap);
    if (column >= k) image = images;
    int const byte = channel * kValueBytes;
    if constexpr (kShare > 1) {
      cute::SM90_TMA_LOAD_IM2COL_MULTICAST_4D::copy(&boxes, full, uint16_t((1 << kShare) - 1), to, byte, corner[2],
                                                    corner[1], image, uint16_t(tap[2]), uint16_t(tap[1]));
    } else {
      cute::SM90_TMA_LOAD_IM2COL_4D::copy(&boxes, full, to, byte, corner[2], corner[1], image, uint16_t(tap[2]),
                                          uint16_t(tap[1]));
    }
  }
};

}  // namespace jax_qmm::block_scaled
