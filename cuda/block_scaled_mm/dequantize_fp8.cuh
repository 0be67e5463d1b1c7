// Weights of 4 bits, in their stored order, to fp8 in registers, and the scales and zero points of their blocks.
#pragma once

#include <cuda_fp8.h>

#include "block_scaled_mm/dequantize.cuh"

namespace jax_qmm::block_scaled {

using Fp8 = __nv_fp8_e4m3;

// A weight less its zero point is an integer n of -15 to 15. The bits of |n| and a sign are n 2^-9 in e4m3, as its
// subnormals and the first of its normal numbers are 2^-9 apart; the scale makes up for it.
template <>
struct Dequantizer<Fp8, 4, false> {
  using Term = ExactTerm;

  __device__ static Term term(float scale, uint32_t zero_bits, DType) {
    uint32_t const zero = static_cast<int8_t>(zero_bits) + 8;  // of the unsigned weights
    return {scale * 512, (0x80 - zero) * 0x01010101};
  }

  // Of lane t of four the columns 4t to 4t + 3 of the 32 of a word, and those 16 further on, from the words of two
  // parts of the 64 bytes, 2 (t % 2) and the next: each has two of the four, in nibbles t / 2 and 4 + t / 2, or two
  // nibbles on.
  __device__ static void fours(uint32_t first, uint32_t second, int lane, Term const& term, uint32_t& to,
                               uint32_t& to_16_on) {
    int const shift = lane / 2 % 2 * 4;
    uint32_t const a = first >> shift & 0x0f0f0f0f, b = second >> shift & 0x0f0f0f0f;
    to = four(__byte_perm(a, b, 0x6420), term);
    to_16_on = four(__byte_perm(a, b, 0x7531), term);
  }

 private:
  __device__ static uint32_t four(uint32_t unsigned_weights, Term const& term) {
    uint32_t const biased = unsigned_weights + term.zero;  // 0x80 + n, of which no byte reaches the next
    uint32_t positive, bits;                               // 0xff where n is not negative: each byte's first bit
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(positive) : "r"(biased));
    // biased ^ 0x80 is n; where that is negative, biased ^ 0xff is 0x80 - 1 - n. One instruction, of which the compiler
    // makes two: biased ^ (~positive | 0x80808080).
    asm("lop3.b32 %0, %1, %2, %3, 0x4b;" : "=r"(bits) : "r"(biased), "r"(positive), "r"(0x80808080));
    return bits + (~positive & 0x01010101);
  }
};

}  // namespace jax_qmm::block_scaled
