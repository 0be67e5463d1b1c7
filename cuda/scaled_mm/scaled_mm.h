// Scaled matrix products of 8-bit operands: all that the FFI handlers and the bindings see of this family.
//
//   out[l, m, n] = scale_a[l, m] * scale_b[l, n] * (sum_k a[l, m, k] * b[l, n, k] - azp[l, m] * azp_adj[l, n]) +
//   bias[l, n]
//
// Products of int8 are summed, and zero points subtracted, in int32 (modulo 2^32); then float32 with one fused
// multiply-add; then one rounding to the output's dtype. An int32 output is the sums themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dtype.h"
#include "launch.h"

namespace jax_qmm {

constexpr int kLongest = INT32_MAX - 4096;  // of the dimensions, which kernels round up to whole tiles

// A vector along M or N with one value for each batch entry and row or column, or fewer: a stride is 0 where the value
// is shared. `data` is null where the operand is absent.
struct Vector {
  void const* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;
  int64_t batch_stride = 0;
  int64_t bytes = 0;
};

struct ScaledMm {
  void const* a;  // (batch, m, k), K contiguous
  void const* b;  // (batch, n, k), K contiguous
  void* out;      // (batch, m, n), N contiguous
  int m, n, k, batch;
  int64_t a_batch_stride, b_batch_stride;  // 0 where one matrix serves the whole batch
  int64_t out_batch_stride;
  DType in;         // kS8 or kF8E4M3
  DType out_dtype;  // kBF16, kF16, kF32, or kS32 for the raw sums of int8
  bool fast_accum;  // fp8: sum inside the tensor cores' narrow accumulator
  Vector scale_a, scale_b, bias, azp, azp_adj;
};

// What will run: an entry of the kernel table, or the kernel for any alignment when `instance` is -1.
struct ScaledMmChoice {
  int instance;
  int swizzle;  // side of the square of tiles that are computed together, for reuse in L2
};

// Chooses a kernel on the host from the shape, the dtypes and the addresses' alignment; launches nothing.
ScaledMmChoice select_scaled_mm(ScaledMm const& problem, int sm_count);

// Everything that can serve the problem, and a choice in words.
std::vector<ScaledMmChoice> scaled_mm_choices(ScaledMm const& problem);
std::string describe_scaled_mm(ScaledMmChoice choice);

// Throws std::invalid_argument where a choice is none of `scaled_mm_choices`.
void check_scaled_mm_choice(ScaledMm const& problem, ScaledMmChoice choice);

// What the cost model takes a kernel's time from.
struct ScaledMmTerms {
  double waves;    // rounds of tiles until all SMs are done
  double k_tiles;  // of each
  double copy_us;  // in which a copy reads and writes as many bytes as the operands and the result have
};

// None where `select_scaled_mm` never chooses this kernel or swizzle.
std::optional<ScaledMmTerms> scaled_mm_terms(ScaledMm const& problem, ScaledMmChoice choice, int sm_count);

// Makes `select_scaled_mm` answer `choice` for problems of these dtypes, this N, K and batch, and an M of more than
// three quarters of this one's up to it, unless a smaller M is tuned or their addresses are not aligned as the kernel
// needs. Checks the choice.
void tune_scaled_mm(ScaledMm const& problem, ScaledMmChoice choice);

// The M of the tuned problem whose choice `select_scaled_mm` answers; none where it has none.
std::optional<int> tuned_scaled_mm(ScaledMm const& problem);
void clear_scaled_mm_tuning();

// Raises the kernels' shared memory limits on the current device; call it once per device, outside of stream capture.
cudaError_t prepare_scaled_mm();

// Submits the one kernel that computes the product on the current device. Empty outputs are legal, and need none.
cudaError_t launch_scaled_mm(ScaledMm const& problem, ScaledMmChoice choice, int sm_count, Submit const& submit);

}  // namespace jax_qmm
