// Registering handlers of the stage "record", which JAX has no way for. XLA asks every handler for its metadata as it
// is registered, and gives its own API along, which can register others.
#include <cstring>

#include "ffi/handlers.h"
#include "ffi/record_abi.h"

extern "C" XLA_FFI_Error* JaxQmmRegister(XLA_FFI_CallFrame* frame) {
  using namespace jax_qmm;
  for (Target const& target : kTargets) {
    RegisterArgs args{sizeof(RegisterArgs),
                      nullptr,
                      {target.name, std::strlen(target.name)},
                      {"CUDA", 4},
                      {nullptr, nullptr, target.initialize, target.execute, target.record},
                      XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE};
    auto* const as_declared = reinterpret_cast<XLA_FFI_Handler_Register_Args*>(&args);
    if (XLA_FFI_Error* error = frame->api->XLA_FFI_Handler_Register(as_declared)) return error;
  }
  return JaxQmmScaledMmInitialize(frame);  // metadata like any other's
}
