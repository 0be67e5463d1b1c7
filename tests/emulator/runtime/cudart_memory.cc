// Memory is the host's.
#include <algorithm>

#include "cudart.h"

using namespace emu;

namespace {

void* allocate(size_t size) {
  // A gap on both sides, so that what lies beyond is no other allocation.
  size_t const gap = 512;
  char* const raw = static_cast<char*>(std::malloc(size + 2 * gap + 256));
  if (raw == nullptr) return nullptr;
  char* const p = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + gap + 255) / 256 * 256);
  std::memset(p, 0xa5, std::min<size_t>(size, 64 << 20));
  std::lock_guard lock(state().mutex);
  state().allocations[p] = {raw, size};
  Heap::get().add(p, size);
  return p;
}
cudaError_t release(void* p) {
  if (p == nullptr) return cudaSuccess;
  std::lock_guard lock(state().mutex);
  auto const found = state().allocations.find(p);
  if (found == state().allocations.end()) return fail(cudaErrorInvalidValue);
  Heap::get().remove(p);
  Heap::get().add(p, found->second.second, true);
  std::free(found->second.first);
  state().allocations.erase(found);
  return cudaSuccess;
}

}  // namespace

namespace emu {

void* symbol_address(void const* symbol, size_t* size) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  auto const found = s.variables.find(symbol);
  if (found == s.variables.end()) return nullptr;
  Module* const m = module_of(*found->second.first);
  if (m == nullptr) return nullptr;
  auto const v = m->variables.find(found->second.second);
  if (v == m->variables.end()) return nullptr;
  if (size) *size = v->second.size;
  return reinterpret_cast<void*>(v->second.address);
}

}  // namespace emu

extern "C" {

cudaError_t cudaMalloc(void** p, size_t size) {
  return (*p = allocate(size)) ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocAsync(void** p, size_t size, cudaStream_t) { return cudaMalloc(p, size); }
cudaError_t cudaMallocHost(void** p, size_t size) { return cudaMalloc(p, size); }
cudaError_t cudaHostAlloc(void** p, size_t size, unsigned) { return cudaMalloc(p, size); }
cudaError_t cudaMallocManaged(void** p, size_t size, unsigned) { return cudaMalloc(p, size); }
cudaError_t cudaMallocPitch(void** p, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(p, *pitch * height);
}
cudaError_t cudaFree(void* p) { return release(p); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return release(p); }
cudaError_t cudaFreeHost(void* p) { return release(p); }
cudaError_t cudaHostRegister(void* p, size_t size, unsigned) {
  Heap::get().add(p, size);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  Heap::get().remove(p);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** d, void* h, unsigned) {
  *d = h;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, void const* from, size_t n, cudaMemcpyKind) {
  std::memmove(to, from, n);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t n, cudaMemcpyKind k, cudaStream_t) {
  return cudaMemcpy(to, from, n, k);
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, void const* from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind) {
  for (size_t i = 0; i < height; ++i)
    std::memmove(static_cast<char*>(to) + i * to_pitch, static_cast<char const*>(from) + i * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t tp, void const* from, size_t fp, size_t w, size_t h, cudaMemcpyKind k,
                              cudaStream_t) {
  return cudaMemcpy2D(to, tp, from, fp, w, h, k);
}
cudaError_t cudaMemset(void* p, int value, size_t n) {
  std::memset(p, value, n);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t) { return cudaMemset(p, value, n); }
cudaError_t cudaGetSymbolAddress(void** p, void const* symbol) {
  return (*p = symbol_address(symbol)) ? cudaSuccess : fail(cudaErrorInvalidSymbol);
}
cudaError_t cudaGetSymbolSize(size_t* n, void const* symbol) {
  return symbol_address(symbol, n) ? cudaSuccess : fail(cudaErrorInvalidSymbol);
}
cudaError_t cudaMemcpyToSymbol(void const* symbol, void const* from, size_t n, size_t offset, cudaMemcpyKind) {
  void* const p = symbol_address(symbol);
  if (p == nullptr) return fail(cudaErrorInvalidSymbol);
  std::memcpy(static_cast<char*>(p) + offset, from, n);
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbolAsync(void const* s, void const* from, size_t n, size_t o, cudaMemcpyKind k,
                                    cudaStream_t) {
  return cudaMemcpyToSymbol(s, from, n, o, k);
}
cudaError_t cudaMemcpyFromSymbol(void* to, void const* symbol, size_t n, size_t offset, cudaMemcpyKind) {
  void* const p = symbol_address(symbol);
  if (p == nullptr) return fail(cudaErrorInvalidSymbol);
  std::memcpy(to, static_cast<char*>(p) + offset, n);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = size_t(8) << 30, *total = size_t(16) << 30;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, void const* p) {
  Heap::Range range;
  bool const ours = Heap::get().find(reinterpret_cast<uint64_t>(p), range);
  *a = {};
  a->type = ours ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  a->devicePointer = a->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}

}  // extern "C"
