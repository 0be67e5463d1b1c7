// Kernel launches as values, so that one piece of code fills them and another decides where they go: on a stream, or
// into the CUDA graph of an XLA program (ffi/record.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "core/gpu.h"

namespace jax_qmm {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct LaunchShape {
  dim3 grid, block;
  size_t shared_memory = 0;
  dim3 cluster = {1, 1, 1};

  bool clustered() const { return cluster.x * cluster.y * cluster.z > 1; }
};

// Whether kernels may start while the one before them ends; the environment's JAX_QMM_PDL=0 forbids it.
bool overlap_allowed();
bool launches_overlap(Gpu const& gpu);  // that runs code for compute capability 9.0 or later: see begin()

// The kernel waits for the results of the one before it itself.
struct Launch {
  void const* kernel;  // a __global__ function
  void const* image;   // the fatbin with its code
  LaunchShape shape;
  struct Argument {
    void const* data;
    size_t size;
  };
  std::vector<Argument> arguments;
};

using Submit = std::function<cudaError_t(Launch const&)>;

Submit on_stream(cudaStream_t stream);

}  // namespace jax_qmm
