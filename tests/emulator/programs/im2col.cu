// TMA's im2col mode: columns of pixels for each tap of a window, with padding, strides and dilation, on 1 to 3 spatial
// axes and across images, compared with loops. Usage: im2col MODE; 1 to 3 are right, of so many axes, 4 begins outside
// of its box, 5 takes the other mode's map.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int kChannels = 16, kPixels = 24, kColumn = kChannels * kPixels;

// Axes from the innermost, as TMA has them.
struct Window {
  int axes, images, channels;  // channels: of the tensor, of which a column has those from 16 on
  int size[3], taps[3], stride[3], before[3], dilation[3], out[3];
};
__host__ __device__ int product(int const (&of)[3]) { return of[0] * of[1] * of[2]; }

__device__ uint32_t address(void const* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ void load(void* to, CUtensorMap const* map, uint64_t* barrier, Window const& w, int const (&at)[3],
                     int image, uint16_t const (&by)[3]) {
#define LOAD(rank, coordinates, offsets)                                                                             \
  asm volatile("cp.async.bulk.tensor." rank                                                                          \
               ".shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, " coordinates            \
               "}], [%2], "                                                                                          \
               "{" offsets "};" ::"r"(address(to)),                                                                  \
               "l"(map), "r"(address(barrier)), "r"(16), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(image), "h"(by[0]), \
               "h"(by[1]), "h"(by[2])                                                                                \
               : "memory")
  if (w.axes == 1) LOAD("3d", "%4, %7", "%8");
  if (w.axes == 2) LOAD("4d", "%4, %5, %7", "%8, %9");
  if (w.axes == 3) LOAD("5d", "%4, %5, %6, %7", "%8, %9, %10");
#undef LOAD
}

// A block for each tap and column of pixels.
__global__ void copy(__grid_constant__ CUtensorMap const map, Window w, int moved, uint8_t* out) {
  __shared__ __align__(128) uint8_t column[kColumn];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(kColumn)
                 : "memory");
    int at[3], pixel = blockIdx.y * kPixels, tap = blockIdx.x;
    uint16_t by[3];
    for (int d = 0; d < 3; ++d) {
      at[d] = pixel % w.out[d] * w.stride[d] - w.before[d] + moved, pixel /= w.out[d];
      by[d] = tap % w.taps[d] * w.dilation[d], tap /= w.taps[d];
    }
    load(column, &map, &barrier, w, at, pixel, by);
  }
  __syncthreads();
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@p bra DONE;\nbra AGAIN;\n"
      "DONE:\n}" ::"r"(address(&barrier))
      : "memory");
  for (int i = threadIdx.x; i < kColumn; i += blockDim.x) {
    out[(blockIdx.x * gridDim.y + blockIdx.y) * kColumn + i] = column[i];
  }
}

CUtensorMap make_map(Window const& w, void* data, bool im2col) {
  cuuint64_t size[5] = {cuuint64_t(w.channels)}, stride[4] = {size[0]};
  cuuint32_t steps[5] = {1, 1, 1, 1, 1}, box[5] = {kChannels, kPixels, 1, 1, 1};
  int lower[3], upper[3];
  for (int d = 0; d < w.axes; ++d) {
    size[d + 1] = w.size[d], stride[d + 1] = stride[d] * size[d + 1], steps[d + 1] = w.stride[d];
    lower[d] = -w.before[d], upper[d] = (w.out[d] - 1) * w.stride[d] - w.before[d] - (w.size[d] - 1);
  }
  size[w.axes + 1] = w.images;
  CUtensorMap map;
  void* function;
  cudaDriverEntryPointQueryResult status;
  cudaGetDriverEntryPointByVersion(im2col ? "cuTensorMapEncodeIm2col" : "cuTensorMapEncodeTiled", &function, 12000, 0,
                                   &status);
  if (im2col) {
    reinterpret_cast<decltype(&cuTensorMapEncodeIm2col)>(function)(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, w.axes + 2, data, size, stride, lower, upper, kChannels, kPixels, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  } else {
    reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, w.axes + 2, data, size, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  return map;
}

int run(int mode) {
  Window const windows[] = {{1, 3, 32, {13, 1, 1}, {4, 1, 1}, {2, 1, 1}, {3, 0, 0}, {2, 1, 1}, {6, 1, 1}},
                            {2, 3, 48, {7, 9, 1}, {3, 2, 1}, {1, 3, 1}, {1, -1, 0}, {1, 2, 1}, {7, 2, 1}},
                            {3, 2, 32, {6, 5, 4}, {2, 3, 2}, {1, 2, 1}, {1, 0, 1}, {3, 1, 2}, {5, 2, 4}}};
  Window w = windows[mode > 3 ? 1 : mode - 1];
  if (mode == 5) w.stride[1] = 1;  // that tiled maps have
  int const pixels = product(w.out) * w.images, taps = product(w.taps), columns = (pixels + kPixels - 1) / kPixels;
  std::vector<uint8_t> in(product(w.size) * w.images * w.channels), got(taps * columns * kColumn), want = got;
  for (size_t i = 0; i < in.size(); ++i) in[i] = uint8_t(i * 2654435761u >> 24) | 1;
  for (int tap = 0; tap < taps; ++tap) {
    for (int pixel = 0; pixel < pixels; ++pixel) {
      int rest = pixel, rest_of_tap = tap, place = 0, size = 1;
      bool inside = true;
      for (int d = 0; d < 3; ++d) {
        int const x = rest % w.out[d] * w.stride[d] - w.before[d] + rest_of_tap % w.taps[d] * w.dilation[d];
        inside &= x >= 0 && x < w.size[d];
        place += x * size, size *= w.size[d], rest /= w.out[d], rest_of_tap /= w.taps[d];
      }
      for (int c = 0; inside && c < kChannels; ++c)
        want[(tap * columns * kPixels + pixel) * kChannels + c] = in[(rest * size + place) * w.channels + 16 + c];
    }
  }
  uint8_t *d_in, *d_out;
  cudaMalloc(&d_in, in.size()), cudaMalloc(&d_out, got.size());
  cudaMemcpy(d_in, in.data(), in.size(), cudaMemcpyHostToDevice);
  copy<<<dim3(taps, columns), 64>>>(make_map(w, d_in, mode != 5), w, mode == 4 ? -1 : 0, d_out);
  cudaError_t const error = cudaDeviceSynchronize();
  cudaMemcpy(got.data(), d_out, got.size(), cudaMemcpyDeviceToHost);
  std::printf("mode %d: %s, %s\n", mode, cudaGetErrorString(error), got == want ? "right" : "wrong");
  return got != want || error;
}

int main(int count, char** arguments) { return run(count > 1 ? std::atoi(arguments[1]) : 1); }
