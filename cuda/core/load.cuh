// Loads from global memory to registers that stay where they stand, ahead of the products.
#pragma once

namespace jax_qmm {

__device__ inline uint4 load(void const* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// What is read once leaves the L1 cache to the rest.
__device__ inline uint4 load_once(void const* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Eight bytes.
template <bool kOnce>
__device__ void load_two(uint32_t* to, void const* p) {
  if constexpr (kOnce) {
    asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(p));
  } else {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(p));
  }
}

}  // namespace jax_qmm
