// What a device needs before its first launch.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>

#include "core/launch.h"

namespace jax_qmm {

// Loads a kernel on the current device, so that nothing is loaded while a stream is captured, allows it its shared
// memory, and asks whether the device can run it: clusters fit nowhere where the SMs that they need are not of one GPC.
cudaError_t prepare_kernel(void const* kernel, LaunchShape const& shape, bool& fits);

class OncePerDevice {
 public:
  // Calls f if it has not succeeded on the current device. Twice is harmless; holding a lock while CUDA loads is not,
  // as other devices' calls would wait for it.
  template <class F>
  cudaError_t operator()(F f) {
    int device;
    if (cudaError_t const error = cudaGetDevice(&device)) return error;
    {
      std::lock_guard lock(mutex_);
      if (done_.count(device)) return cudaSuccess;
    }
    if (cudaError_t const error = f()) return error;
    std::lock_guard lock(mutex_);
    done_.insert(device);
    return cudaSuccess;
  }

 private:
  std::mutex mutex_;
  std::set<int> done_;
};

}  // namespace jax_qmm
