// The products of resident.cuh, of the rows of a matrix.
#include "cutlass/cuda_host_adapter.hpp"
#include "scaled_mm/resident.cuh"
#include "scaled_mm/resident_sm90.h"

namespace jax_qmm::sm90 {
namespace {

using namespace resident;

struct MatrixRows {
  static constexpr bool kHasZeroPoints = true;
  int k, columns;

  struct Place {
    int row, column;
  };

  // Whether b has a byte of a step of joined columns, and where.
  template <class C>
  __device__ bool find(int n, int step, int byte, int64_t& at) const {
    int const row_of_joined = n / columns, column = step * C::kTileK + byte - row_of_joined * k;
    at = int64_t(n - row_of_joined * columns) * k + column;
    return 0 <= column && column < k;
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
  int const joined = rows_joined(p.m, p.n, p.k, TileK), k = joined * p.k;
  cuuint64_t const shape[] = {cuuint64_t(k), cuuint64_t(p.m / joined)}, strides[] = {shape[0]};
  cuuint32_t const box[] = {TileK, kTileM}, each[] = {1, 1};
  CUresult const result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &boxes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(p.a), shape, strides, box, each,
      CU_TENSOR_MAP_INTERLEAVE_NONE, TileK == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  MatrixRows const rows{p.k, p.n};
  return resident::launch<Config<TileK>>(p, rows, joined, int(ceil_div(k, TileK)), boxes, gpu, submit);
}

template struct ResidentB<64>;
template struct ResidentB<128>;

}  // namespace jax_qmm::sm90
