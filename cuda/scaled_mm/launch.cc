// Preparing the kernels of the table on a device, and launching one.
#include <map>
#include <shared_mutex>

#include "core/prepare.h"
#include "scaled_mm/generic.h"
#include "scaled_mm/instances.h"

namespace jax_qmm {
namespace {

std::shared_mutex mutex;
std::map<int, std::vector<bool>> fits_on_device;

}  // namespace

bool runs_on(Gpu const& gpu, int instance) {
  Instance const& i = instances()[instance];
  if (!i.has_code(gpu.arch) || i.stage_bytes() > gpu.shared_memory) return false;
  std::shared_lock lock(mutex);
  auto const found = fits_on_device.find(gpu.device);
  return found == fits_on_device.end() || found->second[instance];
}

cudaError_t prepare_scaled_mm() {
  static OncePerDevice once;
  return once([] {
    Gpu const* gpu;
    if (cudaError_t const error = current_gpu(gpu)) return error;
    if (cudaError_t const error = prepare_generic()) return error;
    std::vector<bool> all_fit(instances().size());
    for (size_t i = 0; i < all_fit.size(); ++i) {
      if (!runs_on(*gpu, int(i))) continue;
      bool fits;
      if (cudaError_t const error = instances()[i].prepare(fits)) return error;
      all_fit[i] = fits;
    }
    std::unique_lock lock(mutex);
    fits_on_device[gpu->device] = all_fit;
    forget_choices();
    return cudaSuccess;
  });
}

cudaError_t launch_scaled_mm(ScaledMm const& p, ScaledMmChoice choice, Gpu const& gpu, Submit const& submit) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return cudaSuccess;
  if (choice.instance < 0) return launch_generic(p, submit);
  Instance const& instance = instances()[choice.instance];
  return instance.launch(p, instance.persistent() ? choice.swizzle : instance.split, gpu, submit);
}

}  // namespace jax_qmm
