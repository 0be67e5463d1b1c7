// What kernels of depthwise convolutions have in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/launch.h"

namespace jax_qmm::conv {

constexpr int kThreads = 128, kMostChannels = 128;  // of a block

// How many threads, of so many channels each, have all of one place's or an even part of them: as many as leave the
// fewest threads idle, but for parts that are less than what memory gives at once.
inline int threads_of_place(int channels, int channels_of_thread) {
  int const all = int(ceil_div(channels, channels_of_thread)), most = kMostChannels / channels_of_thread;
  int const least = std::min(all, int(ceil_div(32, channels_of_thread)));
  int best = 0;
  double fewest = std::numeric_limits<double>::infinity();
  for (int parts = int(ceil_div(all, most)); ceil_div(all, parts) >= least; ++parts) {
    int const threads = int(ceil_div(all, parts));
    double const blocks = double(parts) / (kThreads / threads);
    if (blocks < fewest) best = threads, fewest = blocks;
    if (threads == 1) break;
  }
  return best;
}

// Four words of four bytes each, by columns in place of rows.
__device__ inline void transpose(uint32_t const (&rows)[4], uint32_t (&columns)[4]) {
  uint32_t const first[] = {__byte_perm(rows[0], rows[1], 0x5140), __byte_perm(rows[0], rows[1], 0x7362)};
  uint32_t const last[] = {__byte_perm(rows[2], rows[3], 0x5140), __byte_perm(rows[2], rows[3], 0x7362)};
#pragma unroll
  for (int c = 0; c < 4; ++c) columns[c] = __byte_perm(first[c / 2], last[c / 2], c % 2 == 0 ? 0x5410 : 0x7632);
}

}  // namespace jax_qmm::conv
