#include "block_scaled_mm/add_instances.cuh"

namespace jax_qmm::block_scaled {

template void add_instances<DType::kBF16, 8>(std::vector<Instance>& to);

}  // namespace jax_qmm::block_scaled
