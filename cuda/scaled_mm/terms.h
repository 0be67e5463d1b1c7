// What is applied to the sums of a product: vectors with a value for each row, and for each column. A new term of the
// epilogue is a field here, its line in the two functions below, and its arithmetic in `apply`; every kernel follows.
#pragma once

#include <cstdint>

namespace jax_qmm {

// Each as an Of<type, whether it goes along the rows>.
template <template <class, bool> class Of>
struct Terms {
  Of<float, true> scale_a;
  Of<float, false> scale_b, bias;
  Of<int32_t, true> azp;
  Of<int32_t, false> azp_adj;
};

template <class T, bool kOfRow>
using Value = T;

// The values of absent terms. x + -0 is x for every x, -0 included. Without azp, azp_adj holds the products of the two;
// without both, 1 * 0 is subtracted.
constexpr Terms<Value> kAbsent{1.0f, 1.0f, -0.0f, 1, 0};

#ifdef __CUDACC__

// Calls f with the terms of one name of all structs, name after name; where sums are no integers, without the terms
// that only integer sums have.
template <bool kIntegers = true, class F, class... AllTerms>
__host__ __device__ void each_term(F f, AllTerms&&... terms) {
  f(terms.scale_a...);
  f(terms.scale_b...);
  f(terms.bias...);
  if constexpr (kIntegers) {
    f(terms.azp...);
    f(terms.azp_adj...);
  }
}

// What f gives for the terms of one name of all structs, by that name.
template <template <class, bool> class To, class F, class... AllTerms>
__host__ __device__ Terms<To> map_terms(F f, AllTerms&&... terms) {
  return {f(terms.scale_a...), f(terms.scale_b...), f(terms.bias...), f(terms.azp...), f(terms.azp_adj...)};
}

__device__ inline float subtract_zero_point(int32_t acc, int32_t azp, int32_t azp_adj) {
  return static_cast<float>(
      static_cast<int32_t>(static_cast<uint32_t>(acc) - static_cast<uint32_t>(azp) * static_cast<uint32_t>(azp_adj)));
}

// Sums of fp8 have no zero points.
__device__ inline float subtract_zero_point(float acc, int32_t, int32_t) { return acc; }

template <class Sum>
__device__ float apply(Sum sum, Terms<Value> const& t) {
  return fmaf(t.scale_a, t.scale_b * subtract_zero_point(sum, t.azp, t.azp_adj), t.bias);
}

#endif

}  // namespace jax_qmm
