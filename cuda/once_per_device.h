// For what a device needs before its first launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace jax_qmm {

// Calls f if it has not succeeded on the current device. `done` keeps a bit for each device; doing it twice is
// harmless.
template <class F>
cudaError_t once_per_device(std::atomic<uint64_t>& done, F f) {
  int device;
  if (cudaError_t const error = cudaGetDevice(&device)) return error;
  uint64_t const bit = uint64_t{1} << (device % 64);
  if (done & bit) return cudaSuccess;
  if (cudaError_t const error = f()) return error;
  done |= bit;
  return cudaSuccess;
}

}  // namespace jax_qmm
