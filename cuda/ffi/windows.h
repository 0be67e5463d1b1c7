// The geometry of a convolution, from its attributes and the shapes of its operands.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <string>

#include "conv/windows.h"
#include "ffi/buffers.h"

namespace jax_qmm {

inline ffi::Error check_lengths(std::initializer_list<ffi::AnyBuffer::Dimensions> shapes) {
  for (auto const& dims : shapes) {
    for (int64_t const dim : dims) {
      if (dim > kLongest) {
        return ffi::Error::InvalidArgument("no dimension may exceed " + std::to_string(kLongest));
      }
    }
  }
  return ffi::Error::Success();
}

// Reads one of the window's attributes.
inline ffi::Error read_sizes(ffi::Span<int32_t const> values, char const* name, int least, Sizes& to) {
  bool fits = values.size() == to.size();
  for (size_t i = 0; fits && i < to.size(); ++i) {
    to[i] = values[i];
    fits = to[i] >= least && to[i] >= -kLongest && to[i] <= kLongest;
  }
  if (fits) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(name) + " needs " + std::to_string(kSpatial) + " values of at least " +
                                     std::to_string(least));
}

// Whether the kernels' integers hold all positions and sizes.
inline bool in_range(Windows const& p) {
  auto const size_of = [](Sizes const& sizes) { return double(sizes[0]) * sizes[1] * sizes[2]; };
  double const largest[] = {size_of(p.image) * p.channels * p.groups, size_of(p.taps) * p.channels,
                            size_of(p.pixels) * p.images * p.groups};
  bool fits = std::all_of(std::begin(largest), std::end(largest), [](double size) { return size <= kLongest; });
  for (int i = 0; i < kSpatial; ++i) {
    double const reach = double(p.pixels[i]) * p.strides[i] + double(p.taps[i]) * p.dilation[i] + std::abs(p.before[i]);
    fits = fits && reach <= kLongest;
  }
  return fits;
}

}  // namespace jax_qmm
