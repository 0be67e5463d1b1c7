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

// Like the first described GPU of the same architecture, with as much of everything for each SM.
bool scale(Gpu& gpu) {
  for (Gpu const& like : described) {
    if (like.arch != gpu.arch) continue;
    double const part = double(gpu.sm_count) / like.sm_count;
    gpu.copy_rate = like.copy_rate * part;
    gpu.peak = like.peak * part;
    gpu.l2_bytes = int64_t(like.l2_bytes * part);
    for (auto const& [blocks, sms] : like.cluster_sms) gpu.cluster_sms[blocks] = sms * gpu.sm_count / like.sm_count;
    return true;
  }
  return false;
}

cudaError_t ask_driver(int device, Gpu& gpu) {
  cudaDeviceProp properties;
  if (cudaError_t const error = cudaGetDeviceProperties(&properties, device)) return error;
  gpu.name = properties.name;
  gpu.sm_count = properties.multiProcessorCount;
  gpu.arch = properties.major * 10 + properties.minor;
  if (Gpu const* const known = find_described(gpu.model())) {
    gpu = *known;
  } else if (scale(gpu)) {
    // Of what the memory delivers a copy reaches nine tenths; of an L2 of 50 MB a matrix of 32 MB stays.
    int kilohertz = 0, bits = 0;
    cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device);
    cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device);
    if (kilohertz > 0 && bits > 0) gpu.copy_rate = 0.9 * 2 * kilohertz * 1e3 * bits / 8;
    gpu.l2_bytes = int64_t(properties.l2CacheSize) * 32 / 50;
  }
  gpu.device = device;
  return cudaSuccess;
}

}  // namespace

void describe_gpu(Gpu const& gpu) {
  std::lock_guard lock(mutex);
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
