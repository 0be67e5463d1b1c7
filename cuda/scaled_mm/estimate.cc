// The cost model of GPUs that nothing was measured on: the time of a kernel from the description of the GPU. Its
// numbers are the hardware's or, as said, rough ones that no measurement stands behind; `tune` measures.
//
// Those marked (H200) fit what the multistage kernels' PTX took on an H200, benchmarks/h200/portable_kernels.csv.gz: of
// 88 products the kernel that is chosen takes 1.01 times the fastest's time in the geometric mean and 1.19 times at
// most, and its time is predicted to 6 % (root mean square).
#include <algorithm>
#include <cmath>

#include "core/archs.h"
#include "scaled_mm/instances.h"
#include "scaled_mm/resident.h"

namespace jax_qmm {
namespace {

double cube(double x) { return x * x * x; }

// All of a product's bytes once, by a copy.
double copying(ScaledMm const& p, Gpu const& gpu) {
  double const m = p.m, n = p.n, k = p.k;
  return p.batch * (m * k + n * k + m * n * bytes_of(p.out_dtype)) / gpu.copy_rate;
}

// A block has all loads of a K tile on their way at once: the time of one round trip to memory.
double skinny(Instance const& i, ScaledMm const& p, Gpu const& gpu) {
  constexpr double kRoundTrip = 1e-6;
  constexpr double kLaunch = 3e-6;  // of which most are the way to the first bytes and from the last ones
  double const blocks = double(ceil_div(p.n, i.tile_m)) * p.batch;
  double const waves = std::ceil(blocks / (gpu.sm_count * i.blocks_per_sm));
  double const turns = waves * ceil_div(p.k, i.tile_k) * kRoundTrip;
  return kLaunch + std::cbrt(cube(turns) + cube(copying(p, gpu)));
}

double multistage(Instance const& i, ScaledMm const& p, Gpu const& gpu) {
  constexpr double kLaunch = 3.4e-6;         // (H200)
  constexpr double kReached = 0.91;          // (H200) of the tensor cores' rate, where nothing else is in the way
  constexpr double kOfWgmma = 0.633;         // (H200) of the rate of Hopper's, by mma.sync
  constexpr double kStep = 60, kStage = 60;  // least cycles of a step of K, and of a stage with its barrier
  constexpr double kRoundTrip = 0.95e-6;     // (H200) seconds from a copy's start until its stage is there
  constexpr double kFewRows = 2;             // (H200) times as long with up to 8 rows, which all blocks read at once
  constexpr double kEnds = 1470;             // (H200) cycles of a tile before its first product and after its last,
  constexpr double kEndOfSum = 0.098;        // (H200) and for each of its sums
  constexpr double kReading = 1.03;          // (H200) the time of all bytes, against a copy's
  constexpr double kL2 = 64;                 // bytes of L2 that an SM gets in a cycle,
  constexpr double kSums = 9.4;              // (H200) and of parts' sums
  constexpr double kSecond = 1.65e-6;        // (H200) seconds of the kernel that adds up parts of K, without its bytes
  double const m = i.tile_m, n = i.tile_n, k = i.tile_k, rows = m + n;
  // Cycles of a K tile in an SM, whoever else is there. float16 has half the rate of 8 bits, and making a word of it
  // from what warps load of 8 bits takes about 6 instructions, which the SM has 64 lanes for.
  double const slices = i.warps / double(i.warps_m * i.warps_n);
  double const fragments = i.warps * (m / i.warps_m + n / i.warps_n) * k / slices;  // bytes
  bool const widened = i.in == DType::kF8E4M3 && (i.accum == Accum::kFull || compiled_for(gpu.arch) < 89);
  double const rate = kReached * gpu.peak * (gpu.arch == 90 ? kOfWgmma : 1);
  double const products = m * n * k / (rate / 2 / gpu.sm_count / gpu.clock);
  double const multiplying = widened ? 2 * products + fragments / 2 * 6 / 64 : products;
  double const busy = std::max(std::cbrt(cube(multiplying) + cube((fragments + rows * k) / 128)), rows * k / kL2);
  // Of a block alone, however fast the rest is: all stages but one are on their way, or without cp.async none.
  double const filling = kRoundTrip * gpu.clock * (p.m <= 8 ? kFewRows : 1);
  double const waiting = compiled_for(gpu.arch) < 80 ? filling + multiplying : filling / (i.stages - 1);
  double const least = std::max(kStage + k / 32 / slices * kStep, waiting);

  double const threads = 32.0 * i.warps, sums = m * n / (32.0 * i.warps_m * i.warps_n);
  double const of_shared = std::floor(gpu.shared_memory / (i.stage_bytes() + 1024.0) + 0.02);
  double const of_registers = std::floor(65536 / (threads * (sums + 100)));
  double const together = std::max(1.0, std::min(of_shared, of_registers));  // blocks of an SM
  double const of_each = std::ceil(double(count_clusters(i, p)) * i.split / gpu.sm_count);
  double const waves = std::floor(of_each / together), rest = of_each - waves * together;
  auto const wave = [&](double blocks) {
    return blocks > 0
               ? ceil_div(ceil_div(p.k, i.tile_k), i.split) * std::max(blocks * busy, least) + kEnds + kEndOfSum * m * n
               : 0;
  };
  double const computing = (waves * wave(together) + wave(rest)) / gpu.clock;
  // Partial sums are written and read once, in L2.
  double const adding = i.split > 1 ? kSecond + 2.0 * workspace_of(i, p) / (kSums * gpu.sm_count * gpu.clock) : 0;
  return kLaunch + std::cbrt(cube(computing) + cube(kReading * copying(p, gpu))) + adding;
}

double resident_b(Instance const& i, ScaledMm const& p, Gpu const& gpu) {
  int64_t const joined = resident::rows_joined(p.m, p.n, p.k, i.tile_k), steps = ceil_div(joined * p.k, i.tile_k);
  return resident::predict(p.m / joined, joined * p.n, steps, i.tile_k, copying(p, gpu), gpu);
}

}  // namespace

double estimate_time(Instance const& i, ScaledMm const& p, Gpu const& gpu) {
  if (i.schedule == Schedule::kSkinny) return 1e6 * skinny(i, p, gpu);
  return 1e6 * (i.schedule == Schedule::kResidentB ? resident_b(i, p, gpu) : multistage(i, p, gpu));
}

}  // namespace jax_qmm
