// The handlers that bindings.cc hands to XLA.
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmScaledMmInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmScaledMm);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmQuantizeInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmQuantizeDynamic);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxQmmQuantizeStatic);
