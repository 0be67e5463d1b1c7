#include "ffi/queue.h"

#include <cstring>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace jax_qmm {
namespace {

// What a fatbin's header says of its size.
size_t image_size(void const* image) {
  struct {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
  } header;
  std::memcpy(&header, image, sizeof(header));
  return header.header_size + header.size;
}

RecordApi::Dim3 dims(dim3 d) { return {int32_t(d.x), int32_t(d.y), int32_t(d.z)}; }

// What can't change of a kernel in a graph: all but its arguments.
using Fixed = std::tuple<void const*, unsigned, unsigned, unsigned, unsigned, unsigned>;

Fixed fixed_of(Launch const& launch) {
  LaunchShape const& shape = launch.shape;
  return {launch.kernel, shape.grid.x, shape.grid.y, shape.grid.z, shape.block.x, shape.block.y};
}

// Of XLA's commands. What is kept of a graph that is gone is replaced when its address is used again.
std::mutex fixed_mutex;
std::unordered_map<void const*, Fixed> fixed_by_command;

void fix(void const* command, Fixed fixed) {
  std::lock_guard lock(fixed_mutex);
  fixed_by_command[command] = fixed;
}

Fixed fixed_of(void const* command) {
  std::lock_guard lock(fixed_mutex);
  return fixed_by_command[command];
}

// Adds the kernels of one call to the graph, one after the other, or changes the arguments of those that it has.
class Recorder {
 public:
  Recorder(XLA_FFI_Api const* api, RecordFrame* frame) : api_(api), frame_(frame) {}

  // Where there are no kernels, XLA captures the call, which is nothing.
  ffi::Error operator()(std::function<ffi::Error(Submit const&)> const& enqueue) {
    ffi::Error failure;
    ffi::Error error = enqueue([&](Launch const& launch) {
      failure = add(launch);
      return failure.success() ? cudaSuccess : cudaErrorUnknown;
    });
    if (failure.failure()) return failure;
    if (error.failure()) return error;
    return count_ > 0 ? ffi::Error::Success() : to_error(frame_->api->request_stream_capture(frame_->context));
  }

 private:
  ffi::Error add(Launch const& launch) {
    std::vector<RecordApi::KernelArgument> arguments;
    for (Launch::Argument const& argument : launch.arguments) {
      arguments.push_back({argument.data, int64_t(argument.size), RecordApi::kHostValue});
    }
    RecordApi::KernelArguments const all{arguments.data(), int64_t(arguments.size())};
    int64_t const index = count_++;
    void const** const command = &frame_->commands[index];
    if (frame_->action == RecordApi::kUpdate) {
      if (index >= *frame_->num_commands || fixed_of(*command) != fixed_of(launch)) {
        return ffi::Error::Internal("a program that ran before needs another kernel now, for the alignment of its buffers or the "
                                    "tuning changed; compile it again");
      }
      return to_error(frame_->api->update_launch(frame_->context, *command, &all));
    }

    if (index >= frame_->max_commands) return ffi::Error::Internal("XLA records too few kernels of one call");
    char const* name;
    JAX_QMM_RETURN_IF_ERROR(cuda_error(cudaFuncGetName(&name, launch.kernel), "naming a kernel"));
    LaunchShape const& shape = launch.shape;
    bool const clusters = shape.cluster.x * shape.cluster.y * shape.cluster.z > 1;
    RecordApi::LaunchDims const launch_dims{dims(shape.grid), dims(shape.block),
                                            clusters ? dims(shape.cluster) : RecordApi::Dim3{0, 0, 0}};
    JAX_QMM_RETURN_IF_ERROR(to_error(frame_->api->create_launch(
        frame_->context, name, launch.image, image_size(launch.image), RecordApi::kCubin, launch_dims, shape.shared_memory,
        /*uses_pdl=*/true, &all, /*dependencies=*/command - 1, /*num_dependencies=*/index > 0, command)));
    *frame_->num_commands = count_;
    fix(*command, fixed_of(launch));
    return ffi::Error::Success();
  }

  ffi::Error to_error(XLA_FFI_Error* error) {
    if (error == nullptr) return ffi::Error::Success();
    std::string const message = ffi::internal::GetErrorMessage(api_, error);
    ffi::internal::DestroyError(api_, error);
    return ffi::Error::Internal("recording a kernel: " + message);
  }

  XLA_FFI_Api const* api_;
  RecordFrame* frame_;
  int64_t count_ = 0;  // of the call's kernels so far
};

}  // namespace
}  // namespace jax_qmm

namespace xla::ffi {

std::optional<jax_qmm::Queue> CtxDecoding<jax_qmm::OnStream>::Decode(XLA_FFI_Api const* api, XLA_FFI_ExecutionContext* ctx,
                                                                    DiagnosticEngine& diagnostic) {
  auto const stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
  if (!stream) return std::nullopt;
  return [submit = jax_qmm::on_stream(*stream)](auto const& enqueue) { return enqueue(submit); };
}

std::optional<jax_qmm::Queue> CtxDecoding<jax_qmm::InGraph>::Decode(XLA_FFI_Api const* api, XLA_FFI_ExecutionContext* ctx,
                                                                   DiagnosticEngine& diagnostic) {
  using namespace jax_qmm;
  if (api->struct_size < sizeof(ApiWithExtensions)) {
    diagnostic.Emit("this XLA runtime records no kernels");
    return std::nullopt;
  }
  FindExtensionArgs args{sizeof(FindExtensionArgs), nullptr, ctx, kRecordExtension, nullptr};
  if (XLA_FFI_Error* error = reinterpret_cast<ApiWithExtensions const*>(api)->find_extension(&args)) {
    diagnostic.Emit("finding XLA's record extension: ") << internal::GetErrorMessage(api, error);
    internal::DestroyError(api, error);
    return std::nullopt;
  }
  if (args.extension == nullptr || args.extension->major_version != 0) {
    diagnostic.Emit("this XLA runtime records kernels in a way that this version of jax_qmm does not know");
    return std::nullopt;
  }
  return Recorder(api, args.extension->frame);
}

}  // namespace xla::ffi
