// Weights of 4 bits, two a byte along K, to int8 in registers, with the multiple and the zero point of their blocks.
#pragma once

#include "expanded_mm/expansion.cuh"

namespace jax_qmm::block_scaled {

struct IntegerDequantizer {
  using Term = expanded::Expansion;

  __device__ static Term term(uint32_t multiple, uint32_t zero_point) {
    return {static_cast<int8_t>(multiple), static_cast<int8_t>(zero_point)};
  }

  // Of lane t of four the columns 4t to 4t + 3 of 32, and those 16 further on: halves of words t / 2 and 2 + t / 2.
  __device__ static uint32_t gather(uint32_t first, uint32_t second, int lane) {
    return __byte_perm(first, second, lane % 2 == 0 ? 0x5410 : 0x7632);
  }
};

}  // namespace jax_qmm::block_scaled
