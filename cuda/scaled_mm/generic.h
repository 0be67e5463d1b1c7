// The kernel that takes what the table's kernels can't.
#pragma once

#include "scaled_mm/scaled_mm.h"

namespace jax_qmm {

cudaError_t launch_generic(ScaledMm const& problem, Submit const& submit);

}  // namespace jax_qmm
