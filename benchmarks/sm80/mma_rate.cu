// The rate of int8 products by warp-level tensor cores with nothing else in the way: a loop of mma.sync alone. Prints
// Tera-operations a second.
//
//   nvcc -std=c++17 -O3 -I cuda -gencode arch=compute_80,code=compute_80 benchmarks/sm80/mma_rate.cu -o mma_rate
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "core/mma.cuh"

namespace {

constexpr int kBlocksPerSm = 2, kThreads = 256, kM = 4, kN = 4, kSteps = 1024, kRuns = 21;

// Each warp multiplies kM by kN fragments of random bits: the power that they draw decides the clock.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) multiply(int steps, int* out) {
  uint32_t a[kM][4], b[kN][2], bits = blockIdx.x * blockDim.x + threadIdx.x + 1;
  auto const random = [&] { return bits = (bits ^ bits >> 15) * 0x2c1b3c6du + 0x297a2d39u; };
  for (auto& fragment : a) {
    for (uint32_t& word : fragment) word = random();
  }
  for (auto& fragment : b) {
    for (uint32_t& word : fragment) word = random();
  }
  int32_t acc[kM][kN][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int i = 0; i < kM; ++i) jax_qmm::mma(acc[i][j], a[i], b[j]);
    }
  }
  int sum = 0;
  for (auto const& row : acc) {
    for (auto const& fragment : row) {
      for (int c : fragment) sum += c;
    }
  }
  if (sum == steps) *out = sum;  // or nothing would need the products
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

}  // namespace

int main() {
  cudaDeviceProp gpu;
  check(cudaGetDeviceProperties(&gpu, 0));
  int* out;
  check(cudaMalloc(&out, sizeof(int)));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  int const blocks = kBlocksPerSm * gpu.multiProcessorCount;
  float milliseconds[kRuns];
  for (float& run : milliseconds) {
    check(cudaEventRecord(begin));
    multiply<<<blocks, kThreads>>>(kSteps * 16, out);
    check(cudaGetLastError());
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&run, begin, end));
  }
  std::sort(milliseconds, milliseconds + kRuns);
  double const products = 16.0 * kSteps * kM * kN * (kThreads / 32) * blocks;
  std::printf("%.1f\n", products * 2 * 16 * 8 * 32 / milliseconds[kRuns / 2] / 1e9);
}
