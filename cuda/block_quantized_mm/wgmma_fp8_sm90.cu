#include "block_quantized_mm/wgmma_sm90.cuh"

namespace jax_qmm::block_quantized {

template void add_wgmma_instances<DType::kF8E4M3, false>(std::vector<Instance>& to);

}  // namespace jax_qmm::block_quantized
