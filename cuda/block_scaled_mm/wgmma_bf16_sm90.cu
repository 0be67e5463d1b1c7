#include "block_scaled_mm/launch_sm90.cuh"

namespace jax_qmm::block_scaled {

template <>
void add_wgmma_instances<DType::kBF16>(std::vector<Instance>& to) {
  add_wgmma<__nv_bfloat16, 4>(DType::kBF16, to);
  add_wgmma<__nv_bfloat16, 8>(DType::kBF16, to);
}

}  // namespace jax_qmm::block_scaled
