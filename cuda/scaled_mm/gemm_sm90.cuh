// Warp-specialized persistent GEMM of TMA loads, wgmma and a TMA store, with the epilogue of epilogues_sm90.cuh.
#pragma once

// Lets CUTLASS' kernels start while the kernel before them ends; they wait for its results before they load.
#define CUTLASS_ENABLE_GDC_FOR_SM90 1

#include "core/launch.cuh"
#include "core/prepare.h"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/kernel_hardware_info.h"
#include "scaled_mm/epilogues_sm90.cuh"
#include "scaled_mm/gemm_sm90.h"

namespace jax_qmm::sm90 {

#ifdef __CUDA_ARCH__
static_assert(cutlass::arch::IsGdcGloballyEnabled, "kernels would not wait for the results of those before them");
#endif

template <DType In, Accum accum, int OutBytes, int TileM, int TileN, int TileK, int ClusterM, int ClusterN,
          Schedule schedule, bool Swap, bool kFull>
struct GemmTypes {
  static constexpr bool kInt8 = In == DType::kS8;
  static constexpr bool kPingpong = schedule == Schedule::kPingpong;
  using Element = cute::conditional_t<kInt8, int8_t, cutlass::float_e4m3_t>;
  using Accumulator = cute::conditional_t<kInt8, int32_t, float>;
  // The epilogue hands over finished bit patterns, so the copy needs to know only their width.
  using Bits = BitsOf<OutBytes>;
  using LayoutD = cute::conditional_t<Swap, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using Tile = Shape<Int<TileM>, Int<TileN>, Int<TileK>>;
  using Cluster = Shape<Int<ClusterM>, Int<ClusterN>, _1>;
  using KernelSchedule =
      cute::conditional_t<accum == Accum::kFast,
                          cute::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                                              cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum>,
                          cute::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                              cutlass::gemm::KernelTmaWarpSpecializedCooperative>>;
  using EpilogueSchedule = cute::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                               cutlass::epilogue::TmaWarpSpecializedCooperative>;

  using Fusion = Epilogue<In, Bits, Swap, kPingpong, Tile, kFull>;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, Accumulator, float, void, LayoutD, 16 / OutBytes, Bits, LayoutD,
      16 / OutBytes, EpilogueSchedule, Fusion>::CollectiveOp;
  static_assert(CollectiveEpilogue::DispatchPolicy::StagesC <=
                    Fusion::template kSubtiles<typename CollectiveEpilogue::EpilogueTile>,
                "the terms of a tile would be overwritten before it is done: see Epilogue::slot");
  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, 16, Element,
      cutlass::layout::ColumnMajor, 16, Accumulator, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename CollectiveEpilogue::SharedStorage))>,
      KernelSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue,
                                                      cutlass::gemm::PersistentScheduler>;
};

template <DType In, Accum accum, int OutBytes, int TileM, int TileN, int TileK, int ClusterM, int ClusterN,
          Schedule schedule, bool Swap, bool kFull>
cudaError_t Gemm<In, accum, OutBytes, TileM, TileN, TileK, ClusterM, ClusterN, schedule, Swap, kFull>::prepare(
    bool& fits) {
  using Kernel =
      typename GemmTypes<In, accum, OutBytes, TileM, TileN, TileK, ClusterM, ClusterN, schedule, Swap, kFull>::Kernel;
  LaunchShape const shape{{}, Kernel::get_block_shape(), Kernel::SharedStorageSize, dim3(ClusterM, ClusterN)};
  return prepare_kernel(reinterpret_cast<void const*>(cutlass::device_kernel<Kernel>), shape, fits);
}

template <DType In, Accum accum, int OutBytes, int TileM, int TileN, int TileK, int ClusterM, int ClusterN,
          Schedule schedule, bool Swap, bool kFull>
cudaError_t Gemm<In, accum, OutBytes, TileM, TileN, TileK, ClusterM, ClusterN, schedule, Swap, kFull>::launch(
    ScaledMm const& problem, int swizzle, Gpu const& gpu, Submit const& submit) {
  using Types = GemmTypes<In, accum, OutBytes, TileM, TileN, TileK, ClusterM, ClusterN, schedule, Swap, kFull>;
  using Kernel = typename Types::Kernel;
  using Element = typename Types::Element;
  using Bits = typename Types::Bits;

  ScaledMm const p = overlap_tiles(problem, Swap ? TileN * ClusterN : TileM * ClusterM, gpu.l2_bytes);
  auto operand = [&](void const* data, int64_t batch_stride) {
    return cute::make_tuple(static_cast<Element const*>(data), cute::make_stride(int64_t(p.k), _1{}, batch_stride));
  };
  auto [ptr_rows, stride_rows] = Swap ? operand(p.b, p.b_batch_stride) : operand(p.a, p.a_batch_stride);
  auto [ptr_cols, stride_cols] = Swap ? operand(p.a, p.a_batch_stride) : operand(p.b, p.b_batch_stride);

  typename Kernel::CollectiveEpilogue::StrideD stride_out{};
  cute::get<Swap ? 1 : 0>(stride_out) = p.n;
  cute::get<2>(stride_out) = p.out_batch_stride;

  cutlass::KernelHardwareInfo hardware;
  hardware.sm_count = gpu.sm_count;
  typename Kernel::Arguments args{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {Swap ? p.n : p.m, Swap ? p.m : p.n, p.k, p.batch},
      {ptr_rows, stride_rows, ptr_cols, stride_cols},
      {Types::Fusion::arguments(p, gpu.sm_count), nullptr, {}, static_cast<Bits*>(p.out), stride_out},
      hardware};
  args.scheduler.max_swizzle_size = swizzle;
  if (!Kernel::can_implement(args)) return cudaErrorInvalidValue;

  auto const params = Kernel::to_underlying_arguments(args, /*workspace=*/nullptr);
  LaunchShape const shape{Kernel::get_grid_shape(params), Kernel::get_block_shape(), Kernel::SharedStorageSize,
                          dim3(ClusterM, ClusterN)};
  return jax_qmm::launch(submit, shape, cutlass::device_kernel<Kernel>, params);
}

}  // namespace jax_qmm::sm90
