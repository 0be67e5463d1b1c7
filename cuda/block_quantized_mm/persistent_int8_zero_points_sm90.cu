#include "block_quantized_mm/persistent_sm90.cuh"

namespace jax_qmm::block_quantized {

template <>
void add_persistent_instances<DType::kS8, true>(std::vector<Instance>& to) {
  add_of_blocks<DType::kS8, true, false>(to);
  add_of_blocks<DType::kS8, true, true>(to);
}

}  // namespace jax_qmm::block_quantized
