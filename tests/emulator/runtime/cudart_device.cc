// Devices, streams, which run at once, events and errors; and of the driver, tensor maps.
#include <cuda.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "cudart.h"

using namespace emu;

namespace {

CUresult bad_map(char const* what) {
  say(std::string("cuTensorMapEncode: ") + what);
  return CUDA_ERROR_INVALID_VALUE;
}

// What maps of both modes have, for boxes that begin with `row` elements.
CUresult encode(CUtensorMap* out, TensorMap& map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                cuuint64_t const* size, cuuint64_t const* stride, cuuint32_t row, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapFloatOOBfill fill) {
  static int const bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // in the order of CUtensorMapDataType
  if (unsigned(type) >= sizeof(bytes) / sizeof(*bytes)) return bad_map("this type is not implemented");
  if (reinterpret_cast<uintptr_t>(address) % 16) return bad_map("the address must be a multiple of 16");
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return bad_map("interleaving is not implemented");
  map.magic = TensorMap::kMagic;
  map.rank = rank, map.element_bytes = bytes[type], map.type = type, map.interleave = interleave, map.fill_nan = fill;
  map.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE  ? 0
                : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 1
                : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 2
                                                       : 3;
  if (unsigned(swizzle) > 3) return bad_map("this swizzle is not implemented");
  map.address = reinterpret_cast<uint64_t>(address);
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (size[d] == 0 || size[d] > (1ull << 32)) return bad_map("a size must be 1 to 2^32");
    map.size[d] = size[d] == (1ull << 32) ? 0xffffffffu : uint32_t(size[d]);
    if (d + 1 < rank) {
      if (stride[d] % 16 || stride[d] >= (1ull << 40)) return bad_map("a stride must be a multiple of 16 below 2^40");
      map.stride[d] = stride[d];
    }
  }
  row *= map.element_bytes;
  if (row % 16) return bad_map("a row of the box must be a multiple of 16 bytes");
  if (map.swizzle && row > (16u << map.swizzle)) return bad_map("a row of the box must fit the swizzle");
  std::memset(out, 0, sizeof(*out));
  std::memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}

CUresult encode_tiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      cuuint64_t const* size, cuuint64_t const* stride, cuuint32_t const* box,
                      cuuint32_t const* element_stride, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  if (rank < 1 || rank > 5) return bad_map("the rank must be 1 to 5");
  TensorMap map{};
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (box[d] == 0 || box[d] > 256) return bad_map("a box's side must be 1 to 256");
    if (element_stride[d] != 1) return bad_map("element strides are not implemented");
    map.box[d] = box[d], map.element_stride[d] = 1;
  }
  return encode(out, map, type, rank, address, size, stride, box[0], interleave, swizzle, fill);
}

CUresult encode_im2col(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                       cuuint64_t const* size, cuuint64_t const* stride, int const* lower, int const* upper,
                       cuuint32_t channels, cuuint32_t pixels, cuuint32_t const* element_stride,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill fill) {
  if (rank < 3 || rank > 5) return bad_map("the rank must be 3 to 5");
  if (channels == 0 || channels > 256) return bad_map("the channels of a pixel must be 1 to 256");
  if (pixels == 0 || pixels > 1024) return bad_map("the pixels of a column must be 1 to 1024");
  int const end = rank == 3 ? 1 << 15 : rank == 4 ? 1 << 7 : 1 << 4;
  TensorMap map{};
  map.im2col = true, map.box[0] = channels, map.box[1] = pixels;
  for (cuuint32_t d = 0; d + 2 < rank; ++d) {
    for (int const corner : {lower[d], upper[d]})
      if (corner < -end || corner >= end) return bad_map("a corner of the box is too far away");
    if (lower[d] >= int64_t(size[d + 1]) + upper[d]) return bad_map("the box of pixels is empty");
    map.lower[d] = lower[d], map.upper[d] = upper[d];
  }
  for (cuuint32_t d = 1; d < rank; ++d) {
    if (element_stride[d] == 0 || element_stride[d] > 8) return bad_map("a stride of elements must be 1 to 8");
    map.element_stride[d] = element_stride[d];
  }
  return encode(out, map, type, rank, address, size, stride, channels, interleave, swizzle, fill);
}

void* driver_entry(std::string const& name) {
  if (name == "cuTensorMapEncodeTiled") return reinterpret_cast<void*>(&encode_tiled);
  if (name == "cuTensorMapEncodeIm2col") return reinterpret_cast<void*>(&encode_im2col);
  return nullptr;
}

using Clock = std::chrono::steady_clock;

}  // namespace

namespace emu {

State::~State() {
  if (!Options::get().stats) return;
  std::ofstream out(Options::get().stats_file);
  out << "[\n";
  for (size_t i = 0; i < stats.size(); ++i) out << stats[i] << (i + 1 < stats.size() ? ",\n" : "\n");
  out << "]\n";
}

State& state() {
  static State s;
  return s;
}

cudaError_t fail(cudaError_t e) {
  if (e != cudaSuccess) state().last = e;
  return e;
}

// Such as 90 and 'a' of "90a".
int capability() {
  static int const value = [] {
    char const* const text = std::getenv("EMU_CC");
    return text != nullptr ? std::atoi(text) : 90;
  }();
  return value;
}

// Few, so that persistent blocks take several tiles of a small product.
int sm_count() {
  static int const value = [] {
    char const* const text = std::getenv("EMU_SMS");
    return text != nullptr ? std::atoi(text) : 8;
  }();
  return value;
}

int attribute(cudaDeviceAttr a) {
  switch (a) {
    case cudaDevAttrMultiProcessorCount:
      return sm_count();
    case cudaDevAttrComputeCapabilityMajor:
      return capability() / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return capability() % 10;
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return INT32_MAX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) -
             attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return (capability() >= 90 ? 228 : capability() == 80 ? 164 : capability() == 75 ? 64 : 100) << 10;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return capability() >= 80 ? 1024 : 0;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return capability() == 75 ? 1024 : 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrL2CacheSize:
      return 50 << 20;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrClusterLaunch:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrConcurrentManagedAccess:
      return 1;
    default:
      return 0;
  }
}

}  // namespace emu

extern "C" {

cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) { return d == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr a, int) {
  *value = attribute(a);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof(*p));
  std::snprintf(p->name, sizeof(p->name), "emulator");
  p->totalGlobalMem = size_t(16) << 30;
  p->sharedMemPerBlock = 48 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = INT32_MAX, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = capability() / 10, p->minor = capability() % 10;
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  p->l2CacheSize = 50 << 20;
  p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = p->clusterLaunch = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  cudaError_t const e = state().last;
  return e;
}
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
cudaError_t cudaDeviceGetLimit(size_t* v, cudaLimit) {
  *v = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* s) {
  *s = reinterpret_cast<cudaStream_t>(new int);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return cudaStreamCreate(s); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  delete reinterpret_cast<int*>(s);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaDeviceSynchronize(); }
cudaError_t cudaStreamQuery(cudaStream_t) { return state().last; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) {
  *e = reinterpret_cast<cudaEvent_t>(new Clock::time_point);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
  *reinterpret_cast<Clock::time_point*>(e) = Clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return state().last; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = std::chrono::duration<float, std::milli>(*reinterpret_cast<Clock::time_point*>(b) -
                                                 *reinterpret_cast<Clock::time_point*>(a))
            .count();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete reinterpret_cast<Clock::time_point*>(e);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  cudaError_t const e = state().last;
  state().last = cudaSuccess;
  return e;
}
cudaError_t cudaPeekAtLastError() { return state().last; }
char const* cudaGetErrorName(cudaError_t e) {
  switch (e) {
#define NAME(x) \
  case x:       \
    return #x
    NAME(cudaSuccess);
    NAME(cudaErrorInvalidValue);
    NAME(cudaErrorMemoryAllocation);
    NAME(cudaErrorInvalidConfiguration);
    NAME(cudaErrorInvalidSymbol);
    NAME(cudaErrorInvalidDeviceFunction);
    NAME(cudaErrorInvalidDevice);
    NAME(cudaErrorInvalidPtx);
    NAME(cudaErrorIllegalAddress);
    NAME(cudaErrorLaunchFailure);
    NAME(cudaErrorInvalidClusterSize);
    NAME(cudaErrorNotSupported);
    NAME(cudaErrorUnknown);
#undef NAME
    default:
      return "another CUDA error";
  }
}
char const* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : cudaGetErrorName(e); }

cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** p, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *p = driver_entry(name);
  if (status) *status = *p ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *p ? cudaSuccess : fail(cudaErrorNotSupported);
}
#undef cudaGetDriverEntryPoint
cudaError_t cudaGetDriverEntryPoint(char const* name, void** p, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(name, p, 0, flags, status);
}

}  // extern "C"
