#include "block_scaled_mm/launch_sm90.cuh"

namespace jax_qmm::block_scaled {

// Few rows of x are faster in 16 bits, as only weights take time there.
template <>
void add_wgmma_instances<DType::kF8E4M3>(std::vector<Instance>& to) {
  auto const add = [&](auto unit) {
    to.push_back(instance_sm90<ConfigSm90<Fp8, 4, 64, false, unit>>(DType::kF8E4M3));
    to.push_back(instance_sm90<ConfigSm90<Fp8, 4, 128, false, unit>>(DType::kF8E4M3));
    to.push_back(instance_sm90<PersistentSm90<Fp8, 4, 64, false, unit>>(DType::kF8E4M3));
    to.push_back(instance_sm90<PersistentSm90<Fp8, 4, 128, false, unit>>(DType::kF8E4M3));
  };
  add(std::integral_constant<int, 128>());
  add(std::integral_constant<int, 64>());
  add(std::integral_constant<int, 32>());
}

}  // namespace jax_qmm::block_scaled
