#include "ffi/device.h"

#include <mutex>
#include <utility>

#include "core/archs.h"
#include "core/prepare.h"

namespace jax_qmm {
namespace {

std::function<void()> before_first_kernel = [] {};

std::string cuda(int version) {
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

std::string why_unfit_driver(int version) {
  // A runtime runs under all drivers of its own major version.
  if (version == 0 || version / 1000 >= CUDART_VERSION / 1000) return "";
  return "the NVIDIA driver is for " + cuda(version) + " and this build of jax_qmm for " + cuda(CUDART_VERSION) +
         "; install a driver for CUDA " + std::to_string(CUDART_VERSION / 1000) +
         ", or build jax_qmm with an nvcc of CUDA " + std::to_string(version / 1000) + " in CUDACXX";
}

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

std::string why_unfit_gpu(std::string const& name, int capability) {
  if (compiled_for(capability) > 0) return "";
  std::string archs;
  for (std::string const arch : {JAX_QMM_ARCHS}) archs += (archs.empty() ? "" : ", ") + arch;
  if (JAX_QMM_PTX > 0) archs += ", and later ones";
  return name + " has compute capability " + std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
         "; this build has kernels for " + archs;
}

void call_before_first_kernel(std::function<void()> function) { before_first_kernel = std::move(function); }

ffi::Error begin_call() {
  static std::once_flag done;
  std::call_once(done, before_first_kernel);
  static OncePerDevice fit;
  std::string why;
  cudaError_t const error = fit([&] {
    int device, major, minor;
    if (cudaError_t const error = cudaGetDevice(&device)) return error;
    for (auto [attribute, value] :
         {std::pair(cudaDevAttrComputeCapabilityMajor, &major), std::pair(cudaDevAttrComputeCapabilityMinor, &minor)}) {
      if (cudaError_t const error = cudaDeviceGetAttribute(value, attribute, device)) return error;
    }
    why = why_unfit_gpu("GPU " + std::to_string(device), 10 * major + minor);
    return why.empty() ? cudaSuccess : cudaErrorNoKernelImageForDevice;
  });
  if (error == cudaErrorInsufficientDriver) why = why_unfit_driver(driver_version());
  if (why.empty()) return cuda_error(error, "asking what the GPU is");
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "the kernels of jax_qmm do not run: " + why);
}

}  // namespace jax_qmm
