// Choosing a kernel by its predicted time, preparing all of them, and launching one.
#include <algorithm>
#include <cmath>
#include <limits>

#include "block_scaled_mm/instances.h"
#include "core/archs.h"
#include "core/prepare.h"

namespace jax_qmm {
namespace block_scaled {
namespace {

constexpr int kOldest = 80;  // compute capability 8.0, the first with tensor cores for bfloat16

std::vector<Instance> const& instances() {
  static std::vector<Instance> const all = [] {
    std::vector<Instance> found;
    add_instances<DType::kBF16, 4>(found);
    add_instances<DType::kBF16, 8>(found);
    add_instances<DType::kF16, 4>(found);
    add_instances<DType::kF16, 8>(found);
    add_f32_instances(found);
    return found;
  }();
  return all;
}

bool serves(Instance const& i, BlockScaledMm const& p) {
  if (i.in != p.in || i.bits != p.bits || (p.block < p.k && p.block % i.unit != 0)) return false;
  return i.in == DType::kF32 ? p.m <= i.tile_m : i.float_zero_points == p.float_zero_points();
}

// Seconds, as predicted from the description of the GPU; no measurement stands behind the numbers.
double estimate_time(Instance const& i, BlockScaledMm const& p, Gpu const& gpu) {
  constexpr double kRoundTrip = 1e-6;  // from asking memory for a step's weights to having them
  constexpr double kL2 = 40;           // bytes of L2 that an SM gets in a cycle
  double const tiles_m = double(ceil_div(p.m, i.tile_m)), tiles_n = double(ceil_div(p.n, i.rows));
  double const cycles = gpu.sm_count * gpu.clock;  // of all SMs
  double const waves = std::ceil(tiles_m * tiles_n * p.batch / (gpu.sm_count * i.blocks_per_sm));
  double const turns = waves * double(ceil_div(p.k, i.step)) * kRoundTrip;
  // Memory has the weights to read once, and L2 what every block reads.
  double const weights = double(p.batch) * p.n * p.row_bytes(), x = double(p.batch) * p.m * p.k * bytes_of(p.in);
  double const reading = std::max(weights / gpu.copy_rate, (weights * tiles_m + x * tiles_n) / (kL2 * cycles));
  // Warp-level tensor cores multiply 16 bits at half the rate of 8. Before that weights become 16 bits, in about 2
  // instructions each, for which an SM has 128 lanes, and after it sums are scaled.
  double const tiles = tiles_m * tiles_n * i.rows * double(p.k) * p.batch;  // of one weight by all rows of x of a tile
  double const multiplying = 2 * tiles * i.tile_m / (gpu.peak / 2);
  double const preparing = tiles * (2 + double(i.tile_m) / i.unit) / (128 * cycles);
  auto const cube = [](double seconds) { return seconds * seconds * seconds; };
  return std::cbrt(cube(turns) + cube(reading) + cube(multiplying + preparing));
}

}  // namespace
}  // namespace block_scaled

using namespace block_scaled;

std::optional<int> select_block_scaled_mm(BlockScaledMm const& p, Gpu const& gpu) {
  std::optional<int> best;
  if (compiled_for(gpu.arch) < kOldest) return best;
  double best_time = std::numeric_limits<double>::infinity();
  for (int i = 0; i < int(instances().size()); ++i) {
    Instance const& instance = instances()[i];
    if (!serves(instance, p)) continue;
    double const time = estimate_time(instance, p, gpu);
    if (best && time >= best_time) continue;
    best = i;
    best_time = time;
  }
  return best;
}

std::string describe_block_scaled_mm(int kernel) {
  Instance const& i = instances().at(kernel);
  auto const text = [](int number) { return std::to_string(number); };
  std::string const words = "sm80 " + text(i.tile_m) + "x" + text(i.rows) + "x" + text(i.step) + " int" + text(i.bits);
  if (i.in == DType::kF32) return words + " weights by float32";
  return words + " weights scaled each " + text(i.unit) + (i.float_zero_points ? " float zero points" : "");
}

cudaError_t prepare_block_scaled_mm() {
  static OncePerDevice once;
  return once([] {
    Gpu const* gpu;
    if (cudaError_t const error = current_gpu(gpu)) return error;
    if (compiled_for(gpu->arch) < kOldest) return cudaSuccess;
    for (Instance const& i : instances()) {
      bool fits;
      if (cudaError_t const error = i.prepare(fits)) return error;
    }
    return cudaSuccess;
  });
}

cudaError_t launch_block_scaled_mm(BlockScaledMm const& p, int kernel, Submit const& submit) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return cudaSuccess;
  return instances()[kernel].launch(p, submit);
}

}  // namespace jax_qmm
