// Choosing one of the kernels for a product, and launching it.
#include "scaled_mm/scaled_mm.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>

#include "scaled_mm/gemm_sm90.h"
#include "scaled_mm/generic.h"

namespace jax_qmm {
namespace {

using sm90::Accum;
using sm90::Schedule;

struct Instance {
  DType in;
  Accum accum;
  int out_bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n;
  Schedule schedule;
  bool swap;
  cudaError_t (*prepare)();
  cudaError_t (*launch)(ScaledMm const&, int swizzle, int sm_count, cudaStream_t);
};

#define INSTANCE(in, accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, swap)                     \
  {DType::in, Accum::accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, Schedule::schedule, swap,           \
   JAX_QMM_GEMM(in, accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, swap)::prepare,            \
   JAX_QMM_GEMM(in, accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, swap)::launch},
Instance const kInstances[] = {
#include "scaled_mm/instances_sm90.def"
};
#undef INSTANCE

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int bytes_of(DType dtype) { return dtype == DType::kF32 || dtype == DType::kS32 ? 4 : 2; }

Accum accum_of(ScaledMm const& p) { return p.in == DType::kF8E4M3 && p.fast_accum ? Accum::kFast : Accum::kFull; }

// TMA reads and writes boxes whose rows start at multiples of 16 bytes.
bool tma_aligned(ScaledMm const& p) {
  auto address = [](void const* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  return p.k > 0 && p.k % 16 == 0 && int64_t(p.n) * bytes_of(p.out_dtype) % 16 == 0 &&
         (address(p.a) | address(p.b) | address(p.out)) % 16 == 0;
}

bool serves(Instance const& instance, ScaledMm const& p) {
  return instance.in == p.in && instance.accum == accum_of(p) && instance.out_bytes == bytes_of(p.out_dtype);
}

// Microseconds by a model of the chip: waves of tiles, each limited by the tensor cores or by its share of the memory.
double predict(Instance const& i, ScaledMm const& p, int sm_count) {
  double const rows = i.swap ? p.n : p.m, columns = i.swap ? p.m : p.n;
  int64_t const clusters = ceil_div(ceil_div(rows, i.tile_m), i.cluster_m) *
                           ceil_div(ceil_div(columns, i.tile_n), i.cluster_n) * p.batch;
  int const cluster = i.cluster_m * i.cluster_n;
  int64_t const waves = ceil_div(clusters, sm_count / cluster);
  double const clock = 1.755e3;                              // cycles in a microsecond
  double const macs = 4096 * 0.85;                           // in a cycle of one SM, as large products reach
  double const k_tiles = ceil_div(p.k, i.tile_k);
  double const math = double(i.tile_m) * std::max(i.tile_n, 32) * i.tile_k / macs / clock;
  double const loads = double(i.tile_m + i.tile_n) * i.tile_k * std::min<double>(clusters * cluster, sm_count) / 5.5e6;
  double const tail = i.schedule == Schedule::kPingpong ? 1.5 : 2.5;
  double const bytes = double(p.batch) * (double(p.m) * p.k + double(p.n) * p.k + double(p.m) * p.n * i.out_bytes);
  return 2 + std::max(waves * k_tiles * std::max(math, loads) + waves * tail, bytes / 4.2e6);
}

using TuningKey = std::tuple<DType, DType, bool, int, int, int, int>;

TuningKey tuning_key(ScaledMm const& p) {
  return {p.in, p.out_dtype, p.fast_accum, p.m, p.n, p.k, p.batch};
}

std::shared_mutex tuning_mutex;
std::map<TuningKey, ScaledMmChoice> tuning;

}  // namespace

int scaled_mm_instances() { return std::size(kInstances); }

bool supports_scaled_mm(int instance, ScaledMm const& p) {
  return instance == -1 || (serves(kInstances[instance], p) && tma_aligned(p));
}

ScaledMmChoice select_scaled_mm(ScaledMm const& p, int sm_count) {
  ScaledMmChoice best{-1, 1};
  {
    std::shared_lock lock(tuning_mutex);
    auto tuned = tuning.find(tuning_key(p));
    if (tuned != tuning.end() && supports_scaled_mm(tuned->second.instance, p)) return tuned->second;
  }
  if (!tma_aligned(p)) return best;
  double best_time = 0;
  for (int i = 0; i < scaled_mm_instances(); ++i) {
    if (!serves(kInstances[i], p)) continue;
    double const time = predict(kInstances[i], p, sm_count);
    if (best.instance < 0 || time < best_time) {
      best = {i, 1};
      best_time = time;
    }
  }
  // Squares of tiles keep the operands of a large product in L2.
  if (p.m >= 4096 && p.n >= 4096) best.swizzle = 8;
  return best;
}

void tune_scaled_mm(ScaledMm const& problem, ScaledMmChoice choice) {
  std::unique_lock lock(tuning_mutex);
  tuning[tuning_key(problem)] = choice;
}

void clear_scaled_mm_tuning() {
  std::unique_lock lock(tuning_mutex);
  tuning.clear();
}

std::string describe_scaled_mm(ScaledMmChoice choice) {
  if (choice.instance < 0) return "generic 64x64x64 mma.sync";
  Instance const& i = kInstances[choice.instance];
  auto text = [](int number) { return std::to_string(number); };
  return "sm90 " + text(i.tile_m) + "x" + text(i.tile_n) + "x" + text(i.tile_k) + " cluster " + text(i.cluster_m) + "x" +
         text(i.cluster_n) + (i.schedule == Schedule::kPingpong ? " pingpong" : " cooperative") +
         (i.swap ? " swapped" : "") + " swizzle " + text(choice.swizzle);
}

cudaError_t prepare_scaled_mm() {
  for (Instance const& instance : kInstances) {
    if (cudaError_t error = instance.prepare(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_scaled_mm(ScaledMm const& p, ScaledMmChoice choice, int sm_count, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return cudaSuccess;
  if (choice.instance < 0) return launch_generic(p, stream);
  return kInstances[choice.instance].launch(p, choice.swizzle, sm_count, stream);
}

}  // namespace jax_qmm
