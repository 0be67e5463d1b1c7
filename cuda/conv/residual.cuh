// What a convolution adds to its results before the activation: a tensor of their shape, float or int8. Kernels exist
// with it and without: one for both had up to a fifth more instructions in its main loop, for want of registers.
#pragma once

#include <algorithm>

#include "conv/conv.h"
#include "scaled_mm/add_nothing.cuh"
#include "scaled_mm/epilogue.cuh"

namespace jax_qmm::conv {

// Of one entry of the batch.
struct Residual {
  uint8_t const* data;
  DType dtype;
  bool loads_whole;  // whether as many values as a thread writes at once are aligned
  float scale;       // of int8
  int32_t zero_point;

  __device__ float scaled(int32_t value, float y) const { return fmaf(scale, float(value - zero_point), y); }

  // Adds those of N neighbours in a row, of which the first `there` exist, to their float32 results.
  template <int N>
  __device__ void operator()(float (&values)[N], int64_t at, int there) const {
    switch (dtype) {
      case DType::kS8:
        return add_each<int8_t>(values, at, there, [&](int8_t value, float y) { return scaled(value, y); });
      case DType::kBF16:
        return add_each<__nv_bfloat16>(values, at, there, [](auto value, float y) { return float(value) + y; });
      case DType::kF16:
        return add_each<__half>(values, at, there, [](auto value, float y) { return float(value) + y; });
      default:
        return add_each<float>(values, at, there, [](float value, float y) { return value + y; });
    }
  }

 private:
  template <class T, int N, class Sum>
  __device__ void add_each(float (&values)[N], int64_t at, int there, Sum sum) const {
    struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Whole {
      T of[N];
    } loaded;
    auto const* const from = reinterpret_cast<T const*>(data) + at;
    if (loads_whole && there >= N) {
      loaded = *reinterpret_cast<Whole const*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) loaded.of[i] = i < there ? from[i] : T(0.0f);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = sum(loaded.of[i], values[i]);
  }
};

// The argument of kernels with a residual.
struct ResidualArg {
  void const* data;
  DType dtype;
  bool loads_whole;
  int64_t batch_stride;
  VectorArg<float, false> scale;
  VectorArg<int32_t, false> zero_point;

  // For threads that write so many neighbours at once, in groups of so many columns.
  ResidualArg(Conv const& p, int columns, int at_once)
      : data(p.residual.data), dtype(p.residual.dtype), batch_stride(p.residual.batch_stride) {
    uintptr_t const unit = std::min(16, at_once * bytes_of(dtype));
    loads_whole = (reinterpret_cast<uintptr_t>(data) | uintptr_t(columns) * bytes_of(dtype)) % unit == 0;
    auto const arg = [](Vector const& v, auto absent) {
      return VectorArg<decltype(absent), false>{v.data, v.dtype, v.stride, v.batch_stride, v.bytes, absent};
    };
    scale = arg(p.scale_residual, 1.0f), zero_point = arg(p.zero_point_residual, 0);
  }

  __device__ Residual at(int l) const {
    auto const* const of_entry = static_cast<uint8_t const*>(data) + l * batch_stride * bytes_of(dtype);
    return {of_entry, dtype, loads_whole, scale.load(l, 0), zero_point.load(l, 0)};
  }
};

// That of kernels without one.
struct NoResidual {
  __device__ AddNothing at(int) const { return {}; }
};

// Calls f with the argument of a kernel with the problem's residual, or of one without.
template <class F>
cudaError_t with_residual(Conv const& p, int columns, int at_once, F f) {
  return p.residual.data == nullptr ? f(NoResidual()) : f(ResidualArg(p, columns, at_once));
}

}  // namespace jax_qmm::conv
