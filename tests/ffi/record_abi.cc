// Compiles where ffi/record_abi.h has the ABI of the XLA headers that it is compiled with.
#include "ffi/record_abi.h"

#include <type_traits>

#include "xla/ffi/api/record_c_api.h"

namespace jax_qmm {
namespace {

// Whether values of these types are passed alike: pointers of any kind, and numbers, enums and structs of one size.
template <class A, class B>
constexpr bool kAlike = std::is_pointer_v<A> == std::is_pointer_v<B> && std::is_class_v<A> == std::is_class_v<B> &&
                        sizeof(A) == sizeof(B) && std::is_trivially_copyable_v<A>;

template <class F, class G>
constexpr bool kSameCall = false;
template <class R, class... A, class S, class... B>
constexpr bool kSameCall<R (*)(A...), S (*)(B...)> = [] {
  if constexpr (sizeof...(A) == sizeof...(B)) return kAlike<R, S> && (kAlike<A, B> && ...);
  return false;
}();

#define SAME_FIELD(ours, our_field, theirs, their_field)                              \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) &&         \
                    kAlike<decltype(ours::our_field), decltype(theirs::their_field)>, \
                #our_field)
#define SAME_FUNCTION(ours, our_field, theirs, their_field) \
  SAME_FIELD(ours, our_field, theirs, their_field);         \
  static_assert(kSameCall<decltype(ours::our_field), decltype(theirs::their_field)>, #our_field)

constexpr bool known_runtime() {
  for (Runtime const& runtime : kRuntimes) {
    if (runtime.api_minor == XLA_FFI_API_MINOR && runtime.api_size == sizeof(XLA_FFI_Api) &&
        runtime.record_minor == XLA_FFI_Extension_Record_MinorVersion) {
      return true;
    }
  }
  return false;
}
static_assert(XLA_FFI_API_MAJOR == 0 && XLA_FFI_Extension_Record_MajorVersion == 0 && known_runtime());

static_assert(kRecordStage == XLA_FFI_ExecutionStage_RECORD && kRecordExtension == XLA_FFI_Extension_Record);
static_assert(RecordApi::kCubin == XLA_FFI_SourceFormat_CUBIN);
static_assert(RecordApi::kHostValue == XLA_FFI_KernelArgType_HostValue);
static_assert(RecordApi::kUpdate == XLA_FFI_RecordAction_Update);

SAME_FIELD(RecordApi::LaunchDims, grid, XLA_FFI_LaunchDims, grid);
SAME_FIELD(RecordApi::LaunchDims, block, XLA_FFI_LaunchDims, block);
SAME_FIELD(RecordApi::LaunchDims, cluster, XLA_FFI_LaunchDims, cluster);
SAME_FIELD(RecordApi::KernelArgument, address, XLA_FFI_KernelArg, arg_address);
SAME_FIELD(RecordApi::KernelArgument, size, XLA_FFI_KernelArg, size);
SAME_FIELD(RecordApi::KernelArgument, type, XLA_FFI_KernelArg, type);
SAME_FIELD(RecordApi::KernelArguments, arguments, XLA_FFI_KernelArgs, args);
SAME_FIELD(RecordApi::KernelArguments, count, XLA_FFI_KernelArgs, num_args);
static_assert(sizeof(RecordApi::KernelArgument) == sizeof(XLA_FFI_KernelArg));

SAME_FUNCTION(RecordApi, create_launch, XLA_FFI_RecordApi, create_launch);
SAME_FUNCTION(RecordApi, update_launch, XLA_FFI_RecordApi, update_launch);
SAME_FUNCTION(RecordApi, request_stream_capture, XLA_FFI_RecordApi, request_stream_capture);

SAME_FIELD(RecordFrame, context, XLA_FFI_RecordFrame, record_ctx);
SAME_FIELD(RecordFrame, api, XLA_FFI_RecordFrame, api);
SAME_FIELD(RecordFrame, action, XLA_FFI_RecordFrame, action);
SAME_FIELD(RecordFrame, commands, XLA_FFI_RecordFrame, commands);
SAME_FIELD(RecordFrame, num_commands, XLA_FFI_RecordFrame, num_commands);
SAME_FIELD(RecordFrame, max_commands, XLA_FFI_RecordFrame, max_commands);

SAME_FIELD(Extension, type, XLA_FFI_Extension, id.extension_type);
SAME_FIELD(Extension, major_version, XLA_FFI_Extension, id.major_version);
SAME_FIELD(Extension, minor_version, XLA_FFI_Extension, id.minor_version);
SAME_FIELD(Extension, frame, XLA_FFI_Record_Extension, record_frame);

SAME_FIELD(FindExtensionArgs, context, XLA_FFI_InvokeContext_FindExtension_Args, ctx);
SAME_FIELD(FindExtensionArgs, type, XLA_FFI_InvokeContext_FindExtension_Args, extension_type);
SAME_FIELD(FindExtensionArgs, extension, XLA_FFI_InvokeContext_FindExtension_Args, extension);
static_assert(sizeof(FindExtensionArgs) == XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE);
SAME_FUNCTION(ApiWithExtensions, find_extension, XLA_FFI_Api, XLA_FFI_InvokeContext_FindExtension);

SAME_FIELD(RegisterArgs, name, XLA_FFI_Handler_Register_Args, name);
SAME_FIELD(RegisterArgs, platform, XLA_FFI_Handler_Register_Args, platform);
SAME_FIELD(RegisterArgs, bundle, XLA_FFI_Handler_Register_Args, bundle);
SAME_FIELD(RegisterArgs, traits, XLA_FFI_Handler_Register_Args, traits);
static_assert(sizeof(RegisterArgs) == sizeof(XLA_FFI_Handler_Register_Args));
SAME_FIELD(HandlerBundle, initialize, XLA_FFI_Handler_Bundle, initialize);
SAME_FIELD(HandlerBundle, execute, XLA_FFI_Handler_Bundle, execute);
SAME_FIELD(HandlerBundle, record, XLA_FFI_Handler_Bundle, record);

}  // namespace
}  // namespace jax_qmm
