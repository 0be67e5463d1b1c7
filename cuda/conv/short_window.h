// How kernels for windows of few bytes divide their work, and how long they are predicted to take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv/conv.h"

namespace jax_qmm::conv::short_window {

constexpr int kAcross = 16, kMostDown = 16, kTileN = 32;  // pixels of a line, lines, and channels of a tile
constexpr int kBegin = 2;                                 // in lines, what a tile takes beside its own

// Lines of a tile, all tiles of some channels, and the blocks that share them, each in so many turns.
struct Tiling {
  int down;
  int64_t tiles, blocks, turns;
};

// By the fewest lines in all turns. Of an empty result one tile.
inline Tiling tiling(Conv const& p, int blocks_per_sm, Gpu const& gpu) {
  int64_t const of_columns = std::max<int64_t>(1, ceil_div(p.n, kTileN) * p.batch);
  int64_t const places = int64_t(gpu.sm_count) * blocks_per_sm / of_columns;
  Tiling best{};
  for (int const down : {kMostDown, 8, 4}) {
    int64_t const of_image = ceil_div(p.pixels[1], down) * ceil_div(p.pixels[2], kAcross);
    int64_t const tiles = std::max<int64_t>(1, p.images * of_image), blocks = std::clamp<int64_t>(places, 1, tiles);
    Tiling const found{down, tiles, blocks, ceil_div(tiles, blocks)};
    if (best.down == 0 || found.turns * (down + kBegin) < best.turns * (best.down + kBegin)) best = found;
  }
  return best;
}

}  // namespace jax_qmm::conv::short_window
