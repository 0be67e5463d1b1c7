// Products with many rows by the persistent blocks of block_scaled_mm: weights go from shared memory to registers,
// become int8 there and are multiplied, while results of the tile before are on their way.
#include "block_scaled_mm/launch_sm90.cuh"
#include "expanded_mm/instances.h"

namespace jax_qmm::expanded {
namespace {

template <int TileM>
using Config = block_scaled::PersistentSm90<int8_t, 4, TileM, true, ExpandedMm::kColumns>;

// As a problem of block_scaled_mm, for what both have.
BlockScaledMm problem_of(ExpandedMm const& p) {
  BlockScaledMm problem{};
  problem.x = p.a, problem.w = static_cast<uint8_t const*>(p.b), problem.out = p.out;
  problem.m = p.m, problem.n = p.n, problem.k = p.k, problem.batch = p.batch;
  problem.bits = 4, problem.block = p.block;
  problem.x_batch_stride = p.a_batch_stride, problem.w_batch_stride = p.b_batch_stride;
  problem.in = p.in, problem.out_dtype = p.out_dtype;
  problem.scale = {p.multiple, DType::kS8, p.multiple_batch_stride};
  problem.zero_point = {p.zero_point, DType::kS8, p.zero_point_batch_stride};
  problem.activation = Activation::kNone;
  return problem;
}

template <class C>
cudaError_t launch(ExpandedMm const& p, Submit const& submit) {
  return block_scaled::launch_wgmma<C>(problem_of(p), 1, epilogue_args<false>(p), submit);
}

// Whether TMA has boxes of operands and results.
bool serves(ExpandedMm const& p) {
  auto const aligned = [](void const* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return bytes_of(p.out_dtype) == 2 && p.n % 8 == 0 && aligned(p.a) && aligned(p.b) && aligned(p.out);
}

template <class C>
void add(std::vector<Instance>& to, int tile_cycles, int step_cycles) {
  std::string const share = C::kShare > 1 ? " cluster " + std::to_string(C::kShare) : "";
  Instance i{"sm90 wgmma " + words_of_tile(C::kTileM, C::kRows, block_scaled::kStep) + share + " persistent int4",
             block_scaled::prepare_wgmma<C>, launch<C>};
  i.tile_m = C::kTileM, i.tile_n = C::kRows, i.tile_k = block_scaled::kStep;
  i.blocks_per_sm = 1, i.shared_bytes = int(sizeof(typename C::Shared)), i.wgmma = true, i.serves = serves;
  i.tile_cycles = tile_cycles, i.step_cycles = step_cycles;
  to.push_back(std::move(i));
}

}  // namespace

void add_streams(std::vector<Instance>& to) {
  add<Config<128>>(to, 3620, 1025);
  add<Config<256>>(to, 7570, 1263);
}

}  // namespace jax_qmm::expanded
