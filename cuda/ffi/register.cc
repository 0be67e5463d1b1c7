// Registering handlers of the stage "record", which JAX has no way for. XLA asks every handler for its metadata as it
// is registered, and gives its own API along, which can register others.
#include <cstring>
#include <string>

#include "ffi/handlers.h"
#include "ffi/record.h"
#include "ffi/record_abi.h"

namespace jax_qmm {
namespace {

// Within a function, so that it is made before the first target of any file is added.
std::vector<Target>& all_targets() {
  static std::vector<Target> all;
  return all;
}

void register_targets(XLA_FFI_Api const* api) {
  XLA_FFI_Api_Version const& version = api->api_version;
  if (find_runtime(*api) == nullptr) {
    return note_not_recorded("XLA's runtime has the FFI API " + std::to_string(version.major_version) + "." +
                             std::to_string(version.minor_version) + " in " + std::to_string(api->struct_size) +
                             " bytes, with which recording was not tested");
  }
  for (Target const& target : targets()) {
    RegisterArgs args{sizeof(RegisterArgs),
                      nullptr,
                      {target.name, std::strlen(target.name)},
                      {"CUDA", 4},
                      {nullptr, nullptr, target.initialize, target.execute, target.record},
                      XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE};
    auto* const as_declared = reinterpret_cast<XLA_FFI_Handler_Register_Args*>(&args);
    if (XLA_FFI_Error* error = api->XLA_FFI_Handler_Register(as_declared)) {
      note_not_recorded(std::string("XLA does not register recording handlers: ") +
                        xla::ffi::internal::GetErrorMessage(api, error));
      return xla::ffi::internal::DestroyError(api, error);
    }
  }
}

}  // namespace

std::vector<Target> const& targets() { return all_targets(); }

AddTarget::AddTarget(Target target) { all_targets().push_back(target); }

XLA_FFI_Error* register_recording(XLA_FFI_CallFrame* frame) {
  register_targets(frame->api);
  return targets().front().execute(frame);  // metadata like any other's
}

}  // namespace jax_qmm
