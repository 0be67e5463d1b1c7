// What nvcc's host code calls to register kernels, and what launches them.
#include <algorithm>
#include <cstdlib>

#include "cudart.h"

using namespace emu;

namespace {

struct Push {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Push> pushed;

Function* find(void const* host) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  auto const found = s.functions.find(host);
  if (found == s.functions.end()) return nullptr;
  Function& f = found->second;
  if (f.kernel == nullptr) {
    Module* const m = module_of(*f.fatbin);
    if (m == nullptr) return nullptr;
    auto const kernel = m->kernels.find(f.name);
    if (kernel == m->kernels.end()) return nullptr;
    f.kernel = kernel->second.get();
  }
  return &f;
}

bool prepare(Kernel& k) {
  try {
    k.prepare();
    return true;
  } catch (Error const& e) {
    say(e.what());
    return false;
  }
}

cudaError_t launch(Function* f, dim3 grid, dim3 block, void** args, size_t shared, dim3 cluster, bool explicit_cluster,
                   bool cooperative) {
  if (f == nullptr) return fail(cudaErrorInvalidDeviceFunction);
  Kernel& k = *f->kernel;
  if (!prepare(k)) return fail(cudaErrorInvalidPtx);
  auto l = std::make_unique<Launch>();
  l->kernel = &k;
  uint32_t const threads = block.x * block.y * block.z;
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
    return fail(cudaErrorInvalidConfiguration);
  if (k.max_threads != 0 && threads > k.max_threads) return fail(cudaErrorInvalidValue);
  if (int(shared) > f->max_dynamic_shared) {
    say(std::to_string(shared) + " bytes of dynamic shared memory, but cudaFuncSetAttribute allowed " +
        std::to_string(f->max_dynamic_shared));
    return fail(cudaErrorInvalidValue);
  }
  if (k.cluster[0] != 0 && !explicit_cluster) cluster = dim3(k.cluster[0], k.cluster[1], k.cluster[2]);
  if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z ||
      cluster.x * cluster.y * cluster.z > (f->nonportable_cluster ? 16 : 8))
    return fail(cudaErrorInvalidClusterSize);
  l->grid[0] = grid.x, l->grid[1] = grid.y, l->grid[2] = grid.z;
  l->block[0] = block.x, l->block[1] = block.y, l->block[2] = block.z;
  l->cluster[0] = cluster.x, l->cluster[1] = cluster.y, l->cluster[2] = cluster.z;
  l->explicit_cluster = explicit_cluster || k.cluster[0] != 0;
  l->dynamic_shared = shared;
  l->cooperative = cooperative;
  l->params.assign(k.param_bytes + 1, 0);
  for (size_t i = 0; i < k.params.size(); ++i)
    std::memcpy(l->params.data() + k.params[i].offset, args[i], k.params[i].size);
  bool const good = l->run();
  if (Options::get().stats) {
    std::lock_guard lock(state().mutex);
    state().stats.push_back(l->json());
  }
  if (good) return cudaSuccess;
  bool memory = false;
  for (auto const& [key, report] : l->reports) memory |= key.first == "memory";
  return fail(memory ? cudaErrorIllegalAddress : cudaErrorLaunchFailure);
}

}  // namespace

namespace emu {

Module* module_of(Fatbin& f) {
  std::lock_guard lock(state().mutex);
  if (f.module != nullptr || !f.error.empty()) return f.module;
  std::string const* best = nullptr;
  int best_arch = -1;
  for (std::string const& text : f.ptx) {
    size_t const at = text.find(".target sm_");
    if (at == std::string::npos) continue;
    int const arch = std::atoi(text.c_str() + at + 11);
    if (arch <= capability() && arch > best_arch) best = &text, best_arch = arch;
  }
  if (best == nullptr) {
    f.error = f.ptx.empty() ? "the binary has no readable PTX: compile with -gencode arch=compute_XX,code=compute_XX "
                              "--compress-mode=none"
                            : "the binary has no PTX for this compute capability (EMU_CC)";
    say(f.error);
    return nullptr;
  }
  try {
    state().modules.push_back(std::make_unique<Module>(*best));
    f.module = state().modules.back().get();
    for (auto const& [name, v] : f.module->variables) {
      if (v.space != Space::Shared && v.size > 0) Heap::get().add(reinterpret_cast<void*>(v.address), v.size);
    }
  } catch (Error const& e) {
    f.error = e.what();
    say(f.error);
  }
  return f.module;
}

}  // namespace emu

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    char const* data;
    void* unused;
  };
  auto const* const w = static_cast<Wrapper const*>(wrapper);
  auto* const f = new Fatbin;
  char const* p = w->data;
  uint32_t magic;
  std::memcpy(&magic, p, 4);
  if (w->magic == 0x466243b1 && magic == 0xba55ed50) {
    uint16_t header;
    uint64_t size;
    std::memcpy(&header, p + 6, 2);
    std::memcpy(&size, p + 8, 8);
    char const* const end = p + header + size;
    for (p += header; p + 64 <= end;) {
      uint16_t kind;
      uint32_t entry_header;
      uint64_t entry_size;
      std::memcpy(&kind, p, 2);
      std::memcpy(&entry_header, p + 4, 4);
      std::memcpy(&entry_size, p + 8, 8);
      std::string const text(p + entry_header, size_t(entry_size));
      if (kind == 1 && text.find(".version") != std::string::npos)
        f->ptx.push_back(text.substr(0, text.find_last_not_of('\0') + 1));
      p += entry_header + entry_size;
    }
  }
  return reinterpret_cast<void**>(f);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** handle, char const* host, char*, char const* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  std::lock_guard lock(state().mutex);
  Function f;
  f.fatbin = reinterpret_cast<Fatbin*>(handle);
  f.name = name;
  state().functions[host] = f;
}
void __cudaRegisterVar(void** handle, char* host, char*, char const* name, int, size_t, int, int) {
  std::lock_guard lock(state().mutex);
  state().variables[host] = {reinterpret_cast<Fatbin*>(handle), name};
}
void __cudaRegisterManagedVar(void** handle, void** host, char*, char const* name, int, size_t, int, int) {
  std::lock_guard lock(state().mutex);
  state().variables[host] = {reinterpret_cast<Fatbin*>(handle), name};
  *host = symbol_address(host);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Push const p = pushed.back();
  pushed.pop_back();
  *grid = p.grid, *block = p.block, *shared = p.shared;
  *static_cast<cudaStream_t*>(stream) = p.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t) {
  return launch(find(reinterpret_cast<void const*>(kernel)), grid, block, args, shared, dim3(1, 1, 1), false, false);
}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared,
                                    cudaStream_t s) {
  return __cudaLaunchKernel(kernel, grid, block, args, shared, s);
}

// Launches

cudaError_t cudaLaunchKernel(void const* function, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t) {
  return launch(find(function), grid, block, args, shared, dim3(1, 1, 1), false, false);
}
cudaError_t cudaLaunchCooperativeKernel(void const* function, dim3 grid, dim3 block, void** args, size_t shared,
                                        cudaStream_t) {
  return launch(find(function), grid, block, args, shared, dim3(1, 1, 1), false, true);
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* c, void const* function, void** args) {
  dim3 cluster(1, 1, 1);
  bool explicit_cluster = false, cooperative = false;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      auto const d = c->attrs[i].val.clusterDim;
      cluster = dim3(d.x, d.y, d.z);
      explicit_cluster = true;
    }
    if (c->attrs[i].id == cudaLaunchAttributeCooperative) cooperative = c->attrs[i].val.cooperative;
  }
  return launch(find(function), c->gridDim, c->blockDim, args, c->dynamicSmemBytes, cluster, explicit_cluster,
                cooperative);
}

// Functions

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, void const* function) {
  Function* const f = find(function);
  if (f == nullptr) return fail(cudaErrorInvalidDeviceFunction);
  if (!prepare(*f->kernel)) return fail(cudaErrorInvalidPtx);
  *a = {};
  a->sharedSizeBytes = f->kernel->static_shared;
  a->localSizeBytes = f->kernel->local_bytes;
  a->maxThreadsPerBlock = f->kernel->max_threads ? f->kernel->max_threads : 1024;
  a->numRegs = 128;
  a->ptxVersion = a->binaryVersion = capability();
  a->maxDynamicSharedSizeBytes = f->max_dynamic_shared;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(void const* function, cudaFuncAttribute a, int value) {
  Function* const f = find(function);
  if (f == nullptr) return fail(cudaErrorInvalidDeviceFunction);
  if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) return fail(cudaErrorInvalidValue);
    f->max_dynamic_shared = value;
  }
  if (a == cudaFuncAttributeNonPortableClusterSizeAllowed) f->nonportable_cluster = value;
  return cudaSuccess;
}
cudaError_t cudaFuncSetCacheConfig(void const*, cudaFuncCache) { return cudaSuccess; }
cudaError_t cudaFuncGetName(char const** name, void const* function) {
  Function* const f = find(function);
  if (f == nullptr) return fail(cudaErrorInvalidDeviceFunction);
  *name = f->name.c_str();
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, void const* function, int block,
                                                                   size_t dynamic, unsigned) {
  Function* const f = find(function);
  if (f == nullptr) return fail(cudaErrorInvalidDeviceFunction);
  if (!prepare(*f->kernel)) return fail(cudaErrorInvalidPtx);
  size_t const shared = dynamic + f->kernel->static_shared + 1024;
  *n = std::max<int>(0, std::min<int>({2048 / std::max(block, 1), 32,
                                       int(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / shared)}));
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void const* function, int block, size_t dynamic) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, function, block, dynamic, 0);
}
cudaError_t cudaOccupancyMaxActiveClusters(int* n, void const*, cudaLaunchConfig_t const* c) {
  unsigned size = 1;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
      size = c->attrs[i].val.clusterDim.x * c->attrs[i].val.clusterDim.y * c->attrs[i].val.clusterDim.z;
  }
  *n = attribute(cudaDevAttrMultiProcessorCount) / std::max(1u, size);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxPotentialClusterSize(int* n, void const*, cudaLaunchConfig_t const*) {
  *n = 8;
  return cudaSuccess;
}

}  // extern "C"
