#include "block_quantized_mm/persistent_sm90.cuh"

namespace jax_qmm::block_quantized {

// Where rows of b share their scales int8 has kernels like others, as its results are the reference's, which rounds in
// another order.
template <>
void add_persistent_instances<DType::kF8E4M3, false>(std::vector<Instance>& to) {
  add_of_blocks<DType::kF8E4M3, false, false>(to);
  to.push_back(persistent_instance<PersistentSm90<DType::kF8E4M3, false, false, 128, 1, true>>());
  to.push_back(persistent_instance<PersistentSm90<DType::kF8E4M3, false, false, 128, 2, true>>());
  auto const add_parts = [&](auto shared_b) {
    using C = PersistentSm90<DType::kF8E4M3, false, false, 128, 1, shared_b, true>;
    to.push_back(persistent_instance<C, 2>());
    to.push_back(persistent_instance<C, 3>());
    to.push_back(persistent_instance<C, 4>());
  };
  add_parts(std::false_type());
  add_parts(std::true_type());
}

}  // namespace jax_qmm::block_quantized
