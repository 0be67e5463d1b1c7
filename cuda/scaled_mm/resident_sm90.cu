// The products of resident.cuh, of the rows of a matrix.
#include "cutlass/cuda_host_adapter.hpp"
#include "scaled_mm/resident.cuh"
#include "scaled_mm/resident_sm90.h"

namespace jax_qmm::sm90 {
namespace {

using namespace resident;

struct MatrixRows {
  static constexpr bool kHasZeroPoints = true;
  int k;

  struct Place {
    int row, column;
  };

  // Whether a byte of a step is there, and where in a row of b.
  template <class C>
  __device__ bool find(int step, int byte, int& at) const {
    at = step * C::kTileK + byte;
    return at < k;
  }
  __device__ Place begin(int row) const { return {row, 0}; }

  // Begins to load 64 rows of a step, and goes on to the next one.
  template <class C>
  __device__ void load(CUtensorMap const& boxes, uint64_t* full, uint8_t* to, Place& at) const {
    cute::SM90_TMA_LOAD_2D::copy(&boxes, full, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), to,
                                 at.column, at.row);
    at.column += C::kTileK;
  }

  // Of a row's scale.
  __device__ int entry_of(int row) const { return row; }
  __device__ AddsNothing adder() const { return {}; }
};

}  // namespace

template <int TileK>
cudaError_t ResidentB<TileK>::prepare(bool& fits) {
  return resident::prepare<Config<TileK>, MatrixRows>(fits);
}

template <int TileK>
cudaError_t ResidentB<TileK>::launch(ScaledMm const& p, int, Gpu const& gpu, Submit const& submit) {
  CUtensorMap boxes;
  cuuint64_t const shape[] = {cuuint64_t(p.k), cuuint64_t(p.m)}, strides[] = {shape[0]};
  cuuint32_t const box[] = {TileK, kTileM}, each[] = {1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &boxes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(p.a), shape, strides, box, each,
      CU_TENSOR_MAP_INTERLEAVE_NONE, TileK == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  return resident::launch<Config<TileK>>(p, MatrixRows{p.k}, int(ceil_div(p.k, TileK)), boxes, gpu, submit);
}

template struct ResidentB<64>;
template struct ResidentB<128>;

}  // namespace jax_qmm::sm90
