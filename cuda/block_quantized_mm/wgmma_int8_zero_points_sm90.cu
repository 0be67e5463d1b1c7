#include "block_quantized_mm/wgmma_sm90.cuh"

namespace jax_qmm::block_quantized {

template void add_wgmma_instances<DType::kS8, true>(std::vector<Instance>& to);

}  // namespace jax_qmm::block_quantized
