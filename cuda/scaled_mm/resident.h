// Kernels whose blocks keep their columns of b in shared memory (resident.cuh), as far as choosing one depends on it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

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

constexpr double kTurn = 2050, kStep = 284;  // cycles of a tile for each warpgroup of an SM, and of their steps,
constexpr double kL2 = 62;                   // which read so many bytes a cycle
inline double cycles_of_turn(int64_t steps, int tile_k) {
  return kTurn + double(steps) * (kStep + kWarpgroups * kTileM * tile_k / kL2);
}

// How many neighbouring rows of a matrix are taken for one of as many times the length, whose results lie as those of
// the rows do: of the numbers with which TMA can load the rows, the one that leaves the least of tiles empty. Then b is
// the matrix that has it as blocks on its diagonal. 0 where there is none.
inline int rows_joined(int64_t m, int64_t n, int64_t k, int tile_k) {
  int best = 0;
  double least = 0;
  for (int rows : {1, 2, 4}) {
    int64_t const steps = ceil_div(rows * k, tile_k);
    bool const fits = stages(steps, tile_k) >= kLeastStages && rows * n <= INT32_MAX;
    if (!fits || m % rows != 0 || n % 16 != 0 || rows * k % 16 != 0) continue;
    double const cycles = double(ceil_div(rows * n, kTileN)) * cycles_of_turn(steps, tile_k) / rows;
    if (best == 0 || cycles < least) best = rows, least = cycles;
  }
  return best;
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
  double const turns = double(ceil_div(m, kTileM * kWarpgroups * blocks_of_columns(m, n, gpu)));
  double const waves = double(ceil_div(ceil_div(n, kTileN), gpu.sm_count));
  double const computing = kLaunch + turns * waves * cycles_of_turn(steps, tile_k) / gpu.clock;
  return std::cbrt(std::pow(computing, 3) + std::pow(copying, 3));
}

}  // namespace jax_qmm::resident
