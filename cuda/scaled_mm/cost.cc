// The cost model: how long each kernel takes for a product, from costs that were measured on each model of GPU.
#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <shared_mutex>

#include "scaled_mm/instances.h"

namespace jax_qmm {
namespace {

using Costs = std::vector<std::optional<ScaledMmCost>>;  // by instance

struct Model {
  Gpu gpu;
  Costs costs;
};
std::shared_mutex mutex;
std::vector<Model> models;

Model const* find(Gpu const& gpu) {
  Model const* like = nullptr;
  for (Model const& model : models) {
    if (model.gpu.model() == gpu.model()) return &model;
    if (like == nullptr && model.gpu.arch == gpu.arch) like = &model;
  }
  return like;
}

// None where this is not to be chosen.
std::optional<ScaledMmTerms> terms_of(Instance const& i, ScaledMm const& problem, Gpu const& gpu) {
  if (!serves(i, problem)) return std::nullopt;
  // Of one-tile kernels with several rows of tiles: with more, persistent ones are faster on almost all products.
  int constexpr kMostWaves = 3;
  ScaledMm const p = i.persistent() ? sm90::overlap_tiles(problem, i.rows_of_a(), gpu.l2_bytes) : problem;
  int const cluster = i.cluster_m * i.cluster_n * i.split;
  int const sms = gpu.sms_in_clusters(cluster);
  double const waves = ceil_div(count_clusters(i, p), std::max(1, sms * i.blocks_per_sm / cluster));
  bool const several_rows = p.m > i.rows_of_a();
  if (i.schedule == Schedule::kOneTile && several_rows && waves > kMostWaves) return std::nullopt;
  double const bytes = double(problem.batch) *
                       (double(problem.m) * p.k + double(p.n) * p.k + double(problem.m) * p.n * bytes_of(p.out_dtype));
  return ScaledMmTerms{waves, double(ceil_div(p.k, i.tile_k * i.split)), bytes / (gpu.copy_rate * 1e-6)};
}

// Microseconds of a wave of tiles. Pingpong kernels apply the full epilogue while they multiply the next tile, one
// warpgroup at a time: it shows where K is short, and at the last tile.
double wave_us(Instance const& i, ScaledMmCost const& cost, double k_tiles) {
  double const products = k_tiles * cost.k_tile;
  if (!i.full_epilogue) return products + cost.tile;
  if (i.schedule == Schedule::kPingpong) return std::max(products + cost.tile, cost.full_tile);
  return products + cost.full_tile;
}

constexpr double kLastEnd = 1.5;  // microseconds, of a pingpong kernel's last tile

// Microseconds: waves of tiles that read and multiply, beside the reading of the operands by the whole chip.
double predict(Instance const& i, ScaledMmCost const& cost, ScaledMmTerms const& t) {
  auto const cube = [](double x) { return x * x * x; };
  double const last = i.full_epilogue && i.schedule == Schedule::kPingpong ? kLastEnd : 0;
  return cost.launch + last + std::cbrt(cube(t.waves * wave_us(i, cost, t.k_tiles)) + cube(t.copy_us * cost.reading));
}

}  // namespace

void set_scaled_mm_cost(Gpu const& gpu, DType in, std::string const& kernel, ScaledMmCost cost) {
  std::unique_lock lock(mutex);
  auto model = std::find_if(models.begin(), models.end(), [&](Model const& m) { return m.gpu.model() == gpu.model(); });
  if (model == models.end()) model = models.insert(model, {gpu, Costs(instances().size())});
  for (size_t i = 0; i < instances().size(); ++i) {
    Instance plain = instances()[i];
    plain.full_epilogue = false;
    if (plain.in == in && describe(plain) == kernel) model->costs[i] = cost;
  }
  forget_choices();
}

std::string scaled_mm_costs_of(Gpu const& gpu) {
  std::shared_lock lock(mutex);
  Model const* const model = find(gpu);
  return model ? model->gpu.name : "";
}

std::vector<double> predict_times(ScaledMm const& problem, Gpu const& gpu) {
  std::vector<double> times(instances().size(), std::numeric_limits<double>::infinity());
  std::shared_lock lock(mutex);
  Model const* const model = find(gpu);
  for (size_t i = 0; i < times.size(); ++i) {
    if (model && model->costs[i]) {
      if (auto const terms = terms_of(instances()[i], problem, gpu))
        times[i] = predict(instances()[i], *model->costs[i], *terms);
    } else if ((!model || instances()[i].estimated()) && serves(instances()[i], problem) &&
               may_choose(gpu, int(i), alignment(problem))) {
      times[i] = estimate_time(instances()[i], problem, gpu);
    }
  }
  return times;
}

double predict_scaled_mm(ScaledMm const& p, ScaledMmChoice choice, Gpu const& gpu) {
  bool const known = choice.instance >= 0 && choice.instance < int(instances().size());
  if (!known || choice.swizzle != swizzle_for(instances()[choice.instance], p)) {
    return std::numeric_limits<double>::infinity();
  }
  return predict_times(p, gpu)[choice.instance];
}

std::optional<ScaledMmTerms> scaled_mm_terms(ScaledMm const& p, ScaledMmChoice choice, Gpu const& gpu) {
  if (choice.instance < 0 || choice.instance >= int(instances().size())) return std::nullopt;
  Instance const& instance = instances()[choice.instance];
  if (instance.estimated() || !may_choose(gpu, choice.instance, alignment(p))) return std::nullopt;
  return choice.swizzle == swizzle_for(instance, p) ? terms_of(instance, p, gpu) : std::nullopt;
}

}  // namespace jax_qmm
