// What ordinary CUDA code needs beside tensor cores: each check says where it fails. Usage: language
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace cg = cooperative_groups;

int bad = 0;
#define CHECK(name, condition)                              \
  do {                                                      \
    if (!(condition)) {                                     \
      ++bad;                                                \
      std::printf("FAILED %s (line %d)\n", name, __LINE__); \
    }                                                       \
  } while (0)

template <class T>
struct Device {
  T* p;
  size_t n;
  explicit Device(size_t n) : n(n) {
    cudaMalloc(&p, n * sizeof(T));
    cudaMemset(p, 0, n * sizeof(T));
  }
  Device(std::vector<T> const& v) : Device(v.size()) { cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice); }
  ~Device() { cudaFree(p); }
  std::vector<T> get() {
    std::vector<T> v(n);
    cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost);
    return v;
  }
};

// Integers: every operation on random operands, beside the host's
__global__ void integers(uint32_t const* x, uint32_t const* y, uint64_t* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint32_t a = x[i], b = y[i];
  uint64_t wide = uint64_t(a) << 32 | b;
  uint64_t* o = out + i * 32;
  uint32_t t;
  o[0] = __umulhi(a, b);
  o[1] = uint32_t(__mulhi(int(a), int(b)));
  o[2] = __popc(a);
  o[3] = __clz(a);
  o[4] = __ffs(a);
  o[5] = __brev(a);
  o[6] = __byte_perm(a, b, a ^ b);
  o[7] = __funnelshift_l(a, b, b);
  o[8] = __funnelshift_rc(a, b, a);
  o[9] = uint32_t(__dp4a(int(a), int(b), 7));
  o[10] = __dp4a(a, b, 7u);
  o[11] = wide / (b | 1);
  o[12] = wide % (b | 1);
  o[13] = uint64_t(int64_t(wide) / (int64_t(int32_t(b)) | 1));
  o[14] = __umul64hi(wide, wide * 3);
  o[15] = __usad(a, b, 5);
  o[16] = __popcll(wide);
  o[17] = __clzll(wide >> (a & 63));
  asm("bfe.u32 %0, %1, %2, %3;" : "=r"(t) : "r"(a), "r"(b & 31), "r"(b >> 8 & 31));
  o[18] = t;
  asm("bfe.s32 %0, %1, %2, %3;" : "=r"(t) : "r"(a), "r"(b & 31), "r"(b >> 8 & 31));
  o[19] = t;
  asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(t) : "r"(a), "r"(b), "r"(b & 31), "r"(a & 31));
  o[20] = t;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(t) : "r"(a), "r"(b), "r"(a * b));
  o[21] = t;
  asm("{.reg .u32 lo;\n add.cc.u32 lo, %1, %2;\n addc.u32 %0, %1, 0;}" : "=r"(t) : "r"(a), "r"(b));
  o[22] = t;
  o[23] = uint32_t(int(a) >> (b & 31));
  o[24] = a << (b & 63 ? b & 31 : 0);
  o[25] = uint32_t(int8_t(a)) + uint16_t(b);
  o[26] = uint32_t(max(int(a), int(b)));
  o[27] = min(a, b);
  o[28] = uint32_t(abs(int(a)));
  o[29] = a * b + 3;
  o[30] = uint32_t(int(a) % (int(b) | 1));
  o[31] = uint64_t(int64_t(int(a)) * int(b));
}
void test_integers() {
  int const n = 1000;
  std::mt19937 r(1);
  std::vector<uint32_t> x(n), y(n);
  for (int i = 0; i < n; ++i) x[i] = r() >> (r() % 32), y[i] = r() >> (r() % 32);
  Device<uint32_t> dx(x), dy(y);
  Device<uint64_t> out(n * 32);
  integers<<<(n + 127) / 128, 128>>>(dx.p, dy.p, out.p, n);
  CHECK("integers run", cudaDeviceSynchronize() == cudaSuccess);
  auto const o = out.get();
  int wrong[32] = {};
  for (int i = 0; i < n; ++i) {
    uint32_t a = x[i], b = y[i];
    uint64_t wide = uint64_t(a) << 32 | b, w[32];
    w[0] = uint64_t(a) * b >> 32;
    w[1] = uint32_t(int64_t(int(a)) * int(b) >> 32);
    w[2] = __builtin_popcount(a);
    w[3] = a ? __builtin_clz(a) : 32;
    w[4] = __builtin_ffs(a);
    uint32_t rev = 0;
    for (int j = 0; j < 32; ++j) rev |= (a >> j & 1) << (31 - j);
    w[5] = rev;
    uint64_t both = uint64_t(b) << 32 | a;
    uint32_t perm = 0;
    for (int j = 0; j < 4; ++j) perm |= uint32_t(both >> (8 * ((a ^ b) >> (4 * j) & 7)) & 0xff) << (8 * j);
    w[6] = perm;
    w[7] = (b & 31) ? b << (b & 31) | a >> (32 - (b & 31)) : b;
    uint32_t s = a < 32 ? a : 32;
    w[8] = uint32_t(both >> s);
    int d = 7;
    uint32_t du = 7;
    for (int j = 0; j < 4; ++j)
      d += int8_t(a >> 8 * j) * int8_t(b >> 8 * j), du += uint8_t(a >> 8 * j) * uint8_t(b >> 8 * j);
    w[9] = uint32_t(d);
    w[10] = du;
    w[11] = wide / (b | 1);
    w[12] = wide % (b | 1);
    w[13] = uint64_t(int64_t(wide) / (int64_t(int32_t(b)) | 1));
    w[14] = uint64_t((unsigned __int128)wide * (wide * 3) >> 64);
    w[15] = (a > b ? a - b : b - a) + 5;
    w[16] = __builtin_popcountll(wide);
    w[17] = wide >> (a & 63) ? __builtin_clzll(wide >> (a & 63)) : 64;
    uint32_t pos = b & 31, len = b >> 8 & 31;
    w[18] = len ? uint32_t((uint64_t(a) >> pos) & ((1ull << len) - 1)) : 0;
    w[19] =
        len ? uint32_t(int64_t(uint64_t(int64_t(int(a))) << (64 - len - pos > 63 ? 0 : 64 - len - pos)) >> (64 - len))
            : 0;
    uint32_t il = a & 31, mask = il ? uint32_t(((1ull << il) - 1) << pos) : 0;
    w[20] = (b & ~mask) | (a << pos & mask);
    uint32_t c = a * b;
    w[21] = (c & ~(a & b)) | (~c & (a & b));  // 0x6a: (a & b) ^ c
    w[22] = uint32_t(a + (uint64_t(a) + b >> 32));
    w[23] = uint32_t(int(a) >> (b & 31));
    w[24] = a << (b & 63 ? b & 31 : 0);
    w[25] = uint32_t(int8_t(a)) + uint16_t(b);
    w[26] = uint32_t(std::max(int(a), int(b)));
    w[27] = std::min(a, b);
    w[28] = uint32_t(std::abs(int(a)));
    w[29] = a * b + 3;
    w[30] = uint32_t(int(a) % (int(b) | 1));
    w[31] = uint64_t(int64_t(int(a)) * int(b));
    for (int j = 0; j < 32; ++j) wrong[j] += o[i * 32 + j] != w[j];
  }
  for (int j = 0; j < 32; ++j)
    if (wrong[j]) ++bad, std::printf("FAILED integer operation %d: %d of %d\n", j, wrong[j], n);
}

// Floats and conversions
__global__ void floats(float const* x, float const* y, float const* z, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float a = x[i], b = y[i], c = z[i], *o = out + i * 24;
  o[0] = __fmaf_rn(a, b, c);
  o[1] = a / b;
  o[2] = sqrtf(fabsf(a));
  o[3] = __fadd_rz(a, b);
  o[4] = __fmul_ru(a, b);
  o[5] = __fsub_rd(a, b);
  o[6] = __fdiv_rz(a, b);
  o[7] = __half2float(__float2half_rn(a));
  o[8] = __bfloat162float(__float2bfloat16_rn(a));
  o[9] = __int_as_float(__float2int_rn(a));
  o[10] = __int_as_float(__float2int_rz(b));
  o[11] = __uint_as_float(__float2uint_rd(a));
  o[12] = float(double(a) * double(b) + double(c));
  o[13] = rintf(a);
  o[14] = floorf(b);
  o[15] = truncf(a);
  o[16] = fminf(a, b);
  o[17] = fmaxf(a, NAN);
  o[18] = float(__nv_fp8_e4m3(a));
  o[19] = float(__nv_fp8_e5m2(a));
  __half2 h = __hfma2(__floats2half2_rn(a, b), __floats2half2_rn(b, c), __floats2half2_rn(c, a));
  o[20] = __low2float(h);
  o[21] = __high2float(h);
  o[22] = __bfloat162float(__float2bfloat16_rn(a) * __float2bfloat16_rn(b));
  o[23] = float(long(a)) + float(unsigned(fabsf(b)));
}
uint16_t half_bits(float f) {
  __half h = __float2half_rn(f);
  uint16_t b;
  std::memcpy(&b, &h, 2);
  return b;
}
void test_floats() {
  int const n = 2000;
  std::mt19937 r(2);
  std::vector<float> x(n), y(n), z(n);
  auto random = [&] { return std::ldexp(float(int(r() % 2000001) - 1000000) / 1000000, int(r() % 30) - 15); };
  for (int i = 0; i < n; ++i) x[i] = random(), y[i] = random() + 1e-9f, z[i] = random();
  Device<float> dx(x), dy(y), dz(z), out(n * 24);
  floats<<<(n + 127) / 128, 128>>>(dx.p, dy.p, dz.p, out.p, n);
  CHECK("floats run", cudaDeviceSynchronize() == cudaSuccess);
  auto const o = out.get();
  int wrong[24] = {};
  for (int i = 0; i < n; ++i) {
    float a = x[i], b = y[i], c = z[i], w[24];
    auto bits = [](int v) {
      float f;
      std::memcpy(&f, &v, 4);
      return f;
    };
    auto toward_zero = [](double d) {
      float f = float(d);
      return std::fabs(f) > std::fabs(d) ? std::nextafterf(f, 0.0f) : f;
    };
    auto up = [](double d) {
      float f = float(d);
      return f < d ? std::nextafterf(f, INFINITY) : f;
    };
    auto down = [](double d) {
      float f = float(d);
      return f > d ? std::nextafterf(f, -INFINITY) : f;
    };
    w[0] = std::fma(a, b, c);
    w[1] = a / b;
    w[2] = std::sqrt(std::fabs(a));
    w[3] = toward_zero(double(a) + b);
    w[4] = up(double(a) * b);
    w[5] = down(double(a) - b);
    w[6] = toward_zero(double(a) / b);
    w[7] = __half2float(__float2half_rn(a));
    w[8] = __bfloat162float(__float2bfloat16_rn(a));
    w[9] = bits(int(std::nearbyint(a)));
    w[10] = bits(int(b));
    w[11] = bits(int(std::max(0.0f, std::floor(a))));
    w[12] = float(double(a) * double(b) + double(c));
    w[13] = std::nearbyint(a);
    w[14] = std::floor(b);
    w[15] = std::trunc(a);
    w[16] = std::fmin(a, b);
    w[17] = a;
    w[18] = float(__nv_fp8_e4m3(a));
    w[19] = float(__nv_fp8_e5m2(a));
    auto h = [](float f) { return double(__half2float(__float2half_rn(f))); };
    w[20] = __half2float(__double2half(h(a) * h(b) + h(c)));
    w[21] = __half2float(__double2half(h(b) * h(c) + h(a)));
    w[22] = __bfloat162float(
        __float2bfloat16_rn(__bfloat162float(__float2bfloat16_rn(a)) * __bfloat162float(__float2bfloat16_rn(b))));
    w[23] = float(long(a)) + float(unsigned(std::fabs(b)));
    for (int j = 0; j < 24; ++j) wrong[j] += std::memcmp(&o[i * 24 + j], &w[j], 4) != 0;
  }
  for (int j = 0; j < 24; ++j)
    if (wrong[j]) ++bad, std::printf("FAILED float operation %d: %d of %d\n", j, wrong[j], n);
}

// Warps
__global__ void warps(int* out) {
  int lane = threadIdx.x, *o = out + lane;
  unsigned all = 0xffffffff;
  o[0] = __shfl_xor_sync(all, lane * 3, 5);
  o[32] = __shfl_up_sync(all, lane, 3);
  o[64] = __shfl_down_sync(all, lane, 7, 16);
  o[96] = __shfl_sync(all, lane, lane + 1, 8);
  o[128] = __ballot_sync(all, lane % 3 == 0);
  o[160] = __all_sync(all, lane < 32);
  o[192] = __any_sync(all, lane == 40);
  o[224] = __match_any_sync(all, lane % 5);
  int p;
  o[256] = __match_all_sync(all, 7, &p) + p;
  o[288] = __reduce_add_sync(all, lane);
  o[320] = __reduce_max_sync(all, unsigned(lane ^ 13));
  int sum = 0;  // lanes part for different times and meet again
  for (int i = 0; i < lane; ++i) {
    if (i % 2)
      sum += i;
    else
      sum -= 1;
  }
  o[352] = __shfl_xor_sync(all, sum, 1);
  if (lane & 1)
    o[384] = __popc(__activemask());
  else {
    int v = __shfl_sync(0x55555555, lane, 4);
    o[384] = v;
  }
  switch (lane % 6) {
    case 0:
      o[416] = 10;
      break;
    case 1:
      o[416] = 21;
      break;
    case 2:
      o[416] = 35;
      break;
    case 3:
      o[416] = 47;
      break;
    case 4:
      o[416] = 52;
      break;
    default:
      o[416] = 66;
  }
}
void test_warps() {
  Device<int> out(448);
  warps<<<1, 32>>>(out.p);
  CHECK("warps run", cudaDeviceSynchronize() == cudaSuccess);
  auto const o = out.get();
  auto sum = [](int lane) {
    int s = 0;
    for (int i = 0; i < lane; ++i) s += i % 2 ? i : -1;
    return s;
  };
  for (int l = 0; l < 32; ++l) {
    CHECK("shfl_xor", o[l] == (l ^ 5) * 3);
    CHECK("shfl_up", o[32 + l] == (l >= 3 ? l - 3 : l));
    CHECK("shfl_down", o[64 + l] == (l % 16 + 7 < 16 ? l + 7 : l));
    CHECK("shfl", o[96 + l] == l / 8 * 8 + (l + 1) % 8);
    CHECK("ballot", unsigned(o[128 + l]) == 0x49249249u);
    CHECK("all", o[160 + l] == 1);
    CHECK("any", o[192 + l] == 0);
    unsigned m = 0;
    for (int k = 0; k < 32; ++k) m |= unsigned(k % 5 == l % 5) << k;
    CHECK("match_any", unsigned(o[224 + l]) == m);
    CHECK("match_all", o[256 + l] == 0);
    CHECK("reduce_add", o[288 + l] == 496);
    CHECK("reduce_max", o[320 + l] == 31);
    CHECK("divergent loop", o[352 + l] == sum(l ^ 1));
    CHECK("parts of a warp", o[384 + l] == (l & 1 ? 16 : 4));
    int const cases[] = {10, 21, 35, 47, 52, 66};
    CHECK("switch", o[416 + l] == cases[l % 6]);
  }
}

// Atomics, shared memory, barriers, variables, functions, printf
__device__ int counter;
__constant__ int table[4];
__device__ int slots[3] = {5, 6, 7};
__noinline__ __device__ int twice(int x) { return x * 2 + table[x & 3]; }
__global__ void blocks(int* out, float* sums, unsigned long long* wide) {
  __shared__ int histogram[8];
  extern __shared__ int dynamic[];
  if (threadIdx.x < 8) histogram[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&histogram[threadIdx.x % 8], 1);
  dynamic[threadIdx.x] = threadIdx.x;
  int const odd = __syncthreads_count(threadIdx.x & 1);
  if (threadIdx.x < 8) out[blockIdx.x * 8 + threadIdx.x] = histogram[threadIdx.x] + dynamic[255 - threadIdx.x] + odd;
  atomicAdd(&counter, twice(threadIdx.x));
  atomicAdd(sums, 0.5f);
  atomicMax(out + 100, int(threadIdx.x));
  atomicMin(out + 101, -int(threadIdx.x));
  atomicInc(reinterpret_cast<unsigned*>(out + 102), 9);
  atomicAdd(wide, 1ull << 33);
  atomicOr(out + 103, 1 << (threadIdx.x & 31));
  if (threadIdx.x == 7) atomicExch(out + 104, 77);
  int old = atomicCAS(out + 105, 0, 1);
  if (old == 0) atomicAdd(out + 106, 1);
  atomicAdd(reinterpret_cast<__half2*>(out + 107), __floats2half2_rn(1, 2));
  if (blockIdx.x == 0 && threadIdx.x == 33)
    printf("printf of thread %d: %s %.2f %lld\n", int(threadIdx.x), "text", 1.25, 1ll << 40);
  int local[16];
  for (int i = 0; i < 16; ++i) local[i] = i * threadIdx.x;
  if (threadIdx.x == 50) out[108] = local[counter & 15] + slots[1];
}
void test_blocks() {
  int const values[] = {1, 2, 3, 4};
  cudaMemcpyToSymbol(table, values, sizeof(values));
  Device<int> out(128);
  Device<float> sums(1);
  Device<unsigned long long> wide(1);
  blocks<<<3, 256, 1024>>>(out.p, sums.p, wide.p);
  CHECK("blocks run", cudaDeviceSynchronize() == cudaSuccess);
  auto const o = out.get();
  for (int i = 0; i < 24; ++i) CHECK("histogram", o[i] == 32 + 255 - i % 8 + 128);
  int c;
  cudaMemcpyFromSymbol(&c, counter, 4);
  CHECK("device variable, function, constant", c == 3 * (255 * 256 + 640));
  CHECK("atomics", sums.get()[0] == 384 && o[100] == 255 && o[101] == -255 && o[102] == 768 % 10 &&
                       wide.get()[0] == 768ull << 33 && o[103] == -1 && o[104] == 77 && o[106] == 1);
  __half2 h;
  std::memcpy(&h, &o[107], 4);
  CHECK("atomic half2", __low2float(h) == 768 && __high2float(h) == 1536);
}

// Tensor cores: the same matrices by each shape, with fragments as the PTX manual has them
__device__ uint32_t four(int8_t const* x) { return *reinterpret_cast<uint32_t const*>(x); }
__device__ uint32_t two(int8_t const* x) {
  __half2 const h = __floats2half2_rn(x[0], x[1]);
  return reinterpret_cast<uint32_t const&>(h);
}
__global__ void tensor_cores(int8_t const* a, int8_t const* b, float* out) {
  int const group = threadIdx.x / 4, member = threadIdx.x % 4;
  int8_t const *top = a + 32 * group, *bottom = top + 8 * 32, *column = b + 32 * group;
  auto const write = [&](int shape, auto const(&c)[4]) {
    for (int i = 0; i < 4; ++i) out[128 * shape + 8 * (group + i / 2 * 8) + 2 * member + i % 2] = c[i];
  };
  int s[4] = {1, 2, 3, 4};
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(s[0]), "+r"(s[1])
      : "r"(four(top + 4 * member)), "r"(four(column + 4 * member)));
  write(0, s);
  int t[4] = {1, 2, 3, 4};
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(t[0]), "+r"(t[1]), "+r"(t[2]), "+r"(t[3])
      : "r"(four(top + 4 * member)), "r"(four(bottom + 4 * member)), "r"(four(top + 16 + 4 * member)),
        "r"(four(bottom + 16 + 4 * member)), "r"(four(column + 4 * member)), "r"(four(column + 16 + 4 * member)));
  write(1, t);
  float f[4] = {1, 2, 3, 4};
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(f[0]), "+f"(f[1]), "+f"(f[2]), "+f"(f[3])
      : "r"(two(top + 2 * member)), "r"(two(bottom + 2 * member)), "r"(two(column + 2 * member)));
  write(2, f);
  float g[4] = {1, 2, 3, 4};
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(g[0]), "+f"(g[1]), "+f"(g[2]), "+f"(g[3])
      : "r"(two(top + 2 * member)), "r"(two(bottom + 2 * member)), "r"(two(top + 8 + 2 * member)),
        "r"(two(bottom + 8 + 2 * member)), "r"(two(column + 2 * member)), "r"(two(column + 8 + 2 * member)));
  write(3, g);
}
void test_tensor_cores() {
  std::mt19937 r(3);
  std::vector<int8_t> a(16 * 32), b(8 * 32);
  for (int8_t& x : a) x = int8_t(r());
  for (int8_t& x : b) x = int8_t(r());
  Device<int8_t> da(a), db(b);
  Device<float> out(4 * 128);
  tensor_cores<<<1, 32>>>(da.p, db.p, out.p);
  CHECK("tensor cores run", cudaDeviceSynchronize() == cudaSuccess);
  auto const o = out.get();
  struct {
    char const* name;
    int m, k;
  } const shapes[] = {{"m8n8k16 of s8", 8, 16}, {"m16n8k32 of s8", 16, 32}, {"m16n8k8", 16, 8}, {"m16n8k16", 16, 16}};
  for (int s = 0; s < 4; ++s) {
    int wrong = 0;
    for (int i = 0; i < 128; ++i) {
      int const row = i / 8, column = i % 8;
      int sum = 1 + column % 2 + row / 8 * 2;  // what was there before
      for (int k = 0; k < shapes[s].k && row < shapes[s].m; ++k) sum += a[32 * row + k] * b[32 * column + k];
      wrong += o[128 * s + i] != sum;
    }
    CHECK(shapes[s].name, wrong == 0);
  }
}

// A grid that waits for itself, and clusters
__global__ void grid_sync(int* data, int n) {
  auto grid = cg::this_grid();
  for (int i = grid.thread_rank(); i < n; i += grid.size()) data[i] = i;
  grid.sync();
  for (int i = grid.thread_rank(); i < n; i += grid.size()) data[n + i] = data[n - 1 - i];
}
void test_grid() {
  int n = 500;
  Device<int> d(2 * n);
  void* args[] = {&d.p, &n};
  cudaLaunchCooperativeKernel(reinterpret_cast<void const*>(grid_sync), dim3(4), dim3(64), args, 0, nullptr);
  CHECK("grid runs", cudaDeviceSynchronize() == cudaSuccess);
  auto const v = d.get();
  for (int i = 0; i < n; ++i) CHECK("grid sync", v[n + i] == n - 1 - i);
}
__global__ void __cluster_dims__(4, 1, 1) clusters(int* out) {
  __shared__ int mine;
  auto c = cg::this_cluster();
  if (threadIdx.x == 0) mine = 100 + c.block_rank();
  c.sync();
  if (threadIdx.x < 4) out[blockIdx.x * 4 + threadIdx.x] = *c.map_shared_rank(&mine, threadIdx.x);
  c.sync();
}
void test_clusters() {
  Device<int> d(32);
  clusters<<<8, 64>>>(d.p);
  CHECK("clusters run", cudaDeviceSynchronize() == cudaSuccess);
  auto const v = d.get();
  for (int i = 0; i < 32; ++i) CHECK("distributed shared memory", v[i] == 100 + i % 4);
}
__global__ void fails(int x) { assert(x == 1); }

int main() {
  test_integers();
  test_floats();
  test_warps();
  test_blocks();
  test_tensor_cores();
  test_grid();
  test_clusters();
  fails<<<1, 1>>>(2);
  CHECK("assert", cudaDeviceSynchronize() != cudaSuccess);
  std::printf(bad ? "%d FAILED\n" : "all match\n", bad);
  return bad != 0;
}
