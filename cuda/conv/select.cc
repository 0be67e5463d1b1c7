// Choosing a kernel by its predicted time, preparing all of them, and launching one.
#include <algorithm>
#include <cmath>
#include <utility>

#include "conv/instances.h"
#include "conv/short_window.h"
#include "core/archs.h"
#include "core/prepared_kernels.h"
#include "scaled_mm/resident.h"

namespace jax_qmm {
namespace conv {
namespace {

std::vector<Instance> const& instances() {
  static std::vector<Instance> const all = [] {
    std::vector<Instance> found;
    add_implicit_gemm(found);
    add_short_window(found);
    add_depthwise_square(found);
    add_depthwise(found);
#ifdef JAX_QMM_SM90
    add_wgmma(found);
    add_resident(found);
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

// Seconds, as predicted from the description of the GPU. The constants of Hopper's kernels are fitted to their times in
// benchmarks/h200/conv_kernels.csv.
double estimate_wgmma(Instance const& i, Conv const& p, Gpu const& gpu) {
  // Cycles of all blocks, of each beside its stages, and more of two that share weights.
  constexpr double kLaunch = 3470, kBlock = 1790, kPair = 3940;
  constexpr double kL2 = 44.6, kPixel = 2.76;  // bytes of L2 an SM gets in a cycle; cycles for each pixel of a stage
  constexpr double kStage = 418, kRoundTrip = 2140;  // cycles that a stage takes at least, and to come
  constexpr double kRate = 0.894;                    // of the peak
  constexpr double kOutput = 0.382, kSend = 0.314;   // cycles for an output, and to send a sum to another block
  double const outputs = double(i.tile_m) * i.tile_n;
  double const clusters = double(ceil_div(p.m, i.tile_m * i.share)) * double(ceil_div(p.n / p.groups, i.tile_n));
  double const blocks = clusters * i.share * i.parts * p.groups * p.batch;
  double const on_sm = std::min<double>(i.blocks_per_sm, std::ceil(blocks / gpu.sm_count));
  double const waves = std::ceil(blocks / (gpu.sms_in_clusters(i.share * i.parts) * i.blocks_per_sm));
  double const stages = double(ceil_div(ceil_div(p.channels, i.tile_k) * p.taps[1] * p.taps[2], i.parts));
  double const multiplying = outputs * i.tile_k * 2 / (kRate * gpu.peak / gpu.sm_count / gpu.clock);
  double const reading = std::max((i.tile_m + double(i.tile_n) / i.share) * i.tile_k / kL2, i.tile_m * kPixel);
  double const busy = std::max(multiplying, reading);
  double const waiting = std::max(kStage, kRoundTrip / (i.stages - 1));
  double const finish = outputs * (kOutput / i.parts + (i.parts > 1 ? kSend : 0));
  double const alone = kBlock + (i.share > 1 ? kPair : 0) + stages * std::max(waiting, busy) + finish;
  return (kLaunch + waves * std::max(alone, on_sm * (stages * busy + finish))) / gpu.clock;
}

// Those of portable kernels are fitted to 16 times on an H100 and 12 on an H200.
double estimate_portable(Instance const& i, Conv const& p, Gpu const& gpu) {
  constexpr double kLaunch = 8.7e-6;     // seconds
  constexpr double kL2 = 37;             // bytes of L2 that an SM gets in a cycle
  constexpr double kStage = 270;         // cycles of a block that wait in each stage, in which another block may run
  constexpr double kIssue = 0.049 / 64;  // cycles for the instructions around a multiply-add
  constexpr double kOutput = 0.86;       // cycles for the epilogue of an output
  double const of_group = double(ceil_div(p.m, i.tile_m)) * double(ceil_div(p.n / p.groups, i.tile_n));
  double const tiles = of_group * p.groups * p.batch;
  double const waves = std::ceil(tiles / (gpu.sm_count * i.blocks_per_sm));
  double const on_sm = std::min<double>(i.blocks_per_sm, std::ceil(tiles / gpu.sm_count));
  double const outputs = double(i.tile_m) * i.tile_n, stages = double(ceil_div(p.k, i.tile_k)), k = stages * i.tile_k;
  double const multiplying = outputs * k * std::max(kIssue, 2 / (gpu.peak / gpu.sm_count / gpu.clock));
  double const busy = std::max(multiplying, (i.tile_m + i.tile_n) * k / kL2);
  double const cycles = std::max(stages * kStage + busy, on_sm * busy) + on_sm * outputs * kOutput;
  return kLaunch + waves * cycles / gpu.clock;
}

// Those of windows of few bytes are fitted to 33 times on an H200, which this predicts to 7 % (root mean square).
double estimate_short_window(Instance const& i, Conv const& p, Gpu const& gpu) {
  constexpr double kLaunch = 2.9e-6, kLoad = 0.26e-6;  // seconds: of all blocks, and for weights of each step
  constexpr double kLine = 84, kStep = 6;              // cycles of an SM for a line of a tile, and for each step of it
  short_window::Tiling const tiling = short_window::tiling(p, i.blocks_per_sm, gpu);
  double const blocks = double(tiling.blocks) * double(ceil_div(p.n, short_window::kTileN)) * p.batch;
  double const lines = double(tiling.turns) * (tiling.down + short_window::kBegin) * std::ceil(blocks / gpu.sm_count);
  int const steps = i.steps_of_window;
  return kLaunch + steps * kLoad + lines * (kLine + steps * kStep) / gpu.clock;
}

double estimate_time(Instance const& i, Conv const& p, Gpu const& gpu) {
  double const image_bytes = double(p.image[0]) * p.image[1] * p.image[2] * p.channels * p.groups;
  double const out_bytes = double(p.m) * p.n * bytes_of(p.out_dtype);
  double const residual_bytes = p.residual.data == nullptr ? 0 : double(p.m) * p.n * bytes_of(p.residual.dtype);
  double const bytes = p.images * image_bytes + double(p.n) * p.k + out_bytes + residual_bytes;
  double const from_memory = p.batch * bytes / gpu.copy_rate;
  if (i.is_depthwise) return from_memory;  // the table has the fastest first
  if (i.is_resident) {
    int64_t const steps = ceil_div(p.channels, i.tile_k) * p.taps[1] * p.taps[2];
    return resident::predict(p.m, p.n, steps, i.tile_k, from_memory, gpu);
  }
  if (i.steps_of_window > 0) return std::max(estimate_short_window(i, p, gpu), from_memory);
  return std::max(i.wgmma ? estimate_wgmma(i, p, gpu) : estimate_portable(i, p, gpu), from_memory);
}

}  // namespace
}  // namespace conv

using namespace conv;

std::vector<int> conv_choices(Conv const& p, Gpu const& gpu) {
  std::vector<int> found;
  if (compiled_for(gpu.arch) < Conv::kOldest) return found;
  for (int i = 0; i < int(instances().size()); ++i) {
    bool const is_wanted = instances()[i].words.find(wanted()) != std::string::npos;
    if (is_wanted && runs_on(gpu, i) && instances()[i].serves(p)) found.push_back(i);
  }
  return found;
}

std::optional<int> select_conv(Conv const& p, Gpu const& gpu) {
  std::optional<int> best;
  double least = 0;
  for (int const i : conv_choices(p, gpu)) {
    double const seconds = estimate_time(instances()[i], p, gpu);
    if (!best || seconds < least) best = i, least = seconds;
  }
  return best;
}

void restrict_conv(std::string words) { wanted() = std::move(words); }

std::string describe_conv(int instance) { return instances().at(instance).words; }

cudaError_t prepare_conv() { return prepared.prepare(instances(), runs_on); }

cudaError_t launch_conv(Conv const& p, int instance, Submit const& submit) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return cudaSuccess;
  return instances()[instance].launch(p, submit);
}

}  // namespace jax_qmm
