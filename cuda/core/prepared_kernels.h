// Which kernels of a table each device can run.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "core/gpu.h"
#include "core/prepare.h"

namespace jax_qmm {

class PreparedKernels {
 public:
  // Of a GPU that none was prepared on, all.
  bool can_run(Gpu const& gpu, int kernel) const {
    std::shared_lock lock(mutex_);
    auto const found = of_device_.find(gpu.device);
    return found == of_device_.end() || found->second[kernel];
  }

  // Calls `prepare_one(kernel, fits)`, which sets `fits`, for each.
  template <class F>
  cudaError_t prepare(Gpu const& gpu, int kernels, F prepare_one) {
    std::vector<bool> all(kernels);
    for (int i = 0; i < kernels; ++i) {
      bool fits = false;
      if (cudaError_t const error = prepare_one(i, fits)) return error;
      all[i] = fits;
    }
    std::unique_lock lock(mutex_);
    of_device_[gpu.device] = all;
    return cudaSuccess;
  }

  // Prepares those of a table that `runs_on(gpu, i)` says the current device runs, if that has not been done.
  template <class Instance, class RunsOn>
  cudaError_t prepare(std::vector<Instance> const& table, RunsOn runs_on) {
    return once_([&] {
      Gpu const* gpu;
      if (cudaError_t const error = current_gpu(gpu)) return error;
      return prepare(*gpu, int(table.size()),
                     [&](int i, bool& fits) { return runs_on(*gpu, i) ? table[i].prepare(fits) : cudaSuccess; });
    });
  }

 private:
  OncePerDevice once_;
  mutable std::shared_mutex mutex_;
  std::map<int, std::vector<bool>> of_device_;
};

}  // namespace jax_qmm
