#include "block_quantized_mm/persistent_sm90.cuh"

namespace jax_qmm::block_quantized {

template <>
void add_persistent_instances<DType::kS8, false>(std::vector<Instance>& to) {
  add_of_blocks<DType::kS8, false, false>(to);
}

}  // namespace jax_qmm::block_quantized
