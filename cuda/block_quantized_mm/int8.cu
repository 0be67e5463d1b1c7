#include "block_quantized_mm/few_rows.cuh"
#include "block_quantized_mm/kernel.cuh"

namespace jax_qmm::block_quantized {

template void add_instances<DType::kS8, false>(std::vector<Instance>& to);
template void add_few_rows<DType::kS8, false>(std::vector<Instance>& to);

}  // namespace jax_qmm::block_quantized
