// Preparing the kernels of the table on a device, and launching one.
#include "core/prepare.h"
#include "core/prepared_kernels.h"
#include "scaled_mm/generic.h"
#include "scaled_mm/instances.h"

namespace jax_qmm {
namespace {

PreparedKernels prepared;

}  // namespace

bool runs_on(Gpu const& gpu, int instance) {
  Instance const& i = instances()[instance];
  return i.has_code(gpu.arch) && i.stage_bytes() <= gpu.shared_memory && prepared.can_run(gpu, instance);
}

cudaError_t prepare_scaled_mm() {
  static OncePerDevice once;
  return once([] {
    Gpu const* gpu;
    if (cudaError_t const error = current_gpu(gpu)) return error;
    if (cudaError_t const error = prepare_generic()) return error;
    cudaError_t const error = prepared.prepare(*gpu, int(instances().size()), [&](int i, bool& fits) {
      return runs_on(*gpu, i) ? instances()[i].prepare(fits) : cudaSuccess;
    });
    forget_choices();
    return error;
  });
}

cudaError_t launch_scaled_mm(ScaledMm const& p, ScaledMmChoice choice, Gpu const& gpu, Submit const& submit) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return cudaSuccess;
  if (choice.instance < 0) return launch_generic(p, submit);
  Instance const& instance = instances()[choice.instance];
  return instance.launch(p, instance.persistent() ? choice.swizzle : instance.split, gpu, submit);
}

}  // namespace jax_qmm
