// Kernels whose blocks keep their columns of b in shared memory (resident.cuh), as far as choosing one depends on it.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/gpu.h"
#include "core/launch.h"

namespace jax_qmm::resident {

constexpr int kTileM = 64, kTileN = 64;
constexpr int kWarpgroups = 4;  // that multiply, each another tile
// For b, for the terms and barriers, which are kFixed at most, and for the stages of each warpgroup.
constexpr int kSharedMemory = 227 * 1024, kFixed = 4096, kLeastStages = 3, kMostStages = 16;

// Stages of a warpgroup, for so many steps of K of so many bytes.
inline int stages(int64_t steps, int tile_k) {
  int64_t const left = kSharedMemory - kFixed - steps * kTileN * tile_k;
  return int(std::clamp<int64_t>(left / (kWarpgroups * kTileM * tile_k), 0, kMostStages));
}

// How many blocks have the same columns.
inline int64_t blocks_of_columns(int64_t m, int64_t n, Gpu const& gpu) {
  int64_t const tiles = std::max<int64_t>(1, ceil_div(n, kTileN));  // of an empty product, which is estimated too
  return std::clamp<int64_t>(gpu.sm_count / tiles, 1, std::max<int64_t>(1, ceil_div(m, kTileM * kWarpgroups)));
}

// Seconds, of which a copy of all bytes takes so many. Fitted to 62 times on an H200, which it predicts to 6 % (root
// mean square): benchmarks/h200/resident_kernels.csv.
inline double predict(int64_t m, int64_t n, int64_t steps, int tile_k, double copying, Gpu const& gpu) {
  constexpr double kLaunch = 4.2e-6;
  constexpr double kTurn = 2050, kStep = 284;  // cycles of a tile for each warpgroup of an SM, and of their steps,
  constexpr double kL2 = 62;                   // which read so many bytes a cycle
  double const turns = double(ceil_div(m, kTileM * kWarpgroups * blocks_of_columns(m, n, gpu)));
  double const waves = double(ceil_div(ceil_div(n, kTileN), gpu.sm_count));
  double const cycles = kTurn + double(steps) * (kStep + kWarpgroups * kTileM * tile_k / kL2);
  double const computing = kLaunch + turns * waves * cycles / gpu.clock;
  return std::cbrt(std::pow(computing, 3) + std::pow(copying, 3));
}

}  // namespace jax_qmm::resident
