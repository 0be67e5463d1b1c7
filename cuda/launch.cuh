// Submitting a kernel with arguments of its own types, and how such a kernel begins; for CUDA files alone.
#pragma once

#include <type_traits>

#include "launch.h"

extern "C" unsigned long long const fatbinData[];  // nvcc's name for the device code of the file that includes this

namespace jax_qmm {

// Static, so that each file has its own with its own fatbin.
template <class... Parameters>
static cudaError_t launch(Submit const& submit, LaunchShape const& shape, void (*kernel)(Parameters...),
                          std::common_type_t<Parameters> const&... arguments) {
  return submit({reinterpret_cast<void const*>(kernel), fatbinData, shape, {{&arguments, sizeof(arguments)}...}});
}

// The next kernel may start, and wait for this one's results as this one does for those before it.
__device__ inline void begin() {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
}

}  // namespace jax_qmm
