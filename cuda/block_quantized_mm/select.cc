// Choosing a kernel by its predicted time, preparing all of them, and launching one.
#include <algorithm>
#include <cmath>
#include <utility>

#include "block_quantized_mm/instances.h"
#include "core/prepared_kernels.h"

namespace jax_qmm {
namespace block_quantized {
namespace {

std::vector<Instance> const& instances() {
  static std::vector<Instance> const all = [] {
    std::vector<Instance> found;
    add_few_rows<DType::kS8, false>(found);
    add_few_rows<DType::kS8, true>(found);
    add_few_rows<DType::kF8E4M3, false>(found);
    add_instances<DType::kS8, false>(found);
    add_instances<DType::kS8, true>(found);
    add_instances<DType::kF8E4M3, false>(found);
#ifdef JAX_QMM_SM90
    add_wgmma_instances<DType::kS8, false>(found);
    add_wgmma_instances<DType::kS8, true>(found);
    add_wgmma_instances<DType::kF8E4M3, false>(found);
    add_persistent_instances<DType::kS8, false>(found);
    add_persistent_instances<DType::kS8, true>(found);
    add_persistent_instances<DType::kF8E4M3, false>(found);
#endif
    return found;
  }();
  return all;
}

std::string& wanted() {
  static std::string words;
  return words;
}

PreparedKernels prepared;

int64_t tiles_of(Instance const& i, BlockQuantizedMm const& p) {
  return ceil_div(p.m, i.tile_m) * ceil_div(p.n, i.tile_n) * p.batch;
}

bool runs_on(Gpu const& gpu, int instance) {
  Instance const& i = instances()[instance];
  return i.shared_bytes <= gpu.shared_memory && (!i.wgmma || gpu.arch == 90) && prepared.can_run(gpu, instance);
}

bool serves(Instance const& i, BlockQuantizedMm const& p) {
  // Rows that TMA can load, and whole loads.
  uintptr_t const addresses = reinterpret_cast<uintptr_t>(p.a) | reinterpret_cast<uintptr_t>(p.b);
  bool const in_sixteens = p.k % 16 == 0 && addresses % 16 == 0;
  if (i.wgmma && (p.k == 0 || !in_sixteens)) return false;
  if (i.few_rows && (p.m > p.kFewRows || !in_sixteens)) return false;
  if (i.persistent && !p.stores_whole()) return false;  // by TMA
  if (i.of_a_alone && p.of_b.zero_point.data != nullptr) return false;
  if (i.shared_b && p.of_b.scale.shift == 0) return false;
  if (p.m <= i.tile_m * (i.share - 1)) return false;  // the last block of each cluster would have no rows
  if (i.parts > 1 && ceil_div(p.groups(), kBlocksOfSlot) < i.parts) return false;
  return i.in == p.in && i.zero_points == p.has_zero_points() && i.shortest <= p.block && p.block <= i.longest;
}

struct Costs {
  double launch;          // seconds
  double tile;            // cycles of a tile beside its steps,
  double step, columns;   // and of a step of so many columns at least
  double rate;            // of the tensor cores' peak
  double scaling, alone;  // operations for an output of a block, and how many times as long in the only block of an SM
  double l2 = 30;         // bytes of L2 that an SM gets in a cycle
};

// Fitted to 2843 times on an H200, of one to 4096 rows by 11 weights: tests/benchmarks/test_block_quantized_mm.py has
// how near the choices are. Whether older GPUs are like that is not measured.
Costs costs_of(Instance const& i, Gpu const& gpu) {
  bool const shifted = i.zero_points;
  if (i.wgmma) {
    double const step = (shifted ? 345 : 257) * (i.tile_m == 16 ? 1.31 : 1);
    return {0.4e-6, 4900, step, 128, 0.466, shifted ? 2.33 : 1.19, 5, 35};
  }
  // Of a peak that on Hopper is wgmma's.
  double const rate = (gpu.arch == 90 ? 0.28 : 0.44) / (i.in == DType::kF8E4M3 ? 1.75 : 1);
  return {3e-6, 1950, 790, 64, rate, shifted ? 24.4 : 6, 1};
}

// Fitted to 103 times on an H200, which they predict to 4 % in the mean.
struct PersistentCosts {
  double launch;              // seconds
  double tile, stage, block;  // cycles of a tile beside its stages, of a stage of 128 columns, and to scale a block
};

PersistentCosts costs_of_persistent(Instance const& i) {
  double const block = i.shared_b ? (i.share > 1 ? 224 : 243) : !i.zero_points ? 544 : i.of_a_alone ? 936 : 1300;
  return {1.9e-6, 2245, 600, block};
}

// Seconds, as predicted from the description of the GPU.
double estimate_time(Instance const& i, BlockQuantizedMm const& p, Gpu const& gpu) {
  if (i.few_rows) {
    constexpr double kLaunch = 365, kScaling = 0.21;  // cycles: in all, and for each output and block
    double const tiles = double(tiles_of(i, p));
    double const steps = double(ceil_div(p.k, i.tile_k));
    double const scaling = kScaling * (i.zero_points ? 1.3 : 1) * i.tile_m * i.tile_n * p.groups();
    return (kLaunch + i.few_rows->of(tiles, steps, scaling, i.blocks_per_sm, gpu.sm_count)) / gpu.clock;
  }
  int64_t const of_part = ceil_div(ceil_div(p.groups(), kBlocksOfSlot), i.parts) * kBlocksOfSlot;
  double const groups = double(std::min<int64_t>(of_part, p.groups()));
  double const from_memory = double(p.batch) * (double(p.m) + p.n) * p.k / gpu.copy_rate;
  if (i.persistent) {
    auto const [launch, tile, stage, block] = costs_of_persistent(i);
    int64_t const clusters = ceil_div(p.m, int64_t(i.tile_m) * i.share) * ceil_div(p.n, i.tile_n) * p.batch;
    int const together = i.share * i.parts;
    double const tiles = std::ceil(double(clusters) * together / gpu.sms_in_clusters(together));
    double const stages = std::ceil(std::min<double>(groups * p.block, p.k) / 128);
    double const sending = i.parts > 1 ? 3000 : 0;    // cycles, as for 33 products that share K
    double const launches = i.parts > 1 ? tiles : 1;  // blocks with a part of K do not stay
    double const cycles = tiles * (tile + stages * stage + groups * block + sending);
    return std::max(launches * launch + cycles / gpu.clock, from_memory);
  }
  constexpr double kFloats = 128;  // operations on outputs that an SM starts in a cycle
  Costs const costs = costs_of(i, gpu);
  constexpr double kParts = 4500, kSum = 0.04;  // cycles to meet the other parts of K, and to send them a sum
  double const blocks = double(tiles_of(i, p)) * i.parts;
  double const waves = std::ceil(blocks / (gpu.sm_count * i.blocks_per_sm));
  double const on_sm = std::min<double>(i.blocks_per_sm, std::ceil(blocks / gpu.sm_count));  // those of K lie apart
  double const outputs = double(i.tile_m) * i.tile_n, k = std::min<double>(groups * p.block, p.k);
  double const multiplying = outputs * k * 2 / (costs.rate * gpu.peak / gpu.sm_count / gpu.clock);
  double const scaling = outputs * groups * costs.scaling / kFloats;
  double const reading = (double(i.tile_m) + i.tile_n) * k / costs.l2;
  double const alone = k / costs.columns * costs.step + costs.alone * scaling;
  double const sending = i.parts > 1 ? kParts + kSum * outputs : 0;
  double const cycles = costs.tile + sending + std::max(alone, on_sm * std::max(multiplying + scaling, reading));
  return std::max(costs.launch + waves * cycles / gpu.clock, from_memory);
}

}  // namespace
}  // namespace block_quantized

using namespace block_quantized;

std::vector<int> block_quantized_mm_choices(BlockQuantizedMm const& p, Gpu const& gpu) {
  std::vector<int> found;
  for (int i = 0; i < int(instances().size()); ++i) {
    bool const is_wanted = describe_block_quantized_mm(i).find(wanted()) != std::string::npos;
    if (is_wanted && runs_on(gpu, i) && serves(instances()[i], p)) found.push_back(i);
  }
  return found;
}

std::optional<int> select_block_quantized_mm(BlockQuantizedMm const& p, Gpu const& gpu) {
  std::optional<int> best;
  double least = 0;
  for (int const i : block_quantized_mm_choices(p, gpu)) {
    double const seconds = estimate_time(instances()[i], p, gpu);
    if (!best || seconds < least) best = i, least = seconds;
  }
  return best;
}

void restrict_block_quantized_mm(std::string words) { wanted() = std::move(words); }

std::string describe_block_quantized_mm(int instance) {
  Instance const& i = instances().at(instance);
  std::string const tile = std::to_string(i.tile_m) + "x" + std::to_string(i.tile_n);
  std::string const cluster = i.share > 1 ? " cluster " + std::to_string(i.share) : "";
  std::string const persistent = i.persistent ? " persistent" : "";
  std::string const zero_points = !i.zero_points  ? ""
                                  : !i.persistent ? " zero points"
                                  : i.of_a_alone  ? " zero points of a"
                                                  : " zero points of both";
  std::string const split = i.parts > 1 ? " split-K " + std::to_string(i.parts) : "";
  std::string const kind = i.few_rows ? "sm80 few rows " + tile + "x" + std::to_string(i.tile_k)
                           : i.wgmma  ? "sm90 wgmma " + tile + "x128" + cluster + persistent + split
                                      : "sm80 multistage " + tile + "x64";
  return kind + " " + dtype_name(i.in) + (i.shared_b ? " of 128 rows" : "") +
         (i.longest == 32 ? " scaled each 32" : " scaled by block") + zero_points;
}

cudaError_t prepare_block_quantized_mm() { return prepared.prepare(instances(), runs_on); }

cudaError_t launch_block_quantized_mm(BlockQuantizedMm const& p, int instance, Submit const& submit) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return cudaSuccess;
  return instances()[instance].launch(p, submit);
}

}  // namespace jax_qmm
