#include "core/gpu.h"

#include <mutex>
#include <stdexcept>
#include <vector>

namespace jax_qmm {
namespace {

std::mutex mutex;
std::vector<Gpu> described;
std::map<int, Gpu> devices;  // never erased from: pointers to its values stay valid

Gpu const* find_described(std::pair<std::string, int> const& model) {
  for (Gpu const& gpu : described) {
    if (gpu.model() == model) return &gpu;
  }
  return nullptr;
}

Gpu const* first_of_arch(int arch) {
  for (Gpu const& gpu : described) {
    if (gpu.arch == arch) return &gpu;
  }
  return nullptr;
}

void scale_clusters(Gpu& gpu, Gpu const& like) {
  for (auto const& [blocks, sms] : like.cluster_sms) gpu.cluster_sms[blocks] = sms * gpu.sm_count / like.sm_count;
}

// Like the first described GPU of the same architecture, with as much of everything for each SM.
bool scale(Gpu& gpu) {
  Gpu const* const like = first_of_arch(gpu.arch);
  if (like == nullptr) return false;
  double const part = double(gpu.sm_count) / like->sm_count;
  gpu.copy_rate = like->copy_rate * part;
  gpu.peak = like->peak * part;
  gpu.clock = like->clock;
  gpu.shared_memory = like->shared_memory;
  gpu.l2_bytes = int64_t(like->l2_bytes * part);
  scale_clusters(gpu, *like);
  return true;
}

// Dense operations on 8 bits of an SM in a cycle, by warp-level instructions: NVIDIA's whitepapers of TU102, GA100,
// GA102, AD102 and of RTX Blackwell. Those of later ones are not published; none has fewer than GA100.
double operations_of(int arch) {
  switch (arch) {
    case 75:
    case 86:
    case 89:
    case 120:
    case 121:
      return 2048;
    default:
      return 4096;
  }
}

cudaError_t ask_driver(int device, Gpu& gpu) {
  cudaDeviceProp properties;
  if (cudaError_t const error = cudaGetDeviceProperties(&properties, device)) return error;
  gpu.name = properties.name;
  gpu.sm_count = properties.multiProcessorCount;
  gpu.arch = properties.major * 10 + properties.minor;
  if (Gpu const* const known = find_described(gpu.model())) {
    gpu = *known;
  } else {
    int clock = 0, memory_clock = 0, bits = 0;  // kHz
    cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, device);
    cudaDeviceGetAttribute(&memory_clock, cudaDevAttrMemoryClockRate, device);
    cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device);
    if (!scale(gpu)) {
      gpu.copy_rate = 1e12;  // where the driver does not say
      gpu.clock = clock > 0 ? clock * 1e3 : 1.5e9;
      gpu.peak = operations_of(gpu.arch) * gpu.sm_count * gpu.clock;
      gpu.shared_memory = int(properties.sharedMemPerBlockOptin);
    }
    // Of what the memory delivers a copy reaches nine tenths; of an L2 of 50 MB a matrix of 32 MB stays.
    if (memory_clock > 0 && bits > 0) gpu.copy_rate = 0.9 * 2 * memory_clock * 1e3 * bits / 8;
    gpu.l2_bytes = int64_t(properties.l2CacheSize) * 32 / 50;
  }
  gpu.device = device;
  return cudaSuccess;
}

}  // namespace

void describe_gpu(Gpu gpu) {
  std::lock_guard lock(mutex);
  Gpu const* const like = first_of_arch(gpu.arch);
  if (gpu.cluster_sms.empty() && like != nullptr) scale_clusters(gpu, *like);
  for (Gpu& known : described) {
    if (known.model() == gpu.model()) {
      known = gpu;
      return;
    }
  }
  described.push_back(gpu);
}

Gpu gpu_of_model(std::string const& name, int sm_count, int arch) {
  std::lock_guard lock(mutex);
  Gpu gpu;
  gpu.name = name;
  gpu.sm_count = sm_count;
  gpu.arch = arch;
  if (Gpu const* const known = find_described(gpu.model())) return *known;
  if (!scale(gpu))
    throw std::invalid_argument("no GPU of compute capability " + std::to_string(arch) + " is described");
  return gpu;
}

cudaError_t gpu_of_device(int device, Gpu const*& gpu) {
  std::lock_guard lock(mutex);
  auto found = devices.find(device);
  if (found == devices.end()) {
    Gpu asked;
    if (cudaError_t const error = ask_driver(device, asked)) return error;
    found = devices.emplace(device, asked).first;
  }
  gpu = &found->second;
  return cudaSuccess;
}

OnDevice::OnDevice(Gpu const& gpu) {
  cudaError_t error = cudaGetDevice(&before_);
  if (error == cudaSuccess) error = cudaSetDevice(gpu.device);
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

cudaError_t current_gpu(Gpu const*& gpu) {
  int device;
  if (cudaError_t const error = cudaGetDevice(&device)) return error;
  return gpu_of_device(device, gpu);
}

}  // namespace jax_qmm
