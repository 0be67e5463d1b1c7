// What kernels of depthwise convolutions have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/launch.h"

namespace jax_qmm::conv {

constexpr int kThreads = 128, kMostChannels = 128;  // of a block

// The logarithm of how many threads, of so many channels each, have all of one place's: fewer where less of the last
// block would be idle, as with 144.
inline int log2_threads_of(int channels, int channels_of_thread) {
  auto const covered = [&](int log2) { return ceil_div(channels, channels_of_thread << log2) << log2; };
  int log2 = 0;
  while (channels_of_thread << log2 < std::min(channels, kMostChannels)) ++log2;
  while (log2 > 1 && covered(log2 - 1) < covered(log2)) --log2;
  return log2;
}

// Four words of four bytes each, by columns in place of rows.
__device__ inline void transpose(uint32_t const (&rows)[4], uint32_t (&columns)[4]) {
  uint32_t const first[] = {__byte_perm(rows[0], rows[1], 0x5140), __byte_perm(rows[0], rows[1], 0x7362)};
  uint32_t const last[] = {__byte_perm(rows[2], rows[3], 0x5140), __byte_perm(rows[2], rows[3], 0x7362)};
#pragma unroll
  for (int c = 0; c < 4; ++c) columns[c] = __byte_perm(first[c / 2], last[c / 2], c % 2 == 0 ? 0x5410 : 0x7632);
}

}  // namespace jax_qmm::conv
