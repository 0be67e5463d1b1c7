// The arithmetic of the epilogue, shared by all kernels, and its operands as a kernel sees them.
#pragma once

#include <type_traits>

#include "scaled_mm/output.cuh"
#include "scaled_mm/problem.h"

namespace jax_qmm {

constexpr int kLine = 128;  // bytes of a line of the L2 cache, and of a row of a swizzled tile

// Brings a line into L2. Legal before the kernel that writes it is done: L2 is where all SMs see each other's writes.
__device__ inline void prefetch_l2(void const* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// The first lines of each row, by the first `threads` of all blocks together.
__device__ inline void prefetch_l2(void const* data, unsigned rows, unsigned lines, int64_t row_stride,
                                   unsigned threads) {
  unsigned const block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  unsigned const all = gridDim.x * gridDim.y * gridDim.z * threads;
  for (unsigned i = block * threads + threadIdx.x; i < rows * lines; i += all) {
    char const* const row = static_cast<char const*>(data) + i / lines * row_stride;
    prefetch_l2(row + i % lines * kLine);
  }
}

// A vector operand of any of its dtypes, or the value that stands for an absent one.
template <class T, bool kAlongRows>
struct VectorArg {
  static constexpr bool kOfRow = kAlongRows;
  void const* data;
  DType dtype;
  int64_t stride, batch_stride, bytes;
  T absent;

  // So that the epilogue doesn't wait for memory at a kernel's end.
  __device__ void prefetch(unsigned threads) const {
    prefetch_l2(data, (bytes + kLine - 1) / kLine, 1, kLine, threads);
  }

  // Calls `use` with a pointer to what the data are, unless they are absent.
  template <class Use>
  __device__ void with_data(Use use) const {
    if (data == nullptr) return;
    if constexpr (std::is_integral_v<T>) {
      use(static_cast<T const*>(data));
    } else {
      switch (dtype) {
        case DType::kBF16:
          return use(static_cast<__nv_bfloat16 const*>(data));
        case DType::kF16:
          return use(static_cast<__half const*>(data));
        default:
          return use(static_cast<float const*>(data));
      }
    }
  }

  __device__ T load(int l, int i) const {
    T value = absent;
    with_data([&](auto const* values) { value = T(values[l * batch_stride + i * stride]); });
    return value;
  }
  template <bool kRows>
  __device__ void load_if(T& value, int l, int i) const {
    if constexpr (kRows == kOfRow) value = load(l, i);
  }
};

// Unsigned, because overflow is defined there: only the whole sum must fit int32, not what it is made of.
__device__ inline int32_t add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
__device__ inline float add(float a, float b) { return a + b; }

// Kernel arguments of a PlainOutput or FullOutput, which is that of one entry of the batch.
template <bool kFull>
struct OutputArg {
  DType dtype;

  __device__ void prefetch(unsigned) const {}
  __device__ PlainOutput of(float, int32_t) const { return {dtype}; }
  __device__ PlainOutput at(int) const { return {dtype}; }
};

template <>
struct OutputArg<true> {
  DType dtype;
  Activation activation;
  float low, high;
  VectorArg<float, false> scale;
  VectorArg<int32_t, false> zero_point;

  __device__ void prefetch(unsigned threads) const {
    scale.prefetch(threads);
    zero_point.prefetch(threads);
  }
  __device__ FullOutput of(float scale, int32_t zero_point) const {
    quantize::AnyDivisor const divisor(scale);
    float reach = INFINITY;
    if (bytes_of(dtype) == 1 && divisor.of.quick) {  // beyond it all saturates, with any zero point
      reach = (fabsf(float(zero_point)) <= 0x1p21f ? 0x1p22f : 0x1p40f) * fabsf(scale);
    }
    auto const within = [&](float bound) { return fminf(fmaxf(bound, -reach), reach); };
    bool const is_curve = activation == Activation::kGelu || activation == Activation::kSilu;
    bool const is_usual = !is_curve && zero_point == 0 && divisor.factor == 1;
    return {dtype, activation, within(low), within(high), divisor, float(zero_point), is_usual};
  }
  __device__ FullOutput at(int l) const { return of(scale.load(l, 0), zero_point.load(l, 0)); }
};

// All that a kernel's epilogue takes besides the sums.
template <bool kFull>
struct EpilogueArgs : Terms<kFull, VectorArg> {
  OutputArg<kFull> output;

  __device__ void prefetch(unsigned threads) const {
    each_term([&](auto const& vector) { vector.prefetch(threads); }, *this);
    output.prefetch(threads);
  }

  __device__ bool has_zero_points() const {
    bool found = this->azp.data != nullptr || this->azp_adj.data != nullptr;
    if constexpr (kFull) found |= this->sums_a.data != nullptr || this->azp_b.data != nullptr;
    return found;
  }

  // The terms of a row, and of a column.
  __device__ void load_row(int l, int m, Terms<kFull, Value>& terms) const {
    each_term([&](auto& value, auto const& from) { from.template load_if<true>(value, l, m); }, terms, *this);
  }
  __device__ void load_column(int l, int n, Terms<kFull, Value>& terms) const {
    each_term([&](auto& value, auto const& from) { from.template load_if<false>(value, l, n); }, terms, *this);
  }
  __device__ Terms<kFull, Value> load(int l, int m, int n) const {
    return map_terms<Value>([&](auto const& from) { return from.load(l, from.kOfRow ? m : n); }, *this);
  }
};

template <bool kFull>
EpilogueArgs<kFull> epilogue_args(ScaledMm const& p) {
  EpilogueArgs<kFull> args{};
  auto const fill = [](auto& arg, Vector const& v, auto absent) {
    arg = {v.data, v.dtype, v.stride, v.batch_stride, v.bytes, absent};
  };
  each_term(fill, args, p, kAbsent);
  args.output.dtype = p.out_dtype;
  if constexpr (kFull) {
    bool const clamps = p.activation == Activation::kClamp;
    args.output.activation = p.activation;
    args.output.low = clamps ? p.low : -INFINITY, args.output.high = clamps ? p.high : INFINITY;
    fill(args.output.scale, p.out_scale, 1.0f);
    fill(args.output.zero_point, p.out_zero_point, 0);
  }
  return args;
}

}  // namespace jax_qmm
