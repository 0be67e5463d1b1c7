#include "core/launch.h"

#include <cstdlib>
#include <cstring>

#include "core/archs.h"

namespace jax_qmm {

bool overlap_allowed() {
  static bool const overlap = [] {
    char const* const pdl = std::getenv("JAX_QMM_PDL");
    return pdl == nullptr || std::strcmp(pdl, "0") != 0;
  }();
  return overlap;
}

bool launches_overlap(Gpu const& gpu) { return compiled_for(gpu.arch) >= 90 && overlap_allowed(); }

Submit on_stream(cudaStream_t stream) {
  return [stream](Launch const& launch) {
    Gpu const* gpu;
    if (cudaError_t const error = current_gpu(gpu)) return error;
    LaunchShape const& shape = launch.shape;
    cudaLaunchAttribute attributes[2];
    int count = 0;
    if (launches_overlap(*gpu)) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.clustered()) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count++].val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_memory;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    std::vector<void*> arguments;
    for (Launch::Argument const& argument : launch.arguments) arguments.push_back(const_cast<void*>(argument.data));
    return cudaLaunchKernelExC(&config, launch.kernel, arguments.data());
  };
}

}  // namespace jax_qmm
