#include "block_scaled_mm/launch_sm90.cuh"

namespace jax_qmm::block_scaled {

// Of windows with dozens of pixels and more.
void add_wgmma_windows(std::vector<Instance>& to) {
  auto const add = [&](auto bits) {
    to.push_back(instance_sm90<WindowsSm90<__nv_bfloat16, bits, 64, false>>(DType::kBF16));
    to.push_back(instance_sm90<WindowsSm90<__nv_bfloat16, bits, 128, true>>(DType::kBF16));
    to.push_back(instance_sm90<WindowsSm90<__nv_bfloat16, bits, 256, true>>(DType::kBF16));
    to.push_back(instance_sm90<WindowsSm90<__half, bits, 64, false>>(DType::kF16));
  };
  add(std::integral_constant<int, 4>());
  add(std::integral_constant<int, 8>());
}

}  // namespace jax_qmm::block_scaled
