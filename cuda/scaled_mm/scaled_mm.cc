// Choosing one of the kernels for a product, and launching it.
#include "scaled_mm/scaled_mm.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "once_per_device.h"
#include "scaled_mm/gemm_sm90.h"
#include "scaled_mm/generic.h"
#include "scaled_mm/one_tile_sm90.h"
#include "scaled_mm/skinny_sm90.h"

namespace jax_qmm {
namespace {

using sm90::Accum;
using sm90::Schedule;

struct Cost {
  double k_tile, tile, launch;  // microseconds
  double reading;               // time of the operands' and the result's bytes, against a copy's
};

struct Instance {
  Cost cost;
  DType in;
  Accum accum;
  int out_bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n;
  Schedule schedule;
  bool swap;
  int blocks_per_sm, warps, split;
  cudaError_t (*prepare)();
  cudaError_t (*launch)(ScaledMm const&, int swizzle, int sm_count, Submit const&);

  // How many rows of a the tiles of a cluster have.
  int rows_of_a() const { return swap ? tile_n * cluster_n : tile_m * cluster_m; }
};

// Sums inside the tensor cores are full ones of int8 alone.
template <DType In>
constexpr Accum kTensorCoreAccum = In == DType::kS8 ? Accum::kFull : Accum::kFast;

#define COST(...) \
  Cost { __VA_ARGS__ }
#define GEMM(cost, in, accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, swap)        \
  {cost,                                                                                                  \
   DType::in,                                                                                             \
   Accum::accum,                                                                                          \
   bytes,                                                                                                 \
   tile_m,                                                                                                \
   tile_n,                                                                                                \
   tile_k,                                                                                                \
   cluster_m,                                                                                             \
   cluster_n,                                                                                             \
   Schedule::schedule,                                                                                    \
   swap,                                                                                                  \
   1,                                                                                                     \
   0,                                                                                                     \
   1,                                                                                                     \
   JAX_QMM_GEMM(in, accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, swap)::prepare, \
   JAX_QMM_GEMM(in, accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, swap)::launch},
#define SKINNY(cost, in, bytes, warps, steps, blocks_per_sm)        \
  {cost,                                                            \
   DType::in,                                                       \
   Accum::kFull,                                                    \
   bytes,                                                           \
   sm90::kSkinnyRows,                                               \
   sm90::kSkinnyM,                                                  \
   sm90::kSkinnyStep * steps * warps,                               \
   1,                                                               \
   1,                                                               \
   Schedule::kSkinny,                                               \
   true,                                                            \
   blocks_per_sm,                                                   \
   warps,                                                           \
   1,                                                               \
   JAX_QMM_SKINNY(in, bytes, warps, steps, blocks_per_sm)::prepare, \
   JAX_QMM_SKINNY(in, bytes, warps, steps, blocks_per_sm)::launch},
#define ONE_TILE(cost, in, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, split, blocks_per_sm, swap)        \
  {cost,                                                                                                           \
   DType::in,                                                                                                      \
   kTensorCoreAccum<DType::in>,                                                                                    \
   bytes,                                                                                                          \
   tile_m,                                                                                                         \
   tile_n,                                                                                                         \
   tile_k,                                                                                                         \
   cluster_m,                                                                                                      \
   cluster_n,                                                                                                      \
   Schedule::kOneTile,                                                                                             \
   swap,                                                                                                           \
   blocks_per_sm,                                                                                                  \
   0,                                                                                                              \
   split,                                                                                                          \
   JAX_QMM_ONE_TILE(in, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, split, blocks_per_sm, swap)::prepare, \
   JAX_QMM_ONE_TILE(in, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, split, blocks_per_sm, swap)::launch},
Instance const kInstances[] = {
#include "scaled_mm/instances_sm90.def"
};
#undef COST
#undef GEMM
#undef SKINNY
#undef ONE_TILE

Accum accum_of(ScaledMm const& p) { return p.in == DType::kF8E4M3 && p.fast_accum ? Accum::kFast : Accum::kFull; }

// TMA reads and writes boxes whose rows start at multiples of 16 bytes.
bool tma_aligned(ScaledMm const& p) {
  auto address = [](void const* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  return p.k > 0 && p.k % 16 == 0 && int64_t(p.n) * bytes_of(p.out_dtype) % 16 == 0 &&
         (address(p.a) | address(p.b) | address(p.out)) % 16 == 0;
}

// Of tiles, or of the one tile that the blocks of a cluster share.
int64_t count_clusters(Instance const& i, ScaledMm const& p) {
  int const rows = i.swap ? p.n : p.m, columns = i.swap ? p.m : p.n;
  return ceil_div(ceil_div(rows, i.tile_m), i.cluster_m) * ceil_div(ceil_div(columns, i.tile_n), i.cluster_n) * p.batch;
}

bool serves(Instance const& i, ScaledMm const& p) {
  int constexpr kMostBlocks = 65535;  // of a grid's second or third dimension; prefetch_l2 counts their threads
  if (i.in != p.in || i.out_bytes != bytes_of(p.out_dtype)) return false;
  if (i.schedule == Schedule::kSkinny) return p.m <= i.tile_n && p.batch <= kMostBlocks;
  if (i.accum != accum_of(p)) return false;
  return i.schedule != Schedule::kOneTile || count_clusters(i, p) * i.cluster_m * i.cluster_n <= kMostBlocks;
}

// The grid is padded to whole squares of tiles, which costs more than the reuse gains unless it fits.
int swizzle_for(Instance const& i, ScaledMm const& p) {
  int constexpr kSquare = 8;
  bool const fits =
      ceil_div(p.m, i.tile_m) % (kSquare * i.cluster_m) == 0 && ceil_div(p.n, i.tile_n) % (kSquare * i.cluster_n) == 0;
  return fits && !i.swap && p.m >= 4096 && p.n >= 8192 ? kSquare : 1;
}

// None where this is not to be chosen.
std::optional<ScaledMmTerms> terms_of(Instance const& i, ScaledMm const& problem, int sm_count) {
  if (!serves(i, problem)) return std::nullopt;
  // Of one-tile kernels with several rows of tiles: with more, persistent ones are faster on almost all products.
  int constexpr kMostWaves = 3;
  bool const persistent = i.schedule == Schedule::kPingpong || i.schedule == Schedule::kCooperative;
  ScaledMm const p = persistent ? sm90::overlap_tiles(problem, i.rows_of_a()) : problem;
  int const cluster = i.cluster_m * i.cluster_n * i.split;
  // The SMs of a cluster are of one GPC, which often has some that make no whole cluster: of 132, 120 make clusters of
  // 4 or 8, and 102 of 6.
  int const sms = cluster == 6 ? sm_count * 7 / 9 : cluster > 2 ? sm_count * 10 / 11 : sm_count;
  double const waves = ceil_div(count_clusters(i, p), std::max(1, sms * i.blocks_per_sm / cluster));
  bool const several_rows = p.m > i.rows_of_a();
  if (i.schedule == Schedule::kOneTile && several_rows && waves > kMostWaves) return std::nullopt;
  double const bytes = double(problem.batch) *
                       (double(problem.m) * p.k + double(p.n) * p.k + double(problem.m) * p.n * bytes_of(p.out_dtype));
  return ScaledMmTerms{waves, double(ceil_div(p.k, i.tile_k * i.split)), bytes / 4.3e6};  // a copy reaches 4.3 TB/s
}

// Microseconds: waves of tiles that read and multiply, beside the reading of the operands by the whole chip.
double predict(Cost const& cost, ScaledMmTerms const& t) {
  auto const cube = [](double x) { return x * x * x; };
  return cost.launch +
         std::cbrt(cube(t.waves * (t.k_tiles * cost.k_tile + cost.tile)) + cube(t.copy_us * cost.reading));
}

// Measured choices: for operands and output of some kind and one N and K, by M.
using TuningKey = std::tuple<DType, Accum, int, int, int, int>;

TuningKey tuning_key(ScaledMm const& p) { return {p.in, accum_of(p), bytes_of(p.out_dtype), p.n, p.k, p.batch}; }

std::shared_mutex tuning_mutex;
std::map<TuningKey, std::map<int, ScaledMmChoice>> tuning;

// The next M that was measured, if that is not far, and its choice, if that serves.
std::optional<std::pair<int, ScaledMmChoice>> find_tuned(ScaledMm const& p) {
  std::shared_lock lock(tuning_mutex);
  auto const by_m = tuning.find(tuning_key(p));
  if (by_m == tuning.end()) return std::nullopt;
  auto const next = by_m->second.lower_bound(p.m);
  if (next == by_m->second.end() || 3LL * next->first >= 4LL * p.m) return std::nullopt;
  if (next->second.instance >= 0 && !tma_aligned(p)) return std::nullopt;
  return *next;
}

}  // namespace

std::vector<ScaledMmChoice> scaled_mm_choices(ScaledMm const& p) {
  std::vector<ScaledMmChoice> choices{{-1, 1}};
  for (int i = 0; i < int(std::size(kInstances)); ++i) {
    if (!tma_aligned(p) || !serves(kInstances[i], p)) continue;
    choices.push_back({i, 1});
    if (!kInstances[i].swap && kInstances[i].schedule != Schedule::kOneTile) choices.push_back({i, 8});
  }
  return choices;
}

ScaledMmChoice select_scaled_mm(ScaledMm const& p, int sm_count) {
  ScaledMmChoice best{-1, 1};
  if (auto const tuned = find_tuned(p)) return tuned->second;
  if (!tma_aligned(p)) return best;
  double best_time = std::numeric_limits<double>::infinity();
  for (int i = 0; i < int(std::size(kInstances)); ++i) {
    auto const terms = terms_of(kInstances[i], p, sm_count);
    if (!terms) continue;
    if (double const time = predict(kInstances[i].cost, *terms); time < best_time) {
      best = {i, swizzle_for(kInstances[i], p)};
      best_time = time;
    }
  }
  return best;
}

std::optional<ScaledMmTerms> scaled_mm_terms(ScaledMm const& p, ScaledMmChoice choice, int sm_count) {
  if (choice.instance < 0 || choice.instance >= int(std::size(kInstances)) || !tma_aligned(p)) return std::nullopt;
  Instance const& instance = kInstances[choice.instance];
  return choice.swizzle == swizzle_for(instance, p) ? terms_of(instance, p, sm_count) : std::nullopt;
}

void check_scaled_mm_choice(ScaledMm const& p, ScaledMmChoice choice) {
  auto const known = scaled_mm_choices(p);
  bool const serves = std::any_of(known.begin(), known.end(), [&](ScaledMmChoice other) {
    return other.instance == choice.instance && other.swizzle == choice.swizzle;
  });
  if (!serves) throw std::invalid_argument(describe_scaled_mm(choice) + " does not serve this product");
}

void tune_scaled_mm(ScaledMm const& problem, ScaledMmChoice choice) {
  check_scaled_mm_choice(problem, choice);
  std::unique_lock lock(tuning_mutex);
  tuning[tuning_key(problem)][problem.m] = choice;
}

std::optional<int> tuned_scaled_mm(ScaledMm const& problem) {
  auto const tuned = find_tuned(problem);
  return tuned ? std::optional(tuned->first) : std::nullopt;
}

void clear_scaled_mm_tuning() {
  std::unique_lock lock(tuning_mutex);
  tuning.clear();
}

std::string describe_scaled_mm(ScaledMmChoice choice) {
  if (choice.instance >= int(std::size(kInstances))) throw std::invalid_argument("there is no such kernel");
  if (choice.instance < 0) return "generic 64x64x64 mma.sync";
  Instance const& i = kInstances[choice.instance];
  auto text = [](int number) { return std::to_string(number); };
  std::string const tile = "sm90 " + text(i.tile_m) + "x" + text(i.tile_n) + "x" + text(i.tile_k);
  if (i.schedule == Schedule::kSkinny) return tile + " skinny " + text(i.warps) + " warps";
  char const* const schedule = i.schedule == Schedule::kPingpong      ? " pingpong"
                               : i.schedule == Schedule::kCooperative ? " cooperative"
                                                                      : " one tile";
  return tile + " cluster " + text(i.cluster_m) + "x" + text(i.cluster_n) + schedule + (i.swap ? " swapped" : "") +
         (i.split > 1 ? " split-K " + text(i.split) : "") +
         (i.blocks_per_sm > 1 ? " " + text(i.blocks_per_sm) + " per SM" : "") +
         (i.schedule == Schedule::kOneTile ? "" : " swizzle " + text(choice.swizzle));
}

cudaError_t prepare_scaled_mm() {
  static std::atomic<uint64_t> prepared_devices{0};
  return once_per_device(prepared_devices, [] {
    for (Instance const& instance : kInstances) {
      if (cudaError_t error = instance.prepare(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

cudaError_t launch_scaled_mm(ScaledMm const& p, ScaledMmChoice choice, int sm_count, Submit const& submit) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return cudaSuccess;
  if (choice.instance < 0) return launch_generic(p, submit);
  return kInstances[choice.instance].launch(p, choice.swizzle, sm_count, submit);
}

}  // namespace jax_qmm
