#include "core/prepare.h"

namespace jax_qmm {

cudaError_t prepare_kernel(void const* kernel, LaunchShape const& shape, bool& fits) {
  fits = true;
  cudaFuncAttributes attributes;  // asking loads the kernel
  if (cudaError_t const error = cudaFuncGetAttributes(&attributes, kernel)) return error;
  if (shape.shared_memory > 0) {
    cudaError_t const error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shape.shared_memory));
    if (error != cudaSuccess) return error;
  }
  if (!shape.clustered()) return cudaSuccess;

  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.cluster;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_memory;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  cudaError_t const error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  fits = clusters > 0;
  if (error != cudaErrorInvalidClusterSize) return error;
  cudaGetLastError();  // this error is the answer; no launch has failed
  return cudaSuccess;
}

}  // namespace jax_qmm
