// The cost model of GPUs that nothing was measured on: the time of a kernel from the description of the GPU. Its
// numbers are the hardware's or, as said, rough ones that no measurement stands behind; `tune` measures.
#include <algorithm>
#include <cmath>

#include "core/archs.h"
#include "scaled_mm/instances.h"

namespace jax_qmm {
namespace {

constexpr double kLaunch = 3e-6;  // seconds, of which most are the way to the first bytes and from the last ones

double cube(double x) { return x * x * x; }

// All of a product's bytes once, by a copy.
double copying(ScaledMm const& p, Gpu const& gpu) {
  double const m = p.m, n = p.n, k = p.k;
  return p.batch * (m * k + n * k + m * n * bytes_of(p.out_dtype)) / gpu.copy_rate;
}

// A block has all loads of a K tile on their way at once: the time of one round trip to memory.
double skinny(Instance const& i, ScaledMm const& p, Gpu const& gpu) {
  constexpr double kRoundTrip = 1e-6;
  double const blocks = double(ceil_div(p.n, i.tile_m)) * p.batch;
  double const waves = std::ceil(blocks / (gpu.sm_count * i.blocks_per_sm));
  double const turns = waves * ceil_div(p.k, i.tile_k) * kRoundTrip;
  return kLaunch + std::cbrt(cube(turns) + cube(copying(p, gpu)));
}

double multistage(Instance const& i, ScaledMm const& p, Gpu const& gpu) {
  constexpr double kReached = 0.85;          // of the tensor cores' rate, where nothing else is in the way
  constexpr double kStep = 60, kStage = 60;  // least cycles of a step of K, and of a stage with its barrier
  constexpr double kEnds = 3000;             // cycles of a tile before its first product and after its last
  constexpr double kL2 = 40;                 // bytes of L2 that an SM gets in a cycle
  double const m = i.tile_m, n = i.tile_n, k = i.tile_k, rows = m + n;
  // Cycles of a K tile in an SM, whoever else is there. float16 has half the rate of 8 bits, and making a word of it
  // from what warps load of 8 bits takes about 6 instructions, which the SM has 64 lanes for.
  double const slices = i.warps / double(i.warps_m * i.warps_n);
  double const fragments = i.warps * (m / i.warps_m + n / i.warps_n) * k / slices;  // bytes
  bool const widened = i.in == DType::kF8E4M3 && (i.accum == Accum::kFull || compiled_for(gpu.arch) < 89);
  double const products = m * n * k / (kReached * gpu.peak / 2 / gpu.sm_count / gpu.clock);
  double const multiplying = widened ? 2 * products + fragments / 2 * 6 / 64 : products;
  double const busy = std::max({multiplying, (fragments + rows * k) / 128, rows * k / kL2});
  // Of a block alone, however fast the rest is.
  double const least = kStage + k / 32 / slices * kStep;

  double const threads = 32.0 * i.warps, sums = m * n / (32.0 * i.warps_m * i.warps_n);
  double const of_shared = std::floor(gpu.shared_memory / (i.stages * rows * k + 1024) + 0.02);
  double const of_registers = std::floor(65536 / (threads * (sums + 100)));
  double const together = std::max(1.0, std::min(of_shared, of_registers));  // blocks of an SM
  double const of_each = std::ceil(double(count_clusters(i, p)) / gpu.sm_count);
  double const waves = std::floor(of_each / together), rest = of_each - waves * together;
  auto const wave = [&](double blocks) {
    return blocks > 0 ? ceil_div(p.k, i.tile_k) * std::max(blocks * busy, least) + kEnds : 0;
  };
  double const computing = (waves * wave(together) + wave(rest)) / gpu.clock;
  return kLaunch + std::cbrt(cube(computing) + cube(copying(p, gpu)));
}

}  // namespace

double estimate_time(Instance const& i, ScaledMm const& p, Gpu const& gpu) {
  return 1e6 * (i.schedule == Schedule::kSkinny ? skinny(i, p, gpu) : multistage(i, p, gpu));
}

}  // namespace jax_qmm
