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

}  // namespace jax_qmm
