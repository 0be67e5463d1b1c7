// Choosing a kernel by its predicted time, preparing all of them, and launching one.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/few_rows.h"
#include "core/prepared_kernels.h"
#include "expanded_mm/instances.h"

namespace jax_qmm {
namespace expanded {
namespace {

std::vector<Instance> const& instances() {
  static std::vector<Instance> const all = [] {
    std::vector<Instance> found;
    add_few_rows(found);
    add_multistage(found);
#ifdef JAX_QMM_SM90
    add_wgmma(found);
    add_streams(found);
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

bool runs_on(Gpu const& gpu, int instance) {
  Instance const& i = instances()[instance];
  return i.shared_bytes <= gpu.shared_memory && (!i.wgmma || gpu.arch == 90) && prepared.can_run(gpu, instance);
}

bool serves(Instance const& i, ExpandedMm const& p) {
  if (i.serves != nullptr && !i.serves(p)) return false;
  return (!i.few_rows || p.m <= p.kFewRows) && (!i.wgmma || p.k > 0);  // TMA has no empty rows
}

// Cycles, as fitted to times on an H200, of programs of many products. Those for few rows have the slopes of an H100.
double measured_cycles(Instance const& i, ExpandedMm const& p, Gpu const& gpu) {
  constexpr double kLaunch = 3100, kLaunchFewRows = 4500;
  double const tiles = double(ceil_div(p.m, i.tile_m)) * double(ceil_div(p.n, i.tile_n)) * p.batch;
  double const steps = std::ceil(double(p.k) / i.tile_k / i.parts);
  if (i.few_rows) {
    FewRowsCycles const cycles{i.tile_cycles, i.step_cycles, i.busy_cycles};
    return kLaunchFewRows + cycles.of(tiles, steps, 0, i.blocks_per_sm, gpu.sm_count);
  }
  if (i.streams == nullptr) {
    double const waves = std::ceil(tiles * i.parts / gpu.sm_count);
    return kLaunch + waves * (i.tile_cycles + i.sharing_cycles + steps * i.step_cycles);
  }
  block_scaled::Streams const streams = i.streams(p, gpu);
  double const tiles_of_each = std::ceil(double(streams.tiles) / streams.count);
  if (!streams.share_tiles) return kLaunch + tiles_of_each * (i.tile_cycles + steps * i.step_cycles);
  // Sums go to memory once from each block, and come from those that have the rest of a tile.
  double const of_tile = 1 + std::ceil(double(streams.count) / streams.tiles);
  double const steps_of_each = double(streams.tiles) * streams.steps / streams.count;
  return kLaunch + i.tile_cycles + i.sharing_cycles * of_tile + steps_of_each * i.step_cycles;
}

// Seconds, as predicted from the description of the GPU. The constants are those of convolutions, which have the same
// main loop, but for kMake, which is counted in the machine code.
double multistage_time(Instance const& i, ExpandedMm const& p, Gpu const& gpu) {
  constexpr double kMake = 2.6 / 128;  // cycles of an SM for the instructions around an int8
  constexpr double kL2 = 37;           // bytes of L2 that an SM gets in a cycle
  constexpr double kStage = 270, kOutput = 0.9, kLaunch = 8.7e-6;
  double const tiles = double(ceil_div(p.m, i.tile_m)) * double(ceil_div(p.n, i.tile_n)) * p.batch;
  double const waves = std::ceil(tiles / (gpu.sm_count * i.blocks_per_sm));
  double const on_sm = std::min<double>(i.blocks_per_sm, std::ceil(tiles / gpu.sm_count));
  double const outputs = double(i.tile_m) * i.tile_n, stages = double(ceil_div(p.k, i.tile_k)), k = stages * i.tile_k;
  double const multiplying = outputs * k * 2 / (gpu.peak / gpu.sm_count / gpu.clock);
  double const busy = std::max({multiplying, i.tile_n * k * kMake, (i.tile_m + i.tile_n / 2.0) * k / kL2});
  double const cycles = waves * (std::max(stages * kStage + busy, on_sm * busy) + on_sm * outputs * kOutput);
  double const bytes = double(p.m) * p.k + double(p.n) * p.k / 2 + double(p.m) * p.n * bytes_of(p.out_dtype);
  return kLaunch + std::max(cycles / gpu.clock, p.batch * bytes / gpu.copy_rate);
}

}  // namespace
}  // namespace expanded

using namespace expanded;

std::vector<int> expanded_mm_choices(ExpandedMm const& p, Gpu const& gpu) {
  std::vector<int> found;
  for (int i = 0; i < int(instances().size()); ++i) {
    bool const is_wanted = instances()[i].words.find(wanted()) != std::string::npos;
    if (!is_wanted || !runs_on(gpu, i) || !serves(instances()[i], p)) continue;
    if (workspace_of(p, i, gpu) <= p.workspace_bytes) found.push_back(i);
  }
  return found;
}

std::optional<int> select_expanded_mm(ExpandedMm const& p, Gpu const& gpu) {
  std::vector<int> const choices = expanded_mm_choices(p, gpu);
  auto const fastest = [&](bool measured, auto time) {
    std::optional<int> best;
    for (int const i : choices) {
      Instance const& each = instances()[i];
      bool const is_measured = each.few_rows || each.wgmma;
      if (is_measured == measured && (!best || time(each, p, gpu) < time(instances()[*best], p, gpu))) best = i;
    }
    return best;
  };
  if (auto const best = fastest(true, measured_cycles)) return best;
  return fastest(false, multistage_time);
}

void restrict_expanded_mm(std::string words) { wanted() = std::move(words); }

int64_t workspace_of(ExpandedMm const& p, int instance, Gpu const& gpu) {
  Instance const& i = instances().at(instance);
  return i.streams == nullptr ? 0 : i.streams(p, gpu).bytes(i.tile_m * i.tile_n);
}

std::string describe_expanded_mm(int instance) { return instances().at(instance).words; }

cudaError_t prepare_expanded_mm() { return prepared.prepare(instances(), runs_on); }

cudaError_t launch_expanded_mm(ExpandedMm const& p, int instance, Submit const& submit) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return cudaSuccess;
  return instances()[instance].launch(p, submit);
}

}  // namespace jax_qmm
