// Products of few rows, which take as long as reading b: a kernel that keeps the memory busy and little else.
#pragma once

#include "scaled_mm/gemm_sm90.h"

namespace jax_qmm::sm90 {

// The tile is 64 columns of the product (rows of b) by `Rows` of its rows (of a). A cluster of `split` blocks shares the
// tile's K and adds up its parts through distributed shared memory, always in the same order.
template <DType In, Accum accum, int Rows>
struct Stream {
  static constexpr int kColumns = 64;
  static constexpr int kTileK = 256;
  static cudaError_t prepare();
  static cudaError_t launch(ScaledMm const& problem, int split, int sm_count, cudaStream_t stream);
};

}  // namespace jax_qmm::sm90
