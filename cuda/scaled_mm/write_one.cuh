// How kernels whose threads have single results write them.
#pragma once

#include "scaled_mm/output.cuh"

namespace jax_qmm {

// Of 2 or 4 bytes, as the output's dtype has. `sum` is what `value` was made of.
template <class Output, class Sum>
__device__ void write_one(Output const& output, void* out, int64_t at, float value, Sum sum) {
  if (bytes_of(output.dtype) == 2) {
    static_cast<uint16_t*>(out)[at] = output.template round_one<uint16_t>(value, sum);
  } else {
    static_cast<uint32_t*>(out)[at] = output.template round_one<uint32_t>(value, sum);
  }
}

}  // namespace jax_qmm
