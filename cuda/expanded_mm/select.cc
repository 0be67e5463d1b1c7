// Choosing a kernel by its predicted time, preparing all of them, and launching one.
#include <algorithm>
#include <cmath>
#include <utility>

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
  return (!i.few_rows || p.m <= p.kFewRows) && (!i.wgmma || p.k > 0);  // TMA has no empty rows
}

// Seconds, as predicted from the description of the GPU. The constants are those of convolutions, which have the same
// main loops, but for kMake, which is counted in the machine code, and the plain epilogue of wgmma kernels. No time was
// measured.
double estimate_time(Instance const& i, ExpandedMm const& p, Gpu const& gpu) {
  constexpr double kMake = 2.6 / 128;  // cycles of an SM for the instructions around an int8
  constexpr double kL2 = 37;           // bytes of L2 that an SM gets in a cycle
  double const launch = i.wgmma ? 8300 : 8.7e-6 * gpu.clock, rate = i.wgmma ? 0.75 : gpu.arch == 90 ? 0.62 : 1;
  double const stage = i.wgmma ? 650 : 270, output = i.wgmma ? 0.2 : 0.9;  // cycles of a stage, and of an output
  double const tiles = double(ceil_div(p.m, i.tile_m)) * double(ceil_div(p.n, i.tile_n)) * p.batch;
  double const waves = std::ceil(tiles / (gpu.sm_count * i.blocks_per_sm));
  double const on_sm = std::min<double>(i.blocks_per_sm, std::ceil(tiles / gpu.sm_count));
  double const outputs = double(i.tile_m) * i.tile_n, stages = double(ceil_div(p.k, i.tile_k)), k = stages * i.tile_k;
  double const multiplying = outputs * k * 2 / (rate * gpu.peak / gpu.sm_count / gpu.clock);
  double const busy = std::max({multiplying, i.tile_n * k * kMake, (i.tile_m + i.tile_n / 2.0) * k / kL2});
  double const alone = i.wgmma ? std::max(stages * stage, busy) : stages * stage + busy;
  double const cycles = launch + waves * (std::max(alone, on_sm * busy) + on_sm * outputs * output);
  double const bytes = double(p.m) * p.k + double(p.n) * p.k / 2 + double(p.m) * p.n * bytes_of(p.out_dtype);
  return std::max(cycles / gpu.clock, p.batch * bytes / gpu.copy_rate);
}

}  // namespace
}  // namespace expanded

using namespace expanded;

std::vector<int> expanded_mm_choices(ExpandedMm const& p, Gpu const& gpu) {
  std::vector<int> found;
  for (int i = 0; i < int(instances().size()); ++i) {
    bool const is_wanted = instances()[i].words.find(wanted()) != std::string::npos;
    if (is_wanted && runs_on(gpu, i) && serves(instances()[i], p)) found.push_back(i);
  }
  return found;
}

std::optional<int> select_expanded_mm(ExpandedMm const& p, Gpu const& gpu) {
  std::vector<int> const choices = expanded_mm_choices(p, gpu);
  if (choices.empty()) return std::nullopt;
  // Of those for few rows the smallest tile that has all of them, or the largest.
  std::optional<int> few;
  for (int const i : choices) {
    if (instances()[i].few_rows && (!few || instances()[*few].tile_m < p.m)) few = i;
  }
  if (few) return few;
  auto const time = [&](int i) { return estimate_time(instances()[i], p, gpu); };
  return *std::min_element(choices.begin(), choices.end(), [&](int i, int j) { return time(i) < time(j); });
}

void restrict_expanded_mm(std::string words) { wanted() = std::move(words); }

std::string describe_expanded_mm(int instance) { return instances().at(instance).words; }

cudaError_t prepare_expanded_mm() { return prepared.prepare(instances(), runs_on); }

cudaError_t launch_expanded_mm(ExpandedMm const& p, int instance, Submit const& submit) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return cudaSuccess;
  return instances()[instance].launch(p, submit);
}

}  // namespace jax_qmm
