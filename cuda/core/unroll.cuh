// Loops whose indices are known at compile time.
#pragma once

#include <utility>

namespace jax_qmm {

template <int... i, class F>
__device__ void unroll(F f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>()), ...);
}
template <int kCount, class F>
__device__ void unroll(F f) {
  unroll(f, std::make_integer_sequence<int, kCount>());
}

}  // namespace jax_qmm
