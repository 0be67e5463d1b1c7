// All kernels for x of a dtype and weights of as many bits, each pair of which is a source of its own.
#pragma once

#include "block_scaled_mm/direct.cuh"
#include "block_scaled_mm/kernel.cuh"

namespace jax_qmm::block_scaled {

template <DType In, int kBits>
void add_instances(std::vector<Instance>& to) {
  using T = std::conditional_t<In == DType::kBF16, __nv_bfloat16, __half>;
  auto const add = [&](auto float_zero, auto unit) {
    constexpr bool kFloatZero = decltype(float_zero)::value;
    constexpr int kUnit = decltype(unit)::value;
    to.push_back(direct_instance<Config<T, kBits, kFloatZero, kUnit, 8, 2, 1, 8>>(In));
    if constexpr (kUnit > 32) to.push_back(direct_instance<Config<T, kBits, kFloatZero, kUnit, 16, 2, 1, 8>>(In));
    to.push_back(instance<Config<T, kBits, kFloatZero, kUnit, 16, 2, 2, 4>>(In));
    to.push_back(instance<Config<T, kBits, kFloatZero, kUnit, 32, kUnit == 16 ? 1 : 2, 4, 2>>(In));
    if constexpr (kUnit > 32) to.push_back(instance<Config<T, kBits, kFloatZero, kUnit, 64, 2, 8, 1>>(In));
  };
  add(std::false_type(), std::integral_constant<int, 512 / kBits>());
  add(std::false_type(), std::integral_constant<int, 32>());
  add(std::false_type(), std::integral_constant<int, 16>());
  add(std::true_type(), std::integral_constant<int, 16>());
  auto const add_windows = [&](auto const& config) {
    using C = std::decay_t<decltype(config)>;
    to.push_back(instance<C, SourceOfWindows<C>>(In));
  };
  add_windows(Config<T, kBits, false, 32, 16, 2, 2, 4>());
  add_windows(Config<T, kBits, false, 32, 32, 2, 4, 2>());
  add_windows(Config<T, kBits, false, 32, 64, 2, 8, 1>());
  add_windows(Config<T, kBits, true, 16, 16, 2, 2, 4>());
}

}  // namespace jax_qmm::block_scaled
