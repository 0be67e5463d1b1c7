// The table of kernels, from which select.cc chooses.
#pragma once

#include <algorithm>
#include <vector>

#include "block_scaled_mm/block_scaled_mm.h"

namespace jax_qmm::block_scaled {

struct Instance {
  DType in;
  int bits;
  bool float_zero_points;  // else integers, or none; with float32 x any
  int unit;                // columns after which sums are scaled: blocks are multiples of it
  int tile_m, rows;        // of x and of weights, of a block
  int step;                // columns of K, of all warps that share it
  int blocks_per_sm;
  bool wgmma = false;          // of Hopper alone, for rows of x that TMA can load
  bool scale_weights = false;  // and not sums
  bool persistent = false;     // are its blocks, which share tiles where K is split, for results of 16 bits
  int share = 1;               // blocks of a cluster that load x for each other
  bool windows = false;        // on images are the rows of x
  bool direct = false;         // of direct.cuh, for no more rows of x than its tile has
  cudaError_t (*prepare)(bool& fits) = nullptr;
  cudaError_t (*launch)(BlockScaledMm const&, int split, Submit const&) = nullptr;
};

// How persistent blocks share the steps of all tiles, one tile's after the other's: as many tiles each, or as many
// steps. A stream is of `together` clusters that go through as many neighbouring tiles at once, which have the same
// weights; a tile is that of a cluster.
struct Streams {
  int count, together, share;
  unsigned tiles, steps;  // that all streams have, one after the other; of a tile
  bool share_tiles;

  constexpr unsigned begin(int stream) const {
    uint64_t const all = share_tiles ? uint64_t(tiles) * steps : tiles;
    return unsigned(stream * all / count) * (share_tiles ? 1 : steps);
  }
  constexpr int blocks() const { return count * together * share; }
  constexpr int64_t flags() const { return ceil_div(blocks(), 2) * 2; }  // what follows starts at 16 bytes
  // Of workspace, where they share tiles: flags of 8 bytes, and the sums of a tile from each block.
  constexpr int64_t bytes(int sums_of_tile) const {
    return share_tiles ? 8 * flags() + int64_t(4) * blocks() * sums_of_tile : 0;
  }
};

constexpr int kBand = 8;  // tiles of x that are neighbours, of all weights
inline int64_t count_tiles(Instance const& i, BlockScaledMm const& p) {
  return ceil_div(p.m, i.tile_m) * ceil_div(p.n, i.rows * i.share) * p.batch;
}
inline Streams streams_of(Instance const& i, BlockScaledMm const& p, int split, Gpu const& gpu) {
  constexpr int64_t kLeast = 4;  // steps, for which a block is worth its sums' way
  int64_t const steps = ceil_div(p.k, i.step), tiles_m = ceil_div(p.m, i.tile_m);
  int const slots = gpu.sms_in_clusters(i.share) / i.share * i.blocks_per_sm;
  int together = int(std::clamp<int64_t>(tiles_m, 1, kBand));
  while (slots % together != 0 || tiles_m % together != 0 || (tiles_m > kBand && kBand % together != 0)) --together;
  int64_t const tiles = count_tiles(i, p) / together, most = split == 1 ? tiles : ceil_div(tiles * steps, kLeast);
  return {
      int(std::min<int64_t>(slots / together, most)), together, i.share, unsigned(tiles), unsigned(steps), split > 1};
}

// How many blocks share K, none without a step, where it is split over up to `split`.
inline int count_parts(BlockScaledMm const& p, int step, int split) {
  int64_t const steps = std::max<int64_t>(1, ceil_div(p.k, step));
  return int(ceil_div(steps, ceil_div(steps, split)));
}
inline int64_t sums_of_part(BlockScaledMm const& p) { return int64_t(p.batch) * p.m * p.n; }

// The kernel that adds the sums of all parts (add_parts.cu).
cudaError_t prepare_add_parts();
cudaError_t add_parts(BlockScaledMm const& problem, int parts, Submit const& submit);

cudaError_t prepare_dequantize_weights();

// In a source for each.
template <DType In, int kBits>
void add_instances(std::vector<Instance>& to);
void add_f32_instances(std::vector<Instance>& to);
template <DType In>
void add_wgmma_instances(std::vector<Instance>& to);
void add_wgmma_windows(std::vector<Instance>& to);

}  // namespace jax_qmm::block_scaled
