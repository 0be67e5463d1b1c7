// Launches of Hopper's kernels, whose operands TMA brings, and those that there are.
#pragma once

#include <algorithm>
#include <array>

#include "block_scaled_mm/wgmma_sm90.cuh"
#include "cutlass/cuda_host_adapter.hpp"

namespace jax_qmm::block_scaled {

// Has TMA load boxes of a matrix of 3 dimensions, and zeros for what is beyond.
inline cudaError_t make_boxes(void const* data, CUtensorMapDataType type, std::array<int64_t, 3> shape,
                              std::array<int64_t, 2> strides, int columns, int rows, CUtensorMapSwizzle swizzle,
                              CUtensorMap& boxes) {
  cuuint64_t const sizes[] = {cuuint64_t(shape[0]), cuuint64_t(shape[1]), cuuint64_t(shape[2])};
  cuuint64_t const bytes[] = {cuuint64_t(strides[0]), cuuint64_t(strides[1])};
  cuuint32_t const box[] = {cuuint32_t(columns), cuuint32_t(rows), 1}, steps[] = {1, 1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &boxes, type, 3, const_cast<void*>(data), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The blocks of a cluster share x, or K.
template <class C>
LaunchShape shape_of(dim3 grid, int parts = 1) {
  return {grid, C::kThreads, sizeof(typename C::Shared), dim3(C::kShare, parts)};
}

template <class C>
cudaError_t prepare_wgmma(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(wgmma_kernel<C>), shape_of<C>({}), fits);
}

template <class C>
Instance describe_sm90(DType in) {
  return {in,   C::kBits,         false,          C::kUnit,  C::kTileM,  C::kRows, kStep, C::kBlocksPerSm,
          true, C::kScaleWeights, C::kPersistent, C::kShare, C::kWindows};
}

template <class C>
OwnParams<C> own_params(BlockScaledMm const& problem, ParamsSm90 const& own) {
  if constexpr (C::kWindows) {
    return {own, WindowsOfX(*problem.windows, problem.k)};
  } else {
    return own;
  }
}

template <class C>
cudaError_t launch_wgmma(BlockScaledMm const& problem, int split, typename C::Epilogue const& epilogue,
                         Submit const& submit) {
  Params params = make_params<C>(problem);
  int const parts = C::kPersistent ? 1 : count_parts(problem, kStep, split);
  params.k_of_part = int(ceil_div(ceil_div(problem.k, kStep), parts) * kStep);

  bool const x_batched = problem.x_batch_stride != 0, w_batched = problem.w_batch_stride != 0;
  // Sums that are left in memory are of whole tiles, so that there x has zeros for the rows beyond it.
  int const box_rows = C::kPersistent ? C::kBoxRows : std::min(C::kTileM, problem.m);
  int64_t const m = problem.m, n = problem.n, k = problem.k, batch = problem.batch;
  int64_t const row_bytes = C::kInt8 ? k / 2 : problem.row_bytes();  // of weights, which beside int8 are plain
  CUtensorMap boxes_x, boxes_w, boxes_out{};
  int64_t const size = sizeof(typename C::Element);
  auto const type = size == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  auto const swizzle_w = C::kInt8 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE;
  cudaError_t error;
  if constexpr (C::kWindows) {
    Windows const& of = *problem.windows;
    error = conv::make_image_boxes(of, problem.x, of.images, size * of.channels, box_rows, kRowBytes, boxes_x);
  } else {
    error = make_boxes(problem.x, type, {k, m, x_batched ? batch : 1}, {size * k, size * m * k}, C::kColumnsX, box_rows,
                       CU_TENSOR_MAP_SWIZZLE_128B, boxes_x);
  }
  if (error == cudaSuccess) {
    error = make_boxes(problem.w, CU_TENSOR_MAP_DATA_TYPE_UINT8, {row_bytes, n, w_batched ? batch : 1},
                       {row_bytes, n * row_bytes}, kBoxBytes, C::kRows, swizzle_w, boxes_w);
  }
  if (error != cudaSuccess) return error;
  OwnParams<C> own = own_params<C>(problem, {box_rows, x_batched, w_batched, {}, nullptr, 0, nullptr});
  LaunchShape shape = shape_of<C>(dim3(params.tiles_m * params.tiles_n * unsigned(batch), parts), parts);
  if constexpr (C::kPersistent) {
    Gpu const* gpu;
    if ((error = current_gpu(gpu))) return error;
    error = make_boxes(problem.out, CU_TENSOR_MAP_DATA_TYPE_UINT16, {n, m, batch}, {2 * n, 2 * n * m}, 64, C::kSlotRows,
                       CU_TENSOR_MAP_SWIZZLE_128B, boxes_out);
    if (error != cudaSuccess) return error;
    own.streams = streams_of(describe_sm90<C>(problem.in), problem, split, *gpu);
    shape = shape_of<C>(own.streams.blocks());
    if (own.streams.share_tiles) {
      own.left = static_cast<Flag*>(problem.workspace), own.is_left = is_left();
      own.sums = own.left + own.streams.flags();
    }
  }
  return jax_qmm::launch(submit, shape, wgmma_kernel<C>, params, own, epilogue, boxes_x, boxes_w, boxes_out);
}

template <class C>
Instance instance_sm90(DType in) {
  Instance i = describe_sm90<C>(in);
  i.prepare = prepare_wgmma<C>;
  i.launch = [](BlockScaledMm const& problem, int split, Submit const& submit) {
    return launch_wgmma<C>(problem, split, NoEpilogue{}, submit);
  };
  return i;
}

// Of 16-bit x.
template <class T, int kBits>
void add_wgmma(DType in, std::vector<Instance>& to) {
  to.push_back(instance_sm90<ConfigSm90<T, kBits, 8, false>>(in));
  to.push_back(instance_sm90<ConfigSm90<T, kBits, 16, false>>(in));
  to.push_back(instance_sm90<ConfigSm90<T, kBits, 32, false>>(in));
  to.push_back(instance_sm90<ConfigSm90<T, kBits, 64, false>>(in));
  to.push_back(instance_sm90<PersistentSm90<T, kBits, 16, false>>(in));
  to.push_back(instance_sm90<PersistentSm90<T, kBits, 32, false>>(in));
  to.push_back(instance_sm90<PersistentSm90<T, kBits, 64, false>>(in));
  if constexpr (kBits == 4) {  // with shorter blocks, too
    auto const add_unit = [&](auto unit) {
      to.push_back(instance_sm90<PersistentSm90<T, kBits, 16, false, unit>>(in));
      to.push_back(instance_sm90<PersistentSm90<T, kBits, 32, false, unit>>(in));
      to.push_back(instance_sm90<PersistentSm90<T, kBits, 64, false, unit>>(in));
    };
    add_unit(std::integral_constant<int, 64>());
    add_unit(std::integral_constant<int, 32>());
  }
  if constexpr (!kIsBf16<T>) {  // whose range scaled weights may leave
    to.push_back(instance_sm90<ConfigSm90<T, kBits, 128, false>>(in));
  } else {
    to.push_back(instance_sm90<ConfigSm90<T, kBits, 64, true>>(in));
    to.push_back(instance_sm90<ConfigSm90<T, kBits, 128, true>>(in));
    to.push_back(instance_sm90<ConfigSm90<T, kBits, 256, true>>(in));
    to.push_back(instance_sm90<PersistentSm90<T, kBits, 128, true>>(in));
    to.push_back(instance_sm90<PersistentSm90<T, kBits, 256, true>>(in));
  }
}

}  // namespace jax_qmm::block_scaled
