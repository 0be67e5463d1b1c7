// TMA's im2col mode: the pixels that the windows of a tile have at one tap.
#pragma once

#include <cuda.h>

#include "conv/conv.h"
#include "cutlass/cuda_host_adapter.hpp"

namespace jax_qmm::conv {

// Whether TMA has such windows, and images of 16 channels of each group or more.
inline bool suits_im2col(Conv const& p) {
  uintptr_t const addresses = reinterpret_cast<uintptr_t>(p.a) | reinterpret_cast<uintptr_t>(p.b);
  if (p.is_depthwise() || addresses % 16 != 0 || p.channels % 16 != 0) return false;
  return has_im2col(p);
}

constexpr CUtensorMapSwizzle swizzle_of(int bytes_of_row) {
  return bytes_of_row == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
}

// Boxes of so many pixels and bytes of their channels. `pixel_bytes`: of all channels.
inline cudaError_t make_image_boxes(Windows const& p, void const* images, int64_t count, int64_t pixel_bytes,
                                    int pixels, int bytes, CUtensorMap& boxes) {
  cuuint64_t const x = p.image[2], y = p.image[1], all = pixel_bytes;
  cuuint64_t const shape[] = {all, x, y, cuuint64_t(count)}, apart[] = {all, all * x, all * x * y};
  cuuint32_t const steps[] = {1, cuuint32_t(p.strides[2]), cuuint32_t(p.strides[1]), 1};
  int const first[] = {-p.before[2], -p.before[1]};
  int const last[] = {end_of_pixels(p, 2), end_of_pixels(p, 1)};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeIm2col)(
      &boxes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(images), shape, apart, first, last, bytes, pixels,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t make_image_boxes(Conv const& p, int pixels, int bytes, CUtensorMap& boxes) {
  int64_t const count = int64_t(p.images) * (p.a_batch_stride != 0 ? p.batch : 1);
  return make_image_boxes(p, p.a, count, int64_t(p.channels) * p.groups, pixels, bytes, boxes);
}

}  // namespace jax_qmm::conv
