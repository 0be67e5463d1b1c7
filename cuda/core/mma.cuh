// Warp-level tensor cores: c (16 x 8) += a (16 x 32) * b (32 x 8) of 8-bit operands, in the fragments' layout of the
// PTX ISA for m16n8k32. e4m3 is widened to float16, whose products are exact, so its sums are full float32 ones.
#pragma once

#include <cuda_fp8.h>

namespace jax_qmm {

__device__ inline void mma(int32_t (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline uint32_t widen(uint32_t two_e4m3) {
  __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_e4m3), __NV_E4M3);
  return uint32_t(h.x) | uint32_t(h.y) << 16;
}

// Four bytes become the K pairs of one fragment register each; A and B are split alike, so the order of K is the same.
__device__ inline void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t const a_top = a[2 * half], a_bottom = a[2 * half + 1], b_word = b[half];
    mma_f16(c, widen(a_top & 0xffff), widen(a_bottom & 0xffff), widen(a_top >> 16), widen(a_bottom >> 16),
            widen(b_word & 0xffff), widen(b_word >> 16));
  }
}

}  // namespace jax_qmm
