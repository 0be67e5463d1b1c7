// Products of so few rows of a that reading b is all that counts. A block has 16 rows of b, and its warps take turns at
// K. Every thread has all loads of a turn on their way before it multiplies: registers are where a short kernel gets
// bytes soonest, without barriers or descriptors to set up first. Sums are those of warp-level tensor cores, added up
// in a fixed order.
#include <type_traits>

#include "core/launch.cuh"
#include "core/load.cuh"
#include "core/mma.cuh"
#include "core/prepare.h"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/skinny.h"

namespace jax_qmm {
namespace {

template <bool kFull>
struct Params {
  uint8_t const* a;
  uint8_t const* b;
  void* out;
  int m, n;
  unsigned k;
  int64_t a_batch_stride, b_batch_stride, out_batch_stride;
  EpilogueArgs<kFull> epilogue;
};

template <class Accumulator, class Bits, int Warps, int Steps, int BlocksPerSm, bool kFull>
__global__ void __launch_bounds__(32 * Warps, BlocksPerSm) skinny_kernel(Params<kFull> p) {
  constexpr int kRows = kSkinnyRows, kStep = kSkinnyStep, kTurn = kStep * Steps;
  static_assert(kRows * kSkinnyM <= 32 * Warps, "each result needs a thread");
  __shared__ Accumulator partial[Warps][kSkinnyM][kRows + 2];  // padded: the fragments' stores hit distinct banks

  int const l = blockIdx.y, first = blockIdx.x * kRows;
  unsigned const warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  // Where a thread's 16 bytes of a step begin: four threads share a row. Rows beyond the matrix repeat its last one.
  auto row_of = [&](uint8_t const* matrix, int row, int rows) {
    return matrix + int64_t(min(row, rows - 1)) * p.k + warp * kTurn + 16 * member;
  };
  uint8_t const* top = row_of(p.b + l * p.b_batch_stride, first + group, p.n);
  uint8_t const* bottom = row_of(p.b + l * p.b_batch_stride, first + 8 + group, p.n);
  uint8_t const* const columns = row_of(p.a + l * p.a_batch_stride, group, p.m);
  asm volatile("" : "+l"(top), "+l"(bottom));  // now, not after the wait

  // The result that this thread will write.
  int const row = threadIdx.x % kRows, m = threadIdx.x / kRows, n = first + row;
  bool const writes = m < p.m && m < kSkinnyM && n < p.n;
  Terms<kFull, Value> terms;

  // What the first warps read of b first comes to L2 while the kernel before this one ends. More would delay the rest.
  static_assert(kTurn == kLine);
  if (warp < 4 && warp * kTurn < p.k && member == 0) {
    prefetch_l2(top);
    prefetch_l2(bottom);
  }
  begin();

  Accumulator acc[4] = {};
  for (unsigned done = 0; done == 0 || warp * kTurn + done < p.k; done += Warps * kTurn) {
    uint4 rows[Steps][2] = {}, values[Steps] = {};
#pragma unroll
    for (int s = 0; s < Steps; ++s) {
      if (warp * kTurn + done + s * kStep + 16 * member >= p.k) continue;
      rows[s][0] = load_once(top + done + s * kStep);
      rows[s][1] = load_once(bottom + done + s * kStep);
      if (group < p.m) values[s] = load(columns + done + s * kStep);
    }
    if (done == 0 && writes) {  // so that they come with the first loads
      terms = p.epilogue.load(l, m, n);
    }
#pragma unroll
    for (int s = 0; s < Steps; ++s) {
      // A fragment's K is any 32 bytes, as long as they are the same of both operands.
      uint4 const upper = rows[s][0], lower = rows[s][1];
      uint32_t const low[4] = {upper.x, lower.x, upper.y, lower.y}, high[4] = {upper.z, lower.z, upper.w, lower.w};
      mma(acc, low, {values[s].x, values[s].y});
      mma(acc, high, {values[s].z, values[s].w});
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) partial[warp][2 * member + i % 2][8 * (i / 2) + group] = acc[i];
  __syncthreads();
  if (!writes) return;
  Accumulator sum = 0;
#pragma unroll
  for (int w = 0; w < Warps; ++w) sum = add(sum, partial[w][m][row]);
  float const value = apply(sum, terms);
  auto* const out = static_cast<Bits*>(p.out) + l * p.out_batch_stride + int64_t(m) * p.n + n;
  *out = p.epilogue.output.at(l).template round_one<Bits>(value, sum);
}

template <DType In, int OutBytes, int Warps, int Steps, int BlocksPerSm, bool kFull>
constexpr auto* kKernel = skinny_kernel<std::conditional_t<In == DType::kS8, int32_t, float>, BitsOf<OutBytes>, Warps,
                                        Steps, BlocksPerSm, kFull>;

}  // namespace

template <DType In, int OutBytes, int Warps, int Steps, int BlocksPerSm, bool kFull>
cudaError_t Skinny<In, OutBytes, Warps, Steps, BlocksPerSm, kFull>::prepare(bool& fits) {
  auto* const kernel = kKernel<In, OutBytes, Warps, Steps, BlocksPerSm, kFull>;
  return prepare_kernel(reinterpret_cast<void const*>(kernel), {{}, 32 * Warps}, fits);
}

template <DType In, int OutBytes, int Warps, int Steps, int BlocksPerSm, bool kFull>
cudaError_t Skinny<In, OutBytes, Warps, Steps, BlocksPerSm, kFull>::launch(ScaledMm const& p, int, Gpu const&,
                                                                           Submit const& submit) {
  LaunchShape const shape{dim3((unsigned(p.n) + kSkinnyRows - 1) / kSkinnyRows, p.batch), 32 * Warps};
  return jax_qmm::launch(
      submit, shape, kKernel<In, OutBytes, Warps, Steps, BlocksPerSm, kFull>,
      Params<kFull>{static_cast<uint8_t const*>(p.a), static_cast<uint8_t const*>(p.b), p.out, p.m, p.n, unsigned(p.k),
                    p.a_batch_stride, p.b_batch_stride, p.out_batch_stride, epilogue_args<kFull>(p)});
}

#define MULTISTAGE(...)
#define SKINNY(...) template struct JAX_QMM_SKINNY(__VA_ARGS__);
#include "scaled_mm/instances_sm80.def"

}  // namespace jax_qmm
