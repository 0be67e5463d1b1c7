// A product of f16 matrices as one would write it for sm_90a: a warp that loads by TMA, a warpgroup of wgmma, mbarriers
// between them; a copy through shared memory; A in registers. Right and broken in the ways that checks are for. Usage:
// broken90 MODE; 0, 10, 13, 20 to 27 and 40 to 42 are right.
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int kTile = 64, kK = 64, kStages = 2, kBytes = kTile * kK * 2;

__device__ uint32_t address(void const* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ void init(uint64_t* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(count));
}
__device__ void expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(b)), "r"(bytes) : "memory");
}
__device__ void arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(b)) : "memory");
}
__device__ void wait(uint64_t* b, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra "
      "AGAIN;\nDONE:\n}" ::"r"(address(b)),
      "r"(parity)
      : "memory");
}
__device__ void load(void* to, CUtensorMap const* map, int k, int row, uint64_t* b) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          address(to)),
      "l"(map), "r"(k), "r"(row), "r"(address(b))
      : "memory");
}
__device__ uint64_t descriptor(void const* p) {
  return uint64_t(address(p) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

template <int kMode>
__global__ void __launch_bounds__(160)
    product(__grid_constant__ CUtensorMap const map_a, __grid_constant__ CUtensorMap const map_b, float* c, int m,
            int n, int k) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t *const a = memory, *const b = memory + kStages * kBytes;
  uint64_t *const full = reinterpret_cast<uint64_t*>(memory + 2 * kStages * kBytes), *const empty = full + kStages;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) init(&full[s], kMode == 7 ? 2 : 1), init(&empty[s], 128);
    if (kMode != 11) asm volatile("fence.mbarrier_init.release.cluster;");
  }
  if (kMode != 12) __syncthreads();
  int const tiles = (k + kK - 1) / kK;
  if (warp == 4) {
    if (lane == 0) {
      for (int i = 0; i < tiles; ++i) {
        int const s = i % kStages, turn = i / kStages;
        if (turn > 0 && kMode != 6) wait(&empty[s], (turn - 1) & 1);
        expect(&full[s], kMode == 3 ? kBytes : 2 * kBytes);
        load(a + s * kBytes, &map_a, i * kK, blockIdx.x * kTile, &full[s]);
        load(b + s * kBytes, &map_b, i * kK, blockIdx.y * kTile, &full[s]);
      }
    }
    return;
  }
  float acc[32];
  for (int i = 0; i < 32; ++i) acc[i] = 0;
  for (int i = 0; i < tiles; ++i) {
    int const s = i % kStages;
    if (kMode != 1) wait(&full[s], (i / kStages & 1) ^ (kMode == 2));
    if (kMode == 13 || kMode == 14) {  // ordinary stores to what TMA brought
      uint32_t volatile* const words = reinterpret_cast<uint32_t*>(a + s * kBytes);
      for (int j = threadIdx.x; j < kBytes / 4; j += 128) words[j] = words[j];
      if (kMode == 13) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync 1, 128;" ::: "memory");
    }
    if (kMode == 10)
      for (int j = 0; j < 32; ++j) asm volatile("mul.f32 %0, %0, 0f3F800000;" : "+f"(acc[j]));
    if (kMode != 8) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    if (kMode == 9)
      for (int j = 0; j < 32; ++j) asm volatile("mul.f32 %0, %0, 0f3F800000;" : "+f"(acc[j]));
#pragma unroll
    for (int step = 0; step < kK; step += 16) {
      uint64_t const da = descriptor(a + s * kBytes + step * 2), db = descriptor(b + s * kBytes + step * 2);
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
          "29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
          : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
            "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]),
            "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]),
            "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]),
            "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
          : "l"(da), "l"(db));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (kMode == 5) arrive(&empty[s]);
    if (kMode != 4) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (kMode != 5) arrive(&empty[s]);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    int const row = blockIdx.x * kTile + warp * 16 + lane / 4 + 8 * (i / 2 % 2),
              column = blockIdx.y * kTile + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (row < m && column < n) c[int64_t(row) * n + column] = acc[i];
  }
}

// A copy by way of shared memory: what ordinary threads wrote there goes out by TMA.
template <int kMode>
__global__ void __launch_bounds__(128) copy(uint4 const* in, uint4* out) {
  constexpr int kAll = 128 * 16;
  __shared__ __align__(128) uint4 buffer[128];
  __shared__ uint64_t loaded;
  int const t = threadIdx.x, lane = t % 32, from = kMode == 38 ? t ^ blockIdx.x : t;  // 26, 38: two blocks store there
  constexpr bool async = kMode == 22 || kMode == 32, matrix = kMode == 23 || kMode == 33,
                 load = kMode == 24 || kMode == 34, single = kMode == 25 || kMode == 35;
  auto fence = [] { asm volatile("fence.proxy.async;" ::: "memory"); };
  if (load) {
    if (t == 0) {
      init(&loaded, 1);
      asm volatile("fence.mbarrier_init.release.cluster;");
    }
    buffer[t] = {};
    if (kMode == 24) fence();
    __syncthreads();
    if (t == 0) {
      expect(&loaded, kAll);
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       address(buffer)),
                   "l"(in), "r"(kAll), "r"(address(&loaded))
                   : "memory");
    }
    wait(&loaded, 0);
    uint4 const v = buffer[t];
    buffer[t] = v;
    fence();
  } else if (kMode == 27 || kMode == 39) {  // who waits for cp.async fences it
    if (t == 0) {
      init(&loaded, 128);
      asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(&buffer[t])), "l"(in + t) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(&loaded)) : "memory");
    wait(&loaded, 0);
    if (kMode == 27) fence();
  } else if (async) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(&buffer[t])), "l"(in + t) : "memory");
    if (kMode == 32) fence();  // too early
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (kMode == 22) fence();
  } else if (matrix) {
    uint32_t const* const words = reinterpret_cast<uint32_t const*>(in) + t / 32 * 128 + lane;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address(&buffer[t])),
                 "r"(words[0]), "r"(words[32]), "r"(words[64]), "r"(words[96])
                 : "memory");
    if (kMode == 23) fence();
  } else if (single) {  // one warp, of which one lane fences
    for (int i = lane; t < 32 && i < 128; i += 32) buffer[i] = in[i];
    if (kMode == 25 || t == 0) fence();
  } else {
    if (kMode == 31) fence();  // too early
    buffer[t] = in[from];
    if (kMode == 20 || kMode == 21 || kMode == 26 || kMode == 38) fence();
  }
  if (kMode == 36 && t != 0) fence();
  if (single)
    __syncwarp();
  else
    __syncthreads();
  if (kMode == 37 && t == 0) fence();  // of a thread that did not write
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out), "r"(address(buffer)),
                 "r"(kAll)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}

template <int kMode>
int run_copy() {
  std::vector<uint32_t> in(512), out(512);
  for (int i = 0; i < 512; ++i) in[i] = i * 2654435761u;
  uint4* d;
  cudaMalloc(&d, 4096);
  cudaMemcpy(d, in.data(), 2048, cudaMemcpyHostToDevice);
  copy<kMode><<<kMode == 26 || kMode == 38 ? 2 : 1, 128>>>(d, d + 128);
  cudaError_t const e = cudaDeviceSynchronize();
  cudaMemcpy(out.data(), d + 128, 2048, cudaMemcpyDeviceToHost);
  std::printf("mode %d: %s, %s\n", kMode, cudaGetErrorString(e), in == out ? "right" : "wrong");
  return in != out || e;
}

// 64 x 16 by 16 x 8 twice, with A in registers.
template <int kMode>
__global__ void __launch_bounds__(128) fragments(uint32_t const* a, uint32_t const* b, float* c) {
  __shared__ __align__(128) uint32_t tile[128];  // 16 rows, of which 8 are used but by 52: tiles of 8 rows by 16 bytes
  int const t = threadIdx.x, lane = t % 32, row = t / 32 * 16 + lane / 4;
  tile[t] = t < 64 ? b[t % 32 / 4 * 8 + t / 32 * 4 + t % 4] : 0;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  uint32_t const volatile* const from = a + row * 8 + lane % 4;
  uint64_t const d = uint64_t(address(tile) >> 4) | uint64_t(128 >> 4) << 16 | uint64_t(256 >> 4) << 32;
  float acc[8] = {};
  uint32_t f[4];
  auto load = [&] { f[0] = from[0], f[1] = from[64], f[2] = from[4], f[3] = from[68]; };
  auto fence = [] { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); };
  auto wait = [] { asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory"); };
  auto multiply = [&] {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(d));
  };
  auto multiply_wide = [&] {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, 1, 1, 1, "
        "0;"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7])
        : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(d));
  };
  if (kMode != 50) load();
  fence();
  if (kMode == 50) load();  // after the fence
  multiply();
  if (kMode == 41 || kMode == 51) {  // loaded again
    wait();
    load();
    if (kMode == 41) fence();
  }
  if (kMode == 42) fence();
  if (kMode == 42 || kMode == 52)
    multiply_wide();  // another shape
  else
    multiply();
  wait();
  for (int i = 0; i < 4; ++i) c[(row + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2] = acc[i];
}

template <int kMode>
int run_fragments() {
  std::vector<__half> a(64 * 16), b(8 * 16);
  for (int i = 0; i < 64 * 16; ++i) a[i] = __float2half(float(i * 37 % 17 - 8));
  for (int i = 0; i < 8 * 16; ++i) b[i] = __float2half(float(i * 29 % 13 - 6));
  std::vector<float> c(64 * 8);
  uint8_t* p;
  cudaMalloc(&p, 8192);
  cudaMemcpy(p, a.data(), 2048, cudaMemcpyHostToDevice), cudaMemcpy(p + 2048, b.data(), 256, cudaMemcpyHostToDevice);
  fragments<kMode><<<1, 128>>>(reinterpret_cast<uint32_t*>(p), reinterpret_cast<uint32_t*>(p + 2048),
                               reinterpret_cast<float*>(p + 4096));
  cudaError_t const e = cudaDeviceSynchronize();
  cudaMemcpy(c.data(), p + 4096, 2048, cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (int i = 0; i < 64 * 8; ++i) {
    float want = 0;
    for (int l = 0; l < 16; ++l) want += 2 * __half2float(a[i / 8 * 16 + l]) * __half2float(b[i % 8 * 16 + l]);
    wrong += c[i] != want;
  }
  std::printf("mode %d: %s, %d of 512 wrong\n", kMode, cudaGetErrorString(e), wrong);
  return wrong || e;
}

CUtensorMap make(void* p, int rows, int k) {
  void* function;
  cudaDriverEntryPointQueryResult status;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, 0, &status);
  CUtensorMap map;
  cuuint64_t const size[] = {cuuint64_t(k), cuuint64_t(rows)}, stride[] = {cuuint64_t(k) * 2};
  cuuint32_t const box[] = {kK, kTile}, steps[] = {1, 1};
  reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, p, size, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
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
  int const shared = 2 * kStages * kBytes + 2 * kStages * 8;
  cudaFuncSetAttribute(product<kMode>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  product<kMode><<<dim3((m + 63) / 64, (n + 63) / 64), 160, shared>>>(make(da, m, k), make(db, n, k), dc, m, n, k);
  cudaError_t const e = cudaDeviceSynchronize();
  cudaMemcpy(c.data(), dc, m * n * 4, cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (int i = 0; i < m * n; ++i) wrong += c[i] != want[i];
  std::printf("mode %d: %s, %d of %d wrong\n", kMode, cudaGetErrorString(e), wrong, m * n);
  return wrong || e;
}

int main(int count, char** arguments) {
  int const mode = count > 1 ? std::atoi(arguments[1]) : 0, m = count > 2 ? std::atoi(arguments[2]) : 100,
            n = count > 3 ? std::atoi(arguments[3]) : 75, k = count > 4 ? std::atoi(arguments[4]) : 328;
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
    case 10:
      return run<10>(m, n, k);
    case 11:
      return run<11>(m, n, k);
    case 12:
      return run<12>(m, n, k);
    case 13:
      return run<13>(m, n, k);
    case 14:
      return run<14>(m, n, k);
    case 20:
      return run_copy<20>();
    case 21:
      return run_copy<21>();
    case 22:
      return run_copy<22>();
    case 23:
      return run_copy<23>();
    case 24:
      return run_copy<24>();
    case 25:
      return run_copy<25>();
    case 30:
      return run_copy<30>();
    case 31:
      return run_copy<31>();
    case 32:
      return run_copy<32>();
    case 33:
      return run_copy<33>();
    case 34:
      return run_copy<34>();
    case 35:
      return run_copy<35>();
    case 36:
      return run_copy<36>();
    case 37:
      return run_copy<37>();
    case 26:
      return run_copy<26>();
    case 27:
      return run_copy<27>();
    case 39:
      return run_copy<39>();
    case 38:
      return run_copy<38>();
    case 40:
      return run_fragments<40>();
    case 41:
      return run_fragments<41>();
    case 42:
      return run_fragments<42>();
    case 50:
      return run_fragments<50>();
    case 51:
      return run_fragments<51>();
    case 52:
      return run_fragments<52>();
    default:
      return run<0>(m, n, k);
  }
}
