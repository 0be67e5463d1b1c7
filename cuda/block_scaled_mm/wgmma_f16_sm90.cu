#include "block_scaled_mm/launch_sm90.cuh"

namespace jax_qmm::block_scaled {

template <>
void add_wgmma_instances<DType::kF16>(std::vector<Instance>& to) {
  add_wgmma<__half, 4>(DType::kF16, to);
  add_wgmma<__half, 8>(DType::kF16, to);
}

}  // namespace jax_qmm::block_scaled
