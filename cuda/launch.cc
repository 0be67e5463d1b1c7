#include "launch.h"

namespace jax_qmm {

Submit on_stream(cudaStream_t stream) {
  return [stream](Launch const& launch) {
    LaunchShape const& shape = launch.shape;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_memory;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = shape.clustered() ? 2 : 1;
    std::vector<void*> arguments;
    for (Launch::Argument const& argument : launch.arguments) arguments.push_back(const_cast<void*>(argument.data));
    return cudaLaunchKernelExC(&config, launch.kernel, arguments.data());
  };
}

}  // namespace jax_qmm
