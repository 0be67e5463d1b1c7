#include "scaled_mm/instances.h"

#include "scaled_mm/gemm_sm80.h"
#include "scaled_mm/one_tile_sm90.h"
#include "scaled_mm/resident.h"
#include "scaled_mm/resident_sm90.h"
#include "scaled_mm/skinny.h"

namespace jax_qmm {
namespace {

// Which GPUs have the code, of those that this build is for.
bool on_hopper(int arch) { return arch == 90; }
bool from_turing_on(int arch) { return arch >= 75; }

template <class Kernel>
Instance instance(Schedule schedule, DType in, int out_bytes, int tile_m, int tile_n, int tile_k, int cluster_m,
                  int cluster_n, bool swap, bool full_epilogue) {
  Instance i{};
  i.has_code = on_hopper;
  i.schedule = schedule;
  i.in = in;
  i.accum = in == DType::kS8 ? Accum::kFull : Accum::kFast;  // what the tensor cores' own sums are
  i.out_bytes = out_bytes;
  i.tile_m = tile_m, i.tile_n = tile_n, i.tile_k = tile_k;
  i.cluster_m = cluster_m, i.cluster_n = cluster_n;
  i.swap = swap;
  i.full_epilogue = full_epilogue;
  i.blocks_per_sm = i.split = 1;
  i.prepare = Kernel::prepare;
  i.launch = Kernel::launch;
  return i;
}

template <class Kernel>
Instance gemm(DType in, Accum accum, int out_bytes, int tile_m, int tile_n, int tile_k, int cluster_m, int cluster_n,
              Schedule schedule, bool swap, bool full_epilogue = false) {
  Instance i =
      instance<Kernel>(schedule, in, out_bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, swap, full_epilogue);
  i.accum = accum;
  return i;
}

template <class Kernel>
Instance skinny(DType in, int out_bytes, int warps, int steps, int blocks_per_sm, bool full_epilogue = false) {
  Instance i = instance<Kernel>(Schedule::kSkinny, in, out_bytes, kSkinnyRows, kSkinnyM, kSkinnyStep * steps * warps, 1,
                                1, true, full_epilogue);
  i.has_code = from_turing_on;
  i.accum = Accum::kFull;
  i.warps = warps;
  i.blocks_per_sm = blocks_per_sm;
  return i;
}

template <class Kernel>
Instance one_tile(DType in, int out_bytes, int tile_m, int tile_n, int tile_k, int cluster_m, int cluster_n, int split,
                  int blocks_per_sm, bool swap, bool full_epilogue = false) {
  Instance i = instance<Kernel>(Schedule::kOneTile, in, out_bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, swap,
                                full_epilogue);
  i.split = split;
  i.blocks_per_sm = blocks_per_sm;
  return i;
}

template <class Kernel>
Instance resident_b(int tile_k) {
  return instance<Kernel>(Schedule::kResidentB, DType::kS8, 1, resident::kTileM, resident::kTileN, tile_k, 1, 1, false,
                          true);
}

template <class Kernel>
Instance multistage(int split, DType in, Accum accum, int tile_m, int tile_n, int tile_k, int warps_m, int warps_n,
                    int warps_k, int stages) {
  Instance i = instance<Kernel>(Schedule::kMultistage, in, 0, tile_m, tile_n, tile_k, 1, 1, false, true);
  i.has_code = from_turing_on;
  i.accum = accum;
  i.warps_m = warps_m, i.warps_n = warps_n;
  i.warps = warps_m * warps_n * warps_k;
  i.stages = stages;
  i.split = split;
  return i;
}

}  // namespace

#define GEMM(in, accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, ...)                  \
  gemm<JAX_QMM_GEMM(in, accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, __VA_ARGS__)>( \
      DType::in, Accum::accum, bytes, tile_m, tile_n, tile_k, cluster_m, cluster_n, Schedule::schedule, __VA_ARGS__),
#define SKINNY(in, ...) skinny<JAX_QMM_SKINNY(in, __VA_ARGS__)>(DType::in, __VA_ARGS__),
#define ONE_TILE(in, ...) one_tile<JAX_QMM_ONE_TILE(in, __VA_ARGS__)>(DType::in, __VA_ARGS__),
#define RESIDENT_B(tile_k) resident_b<sm90::ResidentB<tile_k>>(tile_k),
// One kernel for each number of parts of K.
#define MULTISTAGE_SPLIT(split, in, accum, ...) \
  multistage<JAX_QMM_MULTISTAGE(in, accum, __VA_ARGS__)>(split, DType::in, Accum::accum, __VA_ARGS__),
#define MULTISTAGE(...)            \
  MULTISTAGE_SPLIT(1, __VA_ARGS__) \
  MULTISTAGE_SPLIT(2, __VA_ARGS__) \
  MULTISTAGE_SPLIT(4, __VA_ARGS__) \
  MULTISTAGE_SPLIT(8, __VA_ARGS__)
std::vector<Instance> const& instances() {
  static std::vector<Instance> const all = {
#ifdef JAX_QMM_SM90
#include "scaled_mm/instances_sm90.def"
#endif
#include "scaled_mm/instances_sm80.def"
  };
  return all;
}

}  // namespace jax_qmm
