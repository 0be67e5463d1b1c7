// Products by the persistent blocks of block_scaled_mm: weights go from shared memory to registers, become int8 there
// and are multiplied, while results of the tile before are on their way. With few rows, and where it fills more SMs,
// blocks share tiles.
#include "block_scaled_mm/launch_sm90.cuh"
#include "expanded_mm/instances.h"

namespace jax_qmm::expanded {
namespace {

using block_scaled::PersistentSm90;

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
  problem.workspace = p.workspace;
  return problem;
}

// `kSplit` as of a choice of block_scaled_mm: 2 where blocks share tiles.
template <class C, int kSplit>
cudaError_t launch(ExpandedMm const& p, Submit const& submit) {
  return block_scaled::launch_wgmma<C>(problem_of(p), kSplit, epilogue_args<false>(p), submit);
}

template <class C, int kSplit>
block_scaled::Streams streams(ExpandedMm const& p, Gpu const& gpu) {
  return block_scaled::streams_of(block_scaled::describe_sm90<C>(DType::kS8), problem_of(p), kSplit, gpu);
}

// Whether TMA has boxes of operands and results, and blocks of weights are multiples of what has a term.
template <class C>
bool serves(ExpandedMm const& p) {
  auto const aligned = [](void const* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  bool const has_boxes = p.n % 8 == 0 && aligned(p.a) && aligned(p.b) && aligned(p.out);
  return bytes_of(p.out_dtype) == 2 && has_boxes && (p.block % C::kUnit == 0 || p.block >= p.k);
}

template <class C, int kSplit>
void add(std::vector<Instance>& to, int tile_cycles, int step_cycles, int sharing_cycles = 0) {
  std::string words = "sm90 wgmma " + words_of_tile(C::kTileM, C::kRows, block_scaled::kStep);
  if (C::kShare > 1) words += " cluster " + std::to_string(C::kShare);
  words += kSplit > 1 ? " stream-K int4" : " persistent int4";
  if (C::kTileM <= ExpandedMm::kFewRows) words += " in blocks of " + std::to_string(C::kUnit);
  Instance i{words, block_scaled::prepare_wgmma<C>, launch<C, kSplit>};
  i.tile_m = C::kTileM, i.tile_n = C::kRows, i.tile_k = block_scaled::kStep, i.streams = streams<C, kSplit>;
  i.blocks_per_sm = 1, i.shared_bytes = int(sizeof(typename C::Shared)), i.wgmma = true, i.serves = serves<C>;
  i.tile_cycles = tile_cycles, i.step_cycles = step_cycles, i.sharing_cycles = sharing_cycles;
  to.push_back(std::move(i));
}

}  // namespace

void add_streams(std::vector<Instance>& to) {
  using Many = PersistentSm90<int8_t, 4, 128, true, ExpandedMm::kColumns>;
  using Most = PersistentSm90<int8_t, 4, 256, true, ExpandedMm::kColumns>;
  add<Many, 1>(to, 4330, 1015), add<Many, 2>(to, 7740, 1111, 1230);
  add<Most, 1>(to, 7160, 1293), add<Most, 2>(to, 14690, 1436, 1700);
  // Few rows have weights become int8 as fast as memory gives them, where few terms are made for them.
  add<PersistentSm90<int8_t, 4, 16, true, 32>, 2>(to, 7670, 1005, 320);
  add<PersistentSm90<int8_t, 4, 16, true, 128>, 2>(to, 6770, 857, 330);
  add<PersistentSm90<int8_t, 4, 32, true, 32>, 2>(to, 6900, 797, 340);
  add<PersistentSm90<int8_t, 4, 32, true, 128>, 2>(to, 6440, 680, 340);
  add<PersistentSm90<int8_t, 4, 64, true, 32>, 2>(to, 7280, 874, 630);
  add<PersistentSm90<int8_t, 4, 64, true, 128>, 2>(to, 6670, 750, 640);
}

}  // namespace jax_qmm::expanded
