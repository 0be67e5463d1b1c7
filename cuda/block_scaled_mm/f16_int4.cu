#include "block_scaled_mm/add_instances.cuh"

namespace jax_qmm::block_scaled {

template void add_instances<DType::kF16, 4>(std::vector<Instance>& to);

}  // namespace jax_qmm::block_scaled
