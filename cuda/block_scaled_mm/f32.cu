// Products of few rows of float32, whose products and sums are float32: no tensor cores. A lane has the weights that it
// has for them, and its columns of x from the L1 cache.
#include "block_scaled_mm/step.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"

namespace jax_qmm::block_scaled {
namespace {

template <int Bits, int M>
struct ConfigF32 : Config<float, Bits, true, 16, M, (M < 16 ? 2 : 1), 1, 8> {
  static constexpr int kSharedBytes = ConfigF32::kWarpsK * M * ConfigF32::kSumsPitch * 4;
  static constexpr int kBlocksPerSm = 1;
};

struct ScaleAndZero {
  float scale, zero;

  __device__ ScaleAndZero from_lane(int lane) const {
    return {__shfl_sync(~0u, scale, lane), __shfl_sync(~0u, zero, lane)};
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads) f32_kernel(Params p) {
  constexpr int kM = C::kTileM, kTiles = C::kTiles, kHeld = C::kHeld;
  extern __shared__ __align__(128) uint8_t shared[];
  int const first_n = blockIdx.x % p.tiles_n * C::kRows, l = blockIdx.x / p.tiles_n;
  int const warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  begin();
  SourceOfWeights<C> weights(p, l, first_n, warp, 0, p.k);
  Held<C> held = {}, next = {};
  weights.load(held);
  int column = warp * C::kColumns + 2 * member;
  float const* const x = static_cast<float const*>(p.x) + l * p.x_batch_stride;
  float acc[kTiles][2][kM] = {};

  int const steps = (p.k + C::kStep - 1) / C::kStep;
#pragma unroll 1
  for (int step = 0; step < steps && column - 2 * member < p.k; ++step) {
    weights.load(next);
    ScaleAndZero terms[kTiles][2][kHeld];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int u = 0; u < kHeld; ++u) {
          uint32_t const zero = held.zeros[i][h][u];
          bool const integers = p.zero_point.dtype == DType::kS8;
          terms[i][h][u] = {to_float(held.scales[i][h][u], p.scale.dtype),
                            integers ? float(int8_t(zero)) : to_float(zero, p.zero_point.dtype)};
        }
      }
    }
    unroll<C::kColumns / 32>([&](auto piece) {
      constexpr int kBegin = 32 * decltype(piece)::value;
      ScaleAndZero unit_terms[2][kTiles][2];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          take_terms<C, kBegin>(terms[i][h], unit_terms[0][i][h], unit_terms[1][i][h]);
        }
      }
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {  // of 8 columns, of which this lane has two
        float pairs[kTiles][2][2];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            auto const& [scale, zero] = unit_terms[chunk / 2][i][h];
            uint32_t const word = held.words[i][h][C::kBits == 8 ? kBegin / 16 + chunk / 2 : kBegin / 32];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              int const at = C::kBits == 8 ? chunk % 2 * 2 + c : chunk + 4 * c;
              pairs[i][h][c] = (to_float<C::kBits>(word, at) - zero) * scale;
            }
          }
        }
        int const k = column + kBegin + 8 * chunk;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float const value = m < p.m && k + c < p.k ? x[int64_t(m) * p.k + k + c] : 0;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
              for (int h = 0; h < 2; ++h) acc[i][h][m] = fmaf(value, pairs[i][h][c], acc[i][h][m]);
            }
          }
        }
      }
    });
    held = next;
    column += C::kStep;
  }

  auto* const partial = reinterpret_cast<float*>(shared);  // [warps][rows of x][rows of weights]
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float sum = acc[i][h][m];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (member == 0) partial[(warp * kM + m) * C::kSumsPitch + 16 * i + 8 * h + group] = sum;
      }
    }
  }
  __syncthreads();
  write_sums<C>(p, l, 0, first_n, partial);
}

template <class C>
cudaError_t prepare_f32(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(f32_kernel<C>), {{}, C::kThreads, C::kSharedBytes}, fits);
}

template <class C>
cudaError_t launch_f32(BlockScaledMm const& problem, int, Submit const& submit) {
  Params const params = make_params<C>(problem);
  unsigned const blocks = params.tiles_n * unsigned(problem.batch);
  return jax_qmm::launch(submit, {blocks, C::kThreads, C::kSharedBytes}, f32_kernel<C>, params);
}

template <int kBits, int kM>
Instance instance() {
  using C = ConfigF32<kBits, kM>;
  Instance i = describe<C>(DType::kF32);
  i.prepare = prepare_f32<C>;
  i.launch = launch_f32<C>;
  return i;
}

}  // namespace

void add_f32_instances(std::vector<Instance>& to) {
  to.insert(to.end(), {instance<4, 1>(), instance<4, 4>(), instance<4, 8>(), instance<4, 16>(), instance<8, 1>(),
                       instance<8, 4>(), instance<8, 8>(), instance<8, 16>()});
}

}  // namespace jax_qmm::block_scaled
