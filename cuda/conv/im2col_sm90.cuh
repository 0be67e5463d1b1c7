// TMA's im2col mode: the pixels that the windows of a tile have at one tap.
#pragma once

#include <cuda.h>

#include "conv/conv.h"
#include "cutlass/cuda_host_adapter.hpp"

namespace jax_qmm::conv {

// How far from the last pixel of an axis the last window begins.
inline int end_of_pixels(Conv const& p, int axis) {
  return (p.pixels[axis] - 1) * p.strides[axis] - p.before[axis] - (p.image[axis] - 1);
}

// Whether TMA has such images and windows, of two spatial axes and 16 channels of each group or more.
inline bool suits_im2col(Conv const& p) {
  uintptr_t const addresses = reinterpret_cast<uintptr_t>(p.a) | reinterpret_cast<uintptr_t>(p.b);
  if (p.is_depthwise() || addresses % 16 != 0 || p.channels % 16 != 0) return false;
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

constexpr CUtensorMapSwizzle swizzle_of(int bytes_of_row) {
  return bytes_of_row == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
}

// Boxes of so many pixels and channels.
inline cudaError_t make_image_boxes(Conv const& p, int pixels, int channels, CUtensorMap& boxes) {
  cuuint64_t const x = p.image[2], y = p.image[1], all = cuuint64_t(p.channels) * p.groups;
  cuuint64_t const count = cuuint64_t(p.images) * (p.a_batch_stride != 0 ? p.batch : 1);
  cuuint64_t const shape[] = {all, x, y, count}, apart[] = {all, all * x, all * x * y};
  cuuint32_t const steps[] = {1, cuuint32_t(p.strides[2]), cuuint32_t(p.strides[1]), 1};
  int const first[] = {-p.before[2], -p.before[1]};
  int const last[] = {end_of_pixels(p, 2), end_of_pixels(p, 1)};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeIm2col)(
      &boxes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(p.a), shape, apart, first, last, channels, pixels,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(channels), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_qmm::conv
