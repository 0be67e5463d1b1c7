// Products with many rows by the persistent blocks of block_scaled_mm: weights go from shared memory to registers,
// become int8 there and are multiplied, while results of the tile before are on their way.
#include "block_scaled_mm/launch_sm90.cuh"
#include "expanded_mm/instances.h"

namespace jax_qmm::expanded {
namespace {

constexpr int kUnit = ExpandedMm::kColumns;

template <int TileM>
using Config = block_scaled::PersistentSm90<int8_t, 4, TileM, true, kUnit>;

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
cudaError_t prepare(bool& fits) {
  return block_scaled::prepare_wgmma<C>(fits);
}

template <class C>
cudaError_t launch(ExpandedMm const& p, Submit const& submit) {
  using namespace block_scaled;
  BlockScaledMm const problem = problem_of(p);
  Params params = make_params<C>(problem);
  Gpu const* gpu;
  if (cudaError_t const error = current_gpu(gpu)) return error;
  Streams const streams = streams_of(describe_sm90<C>(p.in), problem, 1, *gpu);
  bool const x_batched = p.a_batch_stride != 0, w_batched = p.b_batch_stride != 0;
  int64_t const m = p.m, n = p.n, k = p.k, batch = p.batch;
  CUtensorMap boxes_x, boxes_w, boxes_out;
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  cudaError_t error = make_boxes(p.a, kBytes, {k, m, x_batched ? batch : 1}, {k, m * k}, C::kColumnsX,
                                 C::kTileM / C::kShare, CU_TENSOR_MAP_SWIZZLE_128B, boxes_x);
  if (error == cudaSuccess) {
    error = make_boxes(p.b, kBytes, {k / 2, n, w_batched ? batch : 1}, {k / 2, n * k / 2}, kBoxBytes, C::kRows,
                       CU_TENSOR_MAP_SWIZZLE_64B, boxes_w);
  }
  if (error == cudaSuccess) {
    error = make_boxes(p.out, CU_TENSOR_MAP_DATA_TYPE_UINT16, {n, m, batch}, {2 * n, 2 * n * m}, 64, C::kSlotRows,
                       CU_TENSOR_MAP_SWIZZLE_128B, boxes_out);
  }
  if (error != cudaSuccess) return error;
  ParamsSm90 const own{C::kTileM / C::kShare, x_batched, w_batched, streams, nullptr, 0, nullptr};
  return jax_qmm::launch(submit, shape_of<C>(streams.blocks()), wgmma_kernel<C>, params, own, epilogue_args<false>(p),
                         boxes_x, boxes_w, boxes_out);
}

bool serves(ExpandedMm const& p) {
  bool const has_boxes =
      p.n % 8 == 0 &&
      (reinterpret_cast<uintptr_t>(p.out) | reinterpret_cast<uintptr_t>(p.a) | reinterpret_cast<uintptr_t>(p.b)) % 16 ==
          0;
  return bytes_of(p.out_dtype) == 2 && has_boxes;
}

template <class C>
void add(std::vector<Instance>& to, int tile_cycles, int step_cycles) {
  std::string const share = C::kShare > 1 ? " cluster " + std::to_string(C::kShare) : "";
  Instance i{"sm90 wgmma " + words_of_tile(C::kTileM, C::kRows, block_scaled::kStep) + share + " persistent int4",
             prepare<C>, launch<C>};
  i.tile_m = C::kTileM, i.tile_n = C::kRows, i.tile_k = block_scaled::kStep;
  i.blocks_per_sm = 1, i.shared_bytes = int(sizeof(typename C::Shared)), i.wgmma = true, i.serves = serves;
  i.tile_cycles = tile_cycles, i.step_cycles = step_cycles;
  to.push_back(std::move(i));
}

}  // namespace

void add_streams(std::vector<Instance>& to) {
  add<Config<128>>(to, 2500, 650);
  add<Config<256>>(to, 3000, 1100);
}

}  // namespace jax_qmm::expanded
