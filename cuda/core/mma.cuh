// Warp-level tensor cores: c (16 x 8) += a (16 x 32) * b (32 x 8) of 8-bit operands, in the fragments' layout of the
// PTX ISA for m16n8k32. e4m3 is widened to float16, whose products are exact, so its sums are full float32 ones.
// Turing's instructions are parts of Ampere's, and their fragments the registers of these parts.
#pragma once

#include <cuda_fp8.h>

namespace jax_qmm {

__device__ inline void mma(int32_t (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
          : "+r"(c[2 * m]), "+r"(c[2 * m + 1])
          : "r"(a[2 * k + m]), "r"(b[k]));
    }
  }
#endif
}

__device__ inline void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  auto const half_of_k = [&](uint32_t a_top, uint32_t a_bottom, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a_top), "r"(a_bottom), "r"(b));
  };
  half_of_k(a0, a1, b0);
  half_of_k(a2, a3, b1);
#endif
}

// The same of bfloat16.
__device__ inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Half of four e4m3 as two float16: which two does not matter, as long as it is the same bytes of both operands.
template <int half>
__device__ uint32_t widen(uint32_t four_e4m3) {
#if __CUDA_ARCH__ >= 890
  uint32_t const two = half == 0 ? four_e4m3 & 0xffff : four_e4m3 >> 16;
  __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  return uint32_t(h.x) | uint32_t(h.y) << 16;
#else
  // Without an instruction for it. Exponent and mantissa in the place of a float16's are 2**-8 of the value, subnormal
  // ones too; NaN, all ones, is the only one that adding a unit carries out of, to the bit that makes it a float16's.
  uint32_t const upper_bytes = half == 0 ? four_e4m3 << 8 : four_e4m3;
  uint32_t const magnitudes = upper_bytes >> 1 & 0x3f803f80;
  uint32_t const nans = magnitudes + 0x00800080 & 0x40004000;
  uint32_t const bits = magnitudes | nans | upper_bytes & 0x80008000;
  uint32_t scaled;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(bits), "r"(0x5c005c00));  // 2**8
  return scaled;
#endif
}

// Four bytes become the K pairs of one fragment register each; A and B are split alike, so the order of K is the same.
__device__ inline void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t const a_top = a[2 * half], a_bottom = a[2 * half + 1], b_word = b[half];
    mma_f16(c, widen<0>(a_top), widen<0>(a_bottom), widen<1>(a_top), widen<1>(a_bottom), widen<0>(b_word),
            widen<1>(b_word));
  }
}

// The same of operands that were widened before, for those that more than one product needs.
struct Widened {
  uint32_t first, second;

  Widened() = default;
  __device__ explicit Widened(uint32_t four_e4m3) : first(widen<0>(four_e4m3)), second(widen<1>(four_e4m3)) {}
};

__device__ inline void mma(float (&c)[4], Widened const (&a)[4], Widened const (&b)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Widened const top = a[2 * half], bottom = a[2 * half + 1];
    mma_f16(c, top.first, bottom.first, top.second, bottom.second, b[half].first, b[half].second);
  }
}

#if __CUDA_ARCH__ >= 890
// Summed in the tensor cores' narrow accumulator.
__device__ inline void mma_e4m3(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

}  // namespace jax_qmm
