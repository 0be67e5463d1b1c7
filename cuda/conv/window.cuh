// Where the window of an output pixel lies.
#pragma once

#include <cstdint>

#include "conv/windows.h"

namespace jax_qmm::conv {

// Quotients of 31 bits by one divisor, as a product. With l = ceil(log2 divisor) and factor = ceil(2^(31 + l) /
// divisor) the product is off by less than 2^l / 2^(31 + l) of the dividend, less than 1 / divisor: too little to reach
// the next quotient.
struct Divisor {
  int divisor, shift;
  uint32_t factor;

  explicit Divisor(int divisor) : divisor(divisor), shift(31) {
    while (int64_t(1) << (shift - 31) < divisor) ++shift;
    factor = uint32_t(((uint64_t(1) << shift) + divisor - 1) / divisor);
  }

  // Gives the quotient, and leaves the rest in its place.
  __device__ int divide(int& dividend) const {
    int const quotient = int(uint64_t(uint32_t(dividend)) * factor >> shift);
    dividend -= quotient * divisor;
    return quotient;
  }
};

struct Window {
  Divisor pixels, pixels_y, pixels_x;  // pixels: of an image
  Sizes image, strides, before, dilation;
  int channels;          // of all groups
  int64_t image_stride;  // in values

  explicit Window(Windows const& p)
      : pixels(p.pixels[0] * p.pixels[1] * p.pixels[2]),
        pixels_y(p.pixels[1]),
        pixels_x(p.pixels[2]),
        image(p.image),
        strides(p.strides),
        before(p.before),
        dilation(p.dilation),
        channels(p.channels * p.groups),
        image_stride(int64_t(image[0]) * image[1] * image[2] * channels) {}

  // Of a row, which is an output pixel: its image, and where its window begins there, maybe outside.
  __device__ int corner_of(int row, int (&corner)[kSpatial]) const {
    int const of = pixels.divide(row);
    int z_and_y = pixels_x.divide(row);
    corner[2] = row * strides[2] - before[2];
    corner[0] = pixels_y.divide(z_and_y) * strides[0] - before[0];
    corner[1] = z_and_y * strides[1] - before[1];
    return of;
  }

  __device__ int image_of(int row) const { return pixels.divide(row); }

  // Whether a place is inside of an image, and where its first channel is there.
  __device__ bool finds(int z, int y, int x, unsigned& at) const {
    at = ((unsigned(z) * image[1] + y) * image[2] + x) * channels;
    return unsigned(z) < image[0] && unsigned(y) < image[1] && unsigned(x) < image[2];
  }
};

// Which value of a window a column of K is: K is taps, then the channels of a group.
struct Columns {
  Divisor channels, taps_y, taps_x;

  explicit Columns(Windows const& p) : channels(p.channels), taps_y(p.taps[1]), taps_x(p.taps[2]) {}

  // Leaves the channel in the column's place, and gives how far its tap is from where the window begins.
  __device__ void find(int& column, Sizes const& dilation, int (&tap)[kSpatial]) const {
    tap[2] = channels.divide(column), tap[1] = taps_x.divide(tap[2]);
    tap[0] = taps_y.divide(tap[1]) * dilation[0];
    tap[1] *= dilation[1], tap[2] *= dilation[2];
  }
};

}  // namespace jax_qmm::conv
