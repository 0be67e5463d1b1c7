// A product of f16 matrices as one would write it for sm_80 (cp.async in two stages, ldmatrix, mma.sync), right and
// broken in the ways that checks are for; and sums by way of global and shared memory. Usage: broken MODE; 0 and 20 to
// 23 are right.
#include <cuda_fp16.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int kTile = 64, kK = 32, kPitch = kK + 8;

__device__ void copy16(uint32_t to, void const* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0));
}

template <int kMode>
__global__ void __launch_bounds__(128) product(__half const* a, __half const* b, float* c, int m, int n, int k) {
  __shared__ __align__(16) __half smem_a[2][kTile][kPitch], smem_b[2][kTile][kPitch];
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_m = blockIdx.x * kTile,
            first_n = blockIdx.y * kTile;
  float acc[2][4][4] = {};
  auto load = [&](int stage, int at) {
    for (int i = threadIdx.x; i < kTile * kK / 8; i += 128) {
      int const row = i / (kK / 8), column = i % (kK / 8) * 8;
      bool const in_a = kMode == 1 ? first_m + row <= m : first_m + row < m, in_b = first_n + row < n;
      if (kMode == 7 && !in_b) continue;  // rows that do not exist are not zeroed
      copy16(__cvta_generic_to_shared(&smem_a[stage][row][column]),
             a + (in_a ? int64_t(first_m + row) * k + at + column : 0), in_a && at + column < k);
      copy16(__cvta_generic_to_shared(&smem_b[stage][row][column]),
             b + (in_b ? int64_t(first_n + row) * k + at + column : 0), in_b && at + column < k);
    }
    asm volatile("cp.async.commit_group;");
  };
  load(0, 0);
  for (int at = 0, stage = 0; at < k; at += kK, stage ^= 1) {
    if (at + kK < k)
      load(stage ^ 1, at + kK);
    else
      asm volatile("cp.async.commit_group;");
    if (kMode != 3) asm volatile("cp.async.wait_group %0;" ::"n"(kMode == 8 ? 2 : 1));
    if (kMode == 6) {
      if (lane < 16) __syncthreads();
    } else if (kMode != 2) {
      __syncthreads();
    }
#pragma unroll
    for (int step = 0; step < kK; step += 16) {
      uint32_t fa[2][4], fb[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t const from =
            __cvta_generic_to_shared(&smem_a[stage][warp / 2 * 32 + i * 16 + lane % 16][step + lane / 16 * 8]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(fa[i][0]), "=r"(fa[i][1]), "=r"(fa[i][2]), "=r"(fa[i][3])
                     : "r"(from));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t const from =
            __cvta_generic_to_shared(&smem_b[stage][warp % 2 * 32 + j * 8 + lane % 8][step + lane / 8 % 2 * 8]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                     : "=r"(fb[j][0]), "=r"(fb[j][1])
                     : "r"(from));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          asm volatile(
              "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
              : "+f"(acc[i][j][0]), "+f"(acc[i][j][1]), "+f"(acc[i][j][2]), "+f"(acc[i][j][3])
              : "r"(fa[i][0]), "r"(fa[i][1]), "r"(fa[i][2]), "r"(fa[i][3]), "r"(fb[j][0]), "r"(fb[j][1]));
    }
    if (kMode != 5) __syncthreads();
  }
  float unset;
  if (kMode == 9 && lane == 5) unset = 1;
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 4; ++j)
      for (int h = 0; h < 2; ++h) {
        int const row = first_m + warp / 2 * 32 + i * 16 + h * 8 + lane / 4,
                  column = first_n + warp % 2 * 32 + j * 8 + lane % 4 * 2;
        if (row >= m) continue;
        float* const to = c + int64_t(row) * n + column;
        if (kMode == 4) {
          if (column < n) *reinterpret_cast<float2*>(to) = {acc[i][j][2 * h], acc[i][j][2 * h + 1]};
        } else if (kMode == 9) {
          if (column < n) to[0] = acc[i][j][2 * h] + unset;
        } else {
          if (column < n) to[0] = acc[i][j][2 * h];
          if (column + 1 < n) to[1] = acc[i][j][2 * h + 1];
        }
      }
}

template <int kMode>
int run(int m, int n, int k) {
  std::vector<__half> a(m * k), b(n * k);
  for (int i = 0; i < m * k; ++i) a[i] = __float2half(float(i * 37 % 17 - 8));
  for (int i = 0; i < n * k; ++i) b[i] = __float2half(float(i * 29 % 13 - 6));
  std::vector<float> c(m * n), want(m * n);
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j)
      for (int l = 0; l < k; ++l) want[i * n + j] += __half2float(a[i * k + l]) * __half2float(b[j * k + l]);
  __half *da, *db;
  float* dc;
  cudaMalloc(&da, m * k * 2), cudaMalloc(&db, n * k * 2), cudaMalloc(&dc, m * n * 4);
  cudaMemcpy(da, a.data(), m * k * 2, cudaMemcpyHostToDevice),
      cudaMemcpy(db, b.data(), n * k * 2, cudaMemcpyHostToDevice);
  product<kMode><<<dim3((m + 63) / 64, (n + 63) / 64), 128>>>(da, db, dc, m, n, k);
  cudaError_t const e = cudaDeviceSynchronize();
  cudaMemcpy(c.data(), dc, m * n * 4, cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (int i = 0; i < m * n; ++i) wrong += c[i] != want[i];
  std::printf("mode %d: %s, %d of %d wrong\n", kMode, cudaGetErrorString(e), wrong, m * n);
  return wrong || e;
}

// Sums of each block's 128 numbers, and of all blocks': by the last to count itself.
template <int kMode>
__global__ void __launch_bounds__(128) sum(int const* in, int* partial, unsigned* count, int* out) {
  __shared__ int words[128], last;
  int const t = threadIdx.x, warp = t / 32;
  int volatile* const mine = words + warp * 32;
  mine[t % 32] = in[blockIdx.x * 128 + t];
  for (int step = 16; step > 0; step /= 2) {
    if (kMode != 30) __syncwarp();
    int const other = t % 32 < step ? mine[t % 32 + step] : 0;
    if (kMode != 30) __syncwarp();
    if (t % 32 < step) mine[t % 32] += other;
  }
  __syncthreads();
  if (kMode == 21 || kMode == 31) {  // warps meet in global memory
    if (t % 32 == 0) partial[blockIdx.x * 4 + warp] = words[warp * 32];
    if (kMode == 21) __syncthreads();
    if (t == 0)
      words[0] = partial[blockIdx.x * 4] + partial[blockIdx.x * 4 + 1] + partial[blockIdx.x * 4 + 2] +
                 partial[blockIdx.x * 4 + 3];
  } else if (t == 0) {
    words[0] += words[32] + words[64] + words[96];
  }
  if (t != 0) return;
  if (kMode == 37 && blockIdx.x == 0) *count = 0;  // while others may have counted
  if (kMode == 22) {
    atomicAdd(out, words[0]);
  } else if (kMode == 32) {  // everyone's is stored
    *out = words[0];
  } else if (kMode == 23 || kMode == 33) {  // and the same by everyone
    partial[0] = kMode == 23 ? 1 : words[0] | 1;
    atomicAdd(out, words[0]);
  } else {
    partial[4 * gridDim.x + blockIdx.x] = words[0];
    if (kMode == 34) {  // stores after it was counted
      last = atomicAdd(count, 1) == gridDim.x - 1;
      partial[4 * gridDim.x + blockIdx.x] = words[0];
    } else if (kMode == 35) {  // no one counts
      last = blockIdx.x == gridDim.x - 1;
    } else {
      if (kMode != 36) __threadfence();
      last = atomicAdd(count, 1) == gridDim.x - 1;
      __threadfence();
    }
    if (last) {
      int total = 0;
      for (int i = 0; i < gridDim.x; ++i) total += partial[4 * gridDim.x + i];
      *out = total;
      *count = 0;
    }
  }
}

template <int kMode>
int run_sum() {
  int const blocks = 5;
  std::vector<int> in(blocks * 128);
  int want = 0, got = 0;
  for (int i = 0; i < blocks * 128; ++i) want += in[i] = i * 37 % 101;
  int* d;
  cudaMalloc(&d, 8192);
  cudaMemset(d, 0, 8192);
  cudaMemcpy(d, in.data(), in.size() * 4, cudaMemcpyHostToDevice);
  sum<kMode><<<blocks, 128>>>(d, d + 1024, reinterpret_cast<unsigned*>(d + 2000), d + 2001);
  cudaError_t const e = cudaDeviceSynchronize();
  cudaMemcpy(&got, d + 2001, 4, cudaMemcpyDeviceToHost);
  std::printf("mode %d: %s, %d of %d\n", kMode, cudaGetErrorString(e), got, want);
  return got != want || e;
}

int main(int count, char** arguments) {
  int const mode = count > 1 ? std::atoi(arguments[1]) : 0, m = count > 2 ? std::atoi(arguments[2]) : 100,
            n = count > 3 ? std::atoi(arguments[3]) : 75, k = count > 4 ? std::atoi(arguments[4]) : 104;
  switch (mode) {
    case 1:
      return run<1>(m, n, k);
    case 2:
      return run<2>(m, n, k);
    case 3:
      return run<3>(m, n, k);
    case 4:
      return run<4>(m, n, k);
    case 5:
      return run<5>(m, n, k);
    case 6:
      return run<6>(m, n, k);
    case 7:
      return run<7>(m, n, k);
    case 8:
      return run<8>(m, n, k);
    case 9:
      return run<9>(m, n, k);
    case 20:
      return run_sum<20>();
    case 21:
      return run_sum<21>();
    case 22:
      return run_sum<22>();
    case 23:
      return run_sum<23>();
    case 30:
      return run_sum<30>();
    case 31:
      return run_sum<31>();
    case 32:
      return run_sum<32>();
    case 33:
      return run_sum<33>();
    case 34:
      return run_sum<34>();
    case 35:
      return run_sum<35>();
    case 36:
      return run_sum<36>();
    case 37:
      return run_sum<37>();
    default:
      return run<0>(m, n, k);
  }
}
