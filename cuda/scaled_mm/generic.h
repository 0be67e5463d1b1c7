// The kernel that takes what the table's kernels can't.
#pragma once

#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm {

cudaError_t prepare_generic();
cudaError_t launch_generic(ScaledMm const& problem, Submit const& submit);

}  // namespace jax_qmm
