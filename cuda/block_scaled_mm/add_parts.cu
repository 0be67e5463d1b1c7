// Adds the sums of the parts of K in their order, so that a result is the same in every run, and finishes the product.
#include "block_scaled_mm/instances.h"
#include "block_scaled_mm/sources.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"

namespace jax_qmm::block_scaled {
namespace {

constexpr int kThreads = 128;

struct NoTiles {
  static constexpr int kTileM = 1, kRows = 1, kUnit = 1;
};

__global__ void __launch_bounds__(kThreads) add_parts_kernel(Params p, int parts) {
  begin();
  int64_t const i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.sums_of_part) return;
  float sum = p.parts[i];
  for (int part = 1; part < parts; ++part) sum += p.parts[part * p.sums_of_part + i];
  int const l = int(i / p.n / p.m), n = int(i % p.n), integer = 0;
  float const y = sum + p.bias.load(l, n);
  auto const write = [&](auto bits) {
    using Bits = decltype(bits);
    static_cast<Bits*>(p.out)[i] = p.output().round<Bits, 1>(&y, &integer);
  };
  bytes_of(p.out_dtype) == 2 ? write(BitsOf<2>()) : write(BitsOf<4>());
}

}  // namespace

cudaError_t prepare_add_parts() {
  bool fits;
  return prepare_kernel(reinterpret_cast<void const*>(add_parts_kernel), {1, kThreads}, fits);
}

cudaError_t add_parts(BlockScaledMm const& problem, int parts, Submit const& submit) {
  Params params = make_params<NoTiles>(problem);
  params.parts = static_cast<float*>(problem.workspace);
  unsigned const blocks = unsigned(ceil_div(params.sums_of_part, kThreads));
  return launch(submit, {blocks, kThreads}, add_parts_kernel, params, parts);
}

}  // namespace jax_qmm::block_scaled
