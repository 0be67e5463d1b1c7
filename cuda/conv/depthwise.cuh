// What kernels of depthwise convolutions have in common.
#pragma once

#include <cstdint>

namespace jax_qmm::conv {

// Four words of four bytes each, by columns in place of rows.
__device__ inline void transpose(uint32_t const (&rows)[4], uint32_t (&columns)[4]) {
  uint32_t const first[] = {__byte_perm(rows[0], rows[1], 0x5140), __byte_perm(rows[0], rows[1], 0x7362)};
  uint32_t const last[] = {__byte_perm(rows[2], rows[3], 0x5140), __byte_perm(rows[2], rows[3], 0x7362)};
#pragma unroll
  for (int c = 0; c < 4; ++c) columns[c] = __byte_perm(first[c / 2], last[c / 2], c % 2 == 0 ? 0x5410 : 0x7632);
}

}  // namespace jax_qmm::conv
