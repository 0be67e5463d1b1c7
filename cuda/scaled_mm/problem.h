// Scaled matrix products of 8-bit operands: what is computed, of which operands.
//
//   y[l, m, n] = scale_a[l, m] * scale_b[l, n] * (sum_k a[l, m, k] * b[l, n, k]
//                  - azp[l, m] * azp_adj[l, n] - sums_a[l, m] * azp_b[l, n]) + bias[l, n]
//   out[l, m, n] = activation(y[l, m, n])
//
// Products of int8 are summed, and zero points subtracted, in int32 (modulo 2^32); then float32 with one fused
// multiply-add; then one rounding to the output's dtype. An 8-bit output is quantized with out_scale[l] and
// out_zero_point[l], as quantize.h has it. An int32 output is the sums themselves.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "scaled_mm/terms.h"

namespace jax_qmm {

constexpr int kLongest = INT32_MAX - 4096;    // of the dimensions, which kernels round up to whole tiles
constexpr int64_t kMostWorkspace = 32 << 20;  // bytes that stay in the L2 cache of the larger GPUs

// A vector along M or N with one value for each batch entry and row or column, or fewer: a stride is 0 where the value
// is shared. `data` is null where the operand is absent.
struct Vector {
  void const* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;
  int64_t batch_stride = 0;
  int64_t bytes = 0;
};

template <class T, bool kOfRow>
using VectorOf = Vector;

enum class Activation { kNone, kClamp, kGelu, kSilu };

struct ScaledMm : Terms<true, VectorOf> {
  void const* a;  // (batch, m, k), K contiguous
  void const* b;  // (batch, n, k), K contiguous
  void* out;      // (batch, m, n), N contiguous
  int m, n, k, batch;
  int64_t a_batch_stride, b_batch_stride;  // 0 where one matrix serves the whole batch
  int64_t out_batch_stride;
  DType in;         // kS8 or kF8E4M3
  DType out_dtype;  // kBF16, kF16, kF32, kS8, kF8E4M3, or kS32 for the raw sums of int8
  bool fast_accum;  // fp8: sum inside the tensor cores' narrow accumulator
  Activation activation;
  float low, high;                   // between which kClamp keeps its results
  Vector out_scale, out_zero_point;  // of 8-bit outputs, one value for each batch entry
  void* workspace;                   // for partial sums
  int64_t workspace_bytes;
};

// Whether it takes a kernel with the full epilogue, and not one with the plain one: terms that the latter lacks, an
// activation, or an 8-bit output.
inline bool needs_full_epilogue(ScaledMm const& p) {
  auto const count_present = [](auto const& terms) {
    int count = 0;
    each_term([&](Vector const& vector) { count += vector.data != nullptr; }, terms);
    return count;
  };
  Terms<false, VectorOf> const& plain = p;
  return count_present(p) > count_present(plain) || p.activation != Activation::kNone || bytes_of(p.out_dtype) == 1;
}

}  // namespace jax_qmm
