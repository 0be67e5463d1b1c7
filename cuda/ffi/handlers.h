// The handlers that bindings.cc hands to XLA.
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmScaledMmInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmScaledMm);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmScaledMmRecord);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmQuantizeInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmQuantizeDynamic);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmQuantizeDynamicRecord);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmQuantizeStatic);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmQuantizeStaticRecord);

// Registers all targets with all their stages, while it is registered itself.
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmRegister);

namespace jax_qmm {

struct Target {
  char const* name;
  XLA_FFI_Handler *initialize, *execute, *record;
};

inline constexpr Target kTargets[] = {
    {"jax_qmm_scaled_mm", JaxQmmScaledMmInitialize, JaxQmmScaledMm, JaxQmmScaledMmRecord},
    {"jax_qmm_quantize_dynamic", JaxQmmQuantizeInitialize, JaxQmmQuantizeDynamic, JaxQmmQuantizeDynamicRecord},
    {"jax_qmm_quantize_static", JaxQmmQuantizeInitialize, JaxQmmQuantizeStatic, JaxQmmQuantizeStaticRecord},
};

}  // namespace jax_qmm
