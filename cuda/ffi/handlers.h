// The FFI targets of all ops. The file that defines an op's handlers adds its targets.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_qmm {

struct Target {
  char const* name;
  XLA_FFI_Handler *initialize, *execute, *record;
};

std::vector<Target> const& targets();

// Adds a target as the extension is loaded: an object of this class stands beside the handlers.
struct AddTarget {
  explicit AddTarget(Target target);
};

// Registers all targets with all their stages, while it is registered itself; notes why it does not
// (`why_not_recorded`) where XLA's runtime is none that is known.
XLA_FFI_Error* register_recording(XLA_FFI_CallFrame* frame);

}  // namespace jax_qmm
