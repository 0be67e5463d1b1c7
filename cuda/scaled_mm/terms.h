// What is applied to the sums of a product: vectors with a value for each row, and for each column. A new term of the
// epilogue is a field of the full terms, its line in the two functions below, and its arithmetic in `apply`; every
// kernel with the full epilogue follows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

namespace jax_qmm {

constexpr bool kFullEpilogue = true;  // in the table of kernels

// Each as an Of<type, whether it goes along the rows>. Plain kernels have these terms alone: more would cost their
// machine code registers and shared memory.
template <bool kFull, template <class, bool> class Of>
struct Terms {
  static constexpr bool kHasAll = false;
  Of<float, true> scale_a;
  Of<float, false> scale_b, bias;
  Of<int32_t, true> azp;
  Of<int32_t, false> azp_adj;
};

template <template <class, bool> class Of>
struct Terms<true, Of> : Terms<false, Of> {
  static constexpr bool kHasAll = true;
  Of<int32_t, true> sums_a;
  Of<int32_t, false> azp_b;
};

template <class T, bool kOfRow>
using Value = T;

template <class T, bool kAlongRows>
struct Direction {
  static constexpr bool kOfRow = kAlongRows;
};

// The values of absent terms. x + -0 is x for every x, -0 included. Without azp, azp_adj holds the products of the two;
// without both, 1 * 0 is subtracted.
constexpr Terms<true, Value> kAbsent{{1.0f, 1.0f, -0.0f, 1, 0}, 0, 0};

template <class... AllTerms>
constexpr bool kAllFull = (std::decay_t<AllTerms>::kHasAll && ...);

// Calls f with the terms of one name of all structs, name after name, as far as all structs have them; where sums are
// no integers, without the terms that only integer sums have.
template <bool kIntegers = true, class F, class... AllTerms>
__host__ __device__ void each_term(F f, AllTerms&&... terms) {
  f(terms.scale_a...);
  f(terms.scale_b...);
  f(terms.bias...);
  if constexpr (kIntegers) {
    f(terms.azp...);
    f(terms.azp_adj...);
    if constexpr (kAllFull<AllTerms...>) {
      f(terms.sums_a...);
      f(terms.azp_b...);
    }
  }
}

// What f gives for the terms of one name of all structs, by that name.
template <template <class, bool> class To, class F, class... AllTerms>
__host__ __device__ auto map_terms(F f, AllTerms&&... terms) {
  Terms<false, To> plain{f(terms.scale_a...), f(terms.scale_b...), f(terms.bias...), f(terms.azp...),
                         f(terms.azp_adj...)};
  if constexpr (kAllFull<AllTerms...>) {
    return Terms<true, To>{plain, f(terms.sums_a...), f(terms.azp_b...)};
  } else {
    return plain;
  }
}

#ifdef __CUDACC__

// Modulo 2^32: only the whole sum must fit int32, not what it is made of.
template <bool kFull>
__device__ int32_t subtract_zero_points(int32_t acc, Terms<kFull, Value> const& t) {
  uint32_t sum = static_cast<uint32_t>(acc) - static_cast<uint32_t>(t.azp) * static_cast<uint32_t>(t.azp_adj);
  if constexpr (kFull) sum -= static_cast<uint32_t>(t.sums_a) * static_cast<uint32_t>(t.azp_b);
  return static_cast<int32_t>(sum);
}

// Sums of fp8 have no zero points.
template <bool kFull>
__device__ float subtract_zero_points(float acc, Terms<kFull, Value> const&) {
  return acc;
}

// Of a sum without zero points.
template <bool kFull, class Sum>
__device__ float scale(Sum sum, Terms<kFull, Value> const& t) {
  return fmaf(t.scale_a, t.scale_b * static_cast<float>(sum), t.bias);
}

template <bool kFull, class Sum>
__device__ float apply(Sum sum, Terms<kFull, Value> const& t) {
  return scale(subtract_zero_points(sum, t), t);
}

#endif

}  // namespace jax_qmm
