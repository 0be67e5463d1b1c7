#include "core/launch.cuh"
#include "core/prepare.h"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/split_k.h"

namespace jax_qmm::sm80 {
namespace {

constexpr int kThreads = 128;
constexpr int kValues = 4;     // of a row, by one thread: 16 bytes of each part
constexpr int kMostParts = 8;  // all of them are on their way at once

struct Params {
  void const* parts;
  void* out;
  int m, n;
  unsigned rows;  // of the batch
  int count, pitch;
  int64_t sums_of_part, out_batch_stride;
  bool stores_whole;  // whether rows of the output start at whole stores
  EpilogueArgs<true> epilogue;
};

template <class Accumulator, class Bits>
__global__ void __launch_bounds__(kThreads) add_parts_kernel(Params p) {
  struct alignas(sizeof(Bits) * kValues) Whole {
    Bits bits[kValues];
  };
  struct alignas(16) Sums {
    Accumulator of[kValues];
  };
  begin();  // what the epilogue needs is in L2 since the kernel before
  unsigned const across = p.pitch / kValues, i = blockIdx.x * kThreads + threadIdx.x;
  unsigned const row = i / across, l = row / p.m, m = row % p.m;
  int const n = i % across * kValues;
  if (row >= p.rows || n >= p.n) return;

  auto const* const from =
      reinterpret_cast<Sums const*>(static_cast<Accumulator const*>(p.parts) + int64_t(row) * p.pitch + n);
  Sums parts[kMostParts];
#pragma unroll
  for (int s = 0; s < kMostParts; ++s) {
    if (s < p.count) parts[s] = from[s * (p.sums_of_part / kValues)];
  }
  Terms<true, Value> terms[kValues];
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    p.epilogue.load_row(l, m, terms[v]);
    if (n + v < p.n) p.epilogue.load_column(l, n + v, terms[v]);
  }
#pragma unroll
  for (int s = 1; s < kMostParts; ++s) {
    if (s >= p.count) break;
#pragma unroll
    for (int v = 0; v < kValues; ++v) parts[0].of[v] = add(parts[0].of[v], parts[s].of[v]);
  }

  Accumulator const(&sums)[kValues] = parts[0].of;
  float values[kValues];
#pragma unroll
  for (int v = 0; v < kValues; ++v) values[v] = apply(sums[v], terms[v]);
  FullOutput const output = p.epilogue.output.at(l);
  Bits* const to = static_cast<Bits*>(p.out) + l * p.out_batch_stride + int64_t(m) * p.n + n;
  if (p.stores_whole) {
    *reinterpret_cast<Whole*>(to) = output.template round<Whole, kValues>(values, sums);
  } else {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (n + v < p.n) to[v] = output.template round_one<Bits>(values[v], sums[v]);
    }
  }
}

auto kernel_for(DType in, int out_bytes) {
  bool const int8 = in == DType::kS8;
  switch (out_bytes) {
    case 1:
      return int8 ? add_parts_kernel<int32_t, uint8_t> : add_parts_kernel<float, uint8_t>;
    case 2:
      return int8 ? add_parts_kernel<int32_t, uint16_t> : add_parts_kernel<float, uint16_t>;
    default:
      return int8 ? add_parts_kernel<int32_t, uint32_t> : add_parts_kernel<float, uint32_t>;
  }
}

}  // namespace

cudaError_t prepare_add_parts() {
  for (DType in : {DType::kS8, DType::kF8E4M3}) {
    for (int out_bytes : {1, 2, 4}) {
      bool fits;
      void const* const kernel = reinterpret_cast<void const*>(kernel_for(in, out_bytes));
      if (cudaError_t const error = prepare_kernel(kernel, {1, kThreads}, fits)) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t add_parts(ScaledMm const& p, int parts, Submit const& submit) {
  int const out_bytes = bytes_of(p.out_dtype);
  uintptr_t const out = reinterpret_cast<uintptr_t>(p.out) | uintptr_t(p.n) * out_bytes;
  Params const params{p.workspace,
                      p.out,
                      p.m,
                      p.n,
                      unsigned(p.batch) * p.m,
                      parts,
                      pitch_of_part(p.n),
                      sums_of_part(p),
                      p.out_batch_stride,
                      out % (out_bytes * kValues) == 0,
                      epilogue_args<true>(p)};
  unsigned const blocks = unsigned(ceil_div(sums_of_part(p) / kValues, kThreads));
  return launch(submit, {blocks, kThreads}, kernel_for(p.in, out_bytes), params);
}

}  // namespace jax_qmm::sm80
