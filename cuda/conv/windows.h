// The windows of a convolution: where each output pixel looks at an image.
#pragma once

#include <array>

namespace jax_qmm {

constexpr int kSpatial = 3;  // axes; those of fewer are the last ones
using Sizes = std::array<int, kSpatial>;

// Images (images, *image, groups * channels), weights (outputs, *taps, channels), results (images, *pixels, outputs).
struct Windows {
  int images, groups;
  int channels;  // of a group
  Sizes image, taps, pixels;
  Sizes strides, before, dilation;  // before: padding, which may be negative
};

// How far from the last pixel of an axis the last window begins.
inline int end_of_pixels(Windows const& p, int axis) {
  return (p.pixels[axis] - 1) * p.strides[axis] - p.before[axis] - (p.image[axis] - 1);
}

// Whether TMA's im2col mode has such windows, which have two spatial axes.
inline bool has_im2col(Windows const& p) {
  if (p.image[0] != 1 || p.taps[0] != 1 || p.pixels[0] != 1 || p.before[0] != 0) return false;
  for (int axis = 1; axis < kSpatial; ++axis) {
    for (int const corner : {-p.before[axis], end_of_pixels(p, axis)}) {
      if (corner < -128 || corner >= 128) return false;
    }
    bool const fits = p.image[axis] > 0 && p.strides[axis] <= 8 && (p.taps[axis] - 1) * p.dilation[axis] < 256;
    if (!fits) return false;
  }
  return true;
}

}  // namespace jax_qmm
