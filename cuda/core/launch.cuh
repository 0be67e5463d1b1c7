// Submitting a kernel with arguments of its own types, and how such a kernel begins; for CUDA files alone.
#pragma once

#include <type_traits>

#include "core/launch.h"

extern "C" unsigned long long const fatbinData[];  // nvcc's name for the device code of the file that includes this

namespace jax_qmm {

// Static, so that each file has its own with its own fatbin.
template <class... Parameters>
static cudaError_t launch(Submit const& submit, LaunchShape const& shape, void (*kernel)(Parameters...),
                          std::common_type_t<Parameters> const&... arguments) {
  return submit({reinterpret_cast<void const*>(kernel), fatbinData, shape, {{&arguments, sizeof(arguments)}...}});
}

// Of shared memory that a kernel may have without asking for it at its launch. XLA leaves 28 KB of an SM to L1 where a
// kernel asks for any.
constexpr int kStaticBytes = 48 << 10;

// The next kernel may start, and wait for this one's results as this one does for those before it. Before Hopper,
// kernels never overlap.
__device__ inline void begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// The same, but the next kernel starts when those before this one are done. Where several blocks fit on an SM and grids
// are small, blocks of more kernels than two at once would leave some SMs with two of one kernel and others with none.
__device__ inline void begin_in_turn() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace jax_qmm
