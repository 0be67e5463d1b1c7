// Quantizers to 8 bits: all that the FFI handlers and the bindings see of this family.
//
//   int8, symmetric:   q = clamp(rint(x / scale), -128, 127)                  scale = absmax / 127
//   int8, asymmetric:  q = clamp(rint(x / scale) + zero_point, -128, 127)     scale = (max - min) / 255
//   float8_e4m3fn:     q = e4m3(clamp(x / scale, -448, 448))                  scale = absmax / 448
//
// All in float32 with IEEE division and halves rounded to even. A NaN becomes 0 in int8 and stays NaN in fp8; anywhere
// in what shares a scale it makes the dynamic scale NaN. The range of asymmetric rows includes 0, zero_point is
// rint(-128 - min / scale) within int8, and no dynamic scale is below the smallest normal float32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "core/launch.h"

namespace jax_qmm {

struct Quantize {
  void const* x;  // (rows, cols), cols contiguous
  void* q;        // (rows, cols), cols contiguous
  int64_t rows, cols;
  DType in;             // kF32, kBF16 or kF16
  DType out;            // kS8 or kF8E4M3
  bool per_tensor;      // one scale (and zero point) for all rows, else one for each
  float* scale;         // read by quantize_static, written by quantize_dynamic
  int32_t* zero_point;  // likewise; null when symmetric
  int32_t* sums;        // written: of the int8 values that share a scale; null where they are not asked for
};

// Loads the kernels on the current device, so that nothing is loaded while a stream is captured. Later calls return at
// once.
cudaError_t prepare_quantize();

// Submit the quantizers' kernels on the current device, up to six, and none for empty arrays unless they have dynamic
// scales. Reading the range of a whole tensor takes two words of workspace.
cudaError_t quantize_static(Quantize const& problem, Submit const& submit);
cudaError_t quantize_dynamic(Quantize const& problem, uint32_t* workspace, Submit const& submit);

}  // namespace jax_qmm
