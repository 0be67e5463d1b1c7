// From global memory to shared memory by cp.async, and from there to the fragments of warp-level tensor cores. Turing
// has no cp.async: a copy is done when copy_async returns, and no group of copies is ever on its way.
#pragma once

#include <cstdint>
#include <type_traits>

namespace jax_qmm {

// Bytes that are not there become zeros. What other warps or blocks of the SM copy too may come through L1.
template <int Bytes, bool kThroughL1 = (Bytes < 16)>
__device__ void copy_async(uint32_t to, uint8_t const* from, bool is_there) {
#if __CUDA_ARCH__ >= 800
  int const there = is_there ? Bytes : 0;
  if constexpr (Bytes == 16 && kThroughL1) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there) : "memory");
  } else if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(there), "n"(Bytes)
                 : "memory");
  }
#else
  using Short = std::conditional_t<Bytes == 8, uint2, uint32_t>;
  using Word = std::conditional_t<Bytes == 16, uint4, Short>;
  Word word{};
  if (is_there) word = *reinterpret_cast<Word const*>(from);
  *static_cast<Word*>(__cvta_shared_to_generic(to)) = word;
#endif
}
// The first bytes of a word, and zeros for its others. Not on Turing.
__device__ inline void copy_word_async(uint32_t to, uint8_t const* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until all but the last few groups of this thread's copies are there.
template <int Groups>
__device__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
#endif
}

// Four matrices of 8 rows of 16 bytes, whose rows' addresses each 8 lanes give: one register each of the fragments. An
// offset that is added to the address instead would have a register of its own.
template <int Offset = 0>
__device__ void load_matrices(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address), "n"(Offset)
               : "memory");
}

// Where 16 bytes of a row of a tile stand in shared memory: the chunks of 8 rows, which are loaded at once, lie in
// distinct banks.
template <int TileK>
__device__ uint32_t swizzled(int row, int chunk) {
  return row * TileK + 16 * (chunk ^ (TileK == 64 ? row / 2 % 4 : row % 8));
}

}  // namespace jax_qmm
