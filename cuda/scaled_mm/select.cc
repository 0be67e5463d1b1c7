// Choosing one of the kernels for a product: what was measured to be the fastest, or else what the cost model predicts.
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

#include "scaled_mm/instances.h"
#include "scaled_mm/resident.h"
#include "scaled_mm/split_k.h"

namespace jax_qmm {

Accum accum_of(ScaledMm const& p) { return p.in == DType::kF8E4M3 && p.fast_accum ? Accum::kFast : Accum::kFull; }

int alignment(ScaledMm const& p) {
  auto address = [](void const* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  uintptr_t const in = address(p.a) | address(p.b) | uintptr_t(p.k);
  uintptr_t const out = address(p.out) | uintptr_t(p.n) * bytes_of(p.out_dtype);
  if (p.k == 0) return 1;
  if ((in | out) % 16 == 0) return 16;
  if (in % 4 != 0) return 1;
  return (address(p.a) | address(p.b) | out) % 16 == 0 ? 8 : 4;
}

// TMA reads and writes boxes whose rows start at multiples of 16 bytes.
bool suits(Instance const& i, int alignment) {
  int const least = i.schedule == Schedule::kMultistage ? 4 : i.schedule == Schedule::kResidentB ? 8 : 16;
  return alignment >= least;
}

bool may_choose(Gpu const& gpu, int instance, int alignment) {
  Instance const& i = instances()[instance];
#ifdef JAX_QMM_SM90  // whose kernels are faster
  if (gpu.arch == 90 && alignment == 16 && i.schedule == Schedule::kMultistage) return false;
#endif
  return suits(i, alignment) && runs_on(gpu, instance);
}

int64_t count_clusters(Instance const& i, ScaledMm const& p) {
  int const rows = i.swap ? p.n : p.m, columns = i.swap ? p.m : p.n;
  return ceil_div(ceil_div(rows, i.tile_m), i.cluster_m) * ceil_div(ceil_div(columns, i.tile_n), i.cluster_n) * p.batch;
}

int64_t workspace_of(Instance const& i, ScaledMm const& p) {
  return i.schedule == Schedule::kMultistage && i.split > 1 ? 4 * i.split * sm80::sums_of_part(p) : 0;
}

int64_t workspace_of(ScaledMm const& p, ScaledMmChoice choice) {
  return choice.instance < 0 ? 0 : workspace_of(instances()[choice.instance], p);
}

bool serves(Instance const& i, ScaledMm const& p) {
  int constexpr kMostBlocks = 65535;  // of a grid's second or third dimension; prefetch_l2 counts their threads
  bool const any_output = i.schedule == Schedule::kMultistage;
  if (i.in != p.in) return false;
  if (!any_output && (i.out_bytes != bytes_of(p.out_dtype) || i.full_epilogue != needs_full_epilogue(p))) return false;
  if (i.schedule == Schedule::kSkinny) return p.m <= i.tile_n && p.batch <= kMostBlocks;
  if (i.accum != accum_of(p)) return false;
  if (i.schedule == Schedule::kResidentB) {
    return p.batch == 1 && resident::rows_joined(p.m, p.n, p.k, i.tile_k) > 0;
  }
  if (workspace_of(i, p) > std::min(p.workspace_bytes, kMostWorkspace)) return false;
  if (i.schedule == Schedule::kMultistage) {
    return count_clusters(i, p) <= INT32_MAX / 1024 && i.split <= ceil_div(p.k, i.tile_k);
  }
  return i.schedule != Schedule::kOneTile || count_clusters(i, p) * i.cluster_m * i.cluster_n <= kMostBlocks;
}

// The grid is padded to whole squares of tiles, which costs more than the reuse gains unless it fits.
int swizzle_for(Instance const& i, ScaledMm const& p) {
  int constexpr kSquare = 8;
  bool const fits =
      ceil_div(p.m, i.tile_m) % (kSquare * i.cluster_m) == 0 && ceil_div(p.n, i.tile_n) % (kSquare * i.cluster_n) == 0;
  return i.persistent() && fits && !i.swap && p.m >= 4096 && p.n >= 8192 ? kSquare : 1;
}

namespace {

// Measured choices: for a model of GPU, operands and output of some kind and one N and K, by M.
using TuningKey = std::tuple<std::pair<std::string, int>, DType, Accum, int, bool, int, int, int>;

TuningKey tuning_key(ScaledMm const& p, Gpu const& gpu) {
  return {gpu.model(), p.in, accum_of(p), bytes_of(p.out_dtype), needs_full_epilogue(p), p.n, p.k, p.batch};
}

std::shared_mutex tuning_mutex;
std::map<TuningKey, std::map<int, ScaledMmChoice>> tuning;

// The next M that was measured, if that is not far, and its choice, if that serves.
std::optional<std::pair<int, ScaledMmChoice>> find_tuned(ScaledMm const& p, Gpu const& gpu) {
  std::shared_lock lock(tuning_mutex);
  auto const by_m = tuning.find(tuning_key(p, gpu));
  if (by_m == tuning.end()) return std::nullopt;
  auto const next = by_m->second.lower_bound(p.m);
  if (next == by_m->second.end() || 3LL * next->first >= 4LL * p.m) return std::nullopt;
  int const instance = next->second.instance;
  // Of another M it may be a kernel that does not serve this one.
  if (instance < 0 || (may_choose(gpu, instance, alignment(p)) && serves(instances()[instance], p))) return *next;
  return std::nullopt;
}

ScaledMmChoice select(ScaledMm const& p, Gpu const& gpu) {
  if (auto const tuned = find_tuned(p, gpu)) return tuned->second;
  ScaledMmChoice best{-1, 1};
  int const aligned = alignment(p);
  if (aligned == 1) return best;
  double best_time = std::numeric_limits<double>::infinity();
  std::vector<double> const times = predict_times(p, gpu);
  for (int i = 0; i < int(times.size()); ++i) {
    if (times[i] >= best_time || !may_choose(gpu, i, aligned)) continue;
    best = {i, swizzle_for(instances()[i], p)};
    best_time = times[i];
  }
  return best;
}

// All that `select` depends on, of a problem on one device.
using Shape = std::array<int64_t, 11>;

struct HashShape {
  size_t operator()(Shape const& shape) const {
    uint64_t hash = 0;
    for (int64_t i : shape) hash = (hash ^ uint64_t(i)) * 0x9e3779b97f4a7c15u, hash ^= hash >> 32;
    return hash;
  }
};

std::shared_mutex chosen_mutex;
std::unordered_map<Shape, ScaledMmChoice, HashShape> chosen;
std::atomic<int64_t> times_forgotten{0};  // changed while `chosen_mutex` is held

}  // namespace

ScaledMmChoice select_scaled_mm(ScaledMm const& p, Gpu const& gpu) {
  if (gpu.device < 0) return select(p, gpu);
  size_t constexpr kMostKept = 1 << 14;  // where shapes are symbolic, they may be of any number
  Shape const shape{gpu.device, int(p.in), int(p.out_dtype), p.fast_accum, needs_full_epilogue(p), p.m,
                    p.n,        p.k,       p.batch,          alignment(p), p.workspace_bytes};
  {
    std::shared_lock lock(chosen_mutex);
    if (auto const found = chosen.find(shape); found != chosen.end()) return found->second;
  }
  int64_t const before = times_forgotten;
  ScaledMmChoice const choice = select(p, gpu);
  std::unique_lock lock(chosen_mutex);
  if (times_forgotten != before) return choice;
  if (chosen.size() == kMostKept) chosen.clear();
  chosen[shape] = choice;
  return choice;
}

void forget_choices() {
  std::unique_lock lock(chosen_mutex);
  chosen.clear();
  ++times_forgotten;
}

bool suits_alignment(ScaledMm const& p, ScaledMmChoice choice) {
  return choice.instance < 0 || suits(instances()[choice.instance], alignment(p));
}

std::vector<ScaledMmChoice> scaled_mm_choices(ScaledMm const& p, Gpu const& gpu) {
  std::vector<ScaledMmChoice> choices{{-1, 1}};
  int const aligned = alignment(p);
  for (int i = 0; i < int(instances().size()); ++i) {
    Instance const& instance = instances()[i];
    if (!serves(instance, p) || !may_choose(gpu, i, aligned)) continue;
    choices.push_back({i, 1});
    if (instance.persistent() && !instance.swap) choices.push_back({i, 8});
  }
  return choices;
}

void check_scaled_mm_choice(ScaledMm const& p, ScaledMmChoice choice, Gpu const& gpu) {
  auto const known = scaled_mm_choices(p, gpu);
  if (std::find(known.begin(), known.end(), choice) == known.end()) {
    throw std::invalid_argument(describe_scaled_mm(choice) + " does not serve this product");
  }
}

void tune_scaled_mm(ScaledMm const& problem, ScaledMmChoice choice, Gpu const& gpu) {
  check_scaled_mm_choice(problem, choice, gpu);
  std::unique_lock lock(tuning_mutex);
  tuning[tuning_key(problem, gpu)][problem.m] = choice;
  forget_choices();
}

std::optional<int> tuned_scaled_mm(ScaledMm const& problem, Gpu const& gpu) {
  auto const tuned = find_tuned(problem, gpu);
  return tuned ? std::optional(tuned->first) : std::nullopt;
}

void clear_scaled_mm_tuning() {
  std::unique_lock lock(tuning_mutex);
  tuning.clear();
  forget_choices();
}

}  // namespace jax_qmm
