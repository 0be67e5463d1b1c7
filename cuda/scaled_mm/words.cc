// Kernels in words, by which the files of jax_qmm/tuned, `explain` and the benchmarks name them.
#include <stdexcept>

#include "scaled_mm/instances.h"

namespace jax_qmm {

std::string describe(Instance const& i) {
  auto text = [](int number) { return std::to_string(number); };
  std::string const size = text(i.tile_m) + "x" + text(i.tile_n) + "x" + text(i.tile_k), tile = "sm90 " + size;
  std::string const epilogue = i.full_epilogue ? " full epilogue" : "";
  if (i.schedule == Schedule::kMultistage) {
    int const slices = i.warps / (i.warps_m * i.warps_n);
    return "sm80 " + size + " " + text(i.stages) + " stages" + (slices > 1 ? " sliced-K " + text(slices) : "") +
           (i.split > 1 ? " split-K " + text(i.split) : "") +
           (i.in != DType::kS8 && i.accum == Accum::kFull ? " full accumulation" : "");
  }
  if (i.schedule == Schedule::kResidentB) return tile + " resident b" + epilogue;
  if (i.schedule == Schedule::kSkinny) return tile + " skinny " + text(i.warps) + " warps" + epilogue;
  char const* const schedule = i.schedule == Schedule::kPingpong      ? " pingpong"
                               : i.schedule == Schedule::kCooperative ? " cooperative"
                                                                      : " one tile";
  return tile + " cluster " + text(i.cluster_m) + "x" + text(i.cluster_n) + schedule + (i.swap ? " swapped" : "") +
         (i.split > 1 ? " split-K " + text(i.split) : "") +
         (i.blocks_per_sm > 1 ? " " + text(i.blocks_per_sm) + " per SM" : "") + epilogue;
}

std::string describe_scaled_mm(ScaledMmChoice choice) {
  if (choice.instance >= int(instances().size())) throw std::invalid_argument("there is no such kernel");
  if (choice.instance < 0) return "generic 64x64x64 mma.sync";
  Instance const& i = instances()[choice.instance];
  return describe(i) + (i.persistent() ? " swizzle " + std::to_string(choice.swizzle) : "");
}

}  // namespace jax_qmm
