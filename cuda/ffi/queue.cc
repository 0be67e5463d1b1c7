#include "ffi/queue.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace jax_qmm {
namespace {

// A fatbin's size, as its header has it; 0 where it is none.
size_t image_size(void const* image) {
  struct {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
  } header;
  std::memcpy(&header, image, sizeof(header));
  return header.magic == 0xba55ed50 ? header.header_size + header.size : 0;
}

RecordApi::Dim3 dims(dim3 d) { return {int32_t(d.x), int32_t(d.y), int32_t(d.z)}; }

// What is known of a kernel in a graph: which it is and its grid, the rest of the launch following from these, and the
// choice that its call made.
struct Known {
  void const* kernel;
  unsigned grid[3];
  Chosen chosen;
};

// By XLA's command. What is known of a graph that is gone is replaced when its address is used again.
class Commands {
 public:
  void put(void const* command, Known known) {
    std::lock_guard lock(mutex_);
    known_[command] = known;
  }
  std::optional<Known> find(void const* command) {
    std::lock_guard lock(mutex_);
    auto const found = known_.find(command);
    return found == known_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void const*, Known> known_;
};
Commands commands;
std::atomic<int64_t> launches{0};

// Adds the kernels of one call to the graph, one after the other, or changes the arguments of those that it has.
class Recorder {
 public:
  Recorder(XLA_FFI_Api const* api, RecordFrame* frame) : api_(api), frame_(frame) {}

  // Where there are no kernels, XLA captures the call, which is nothing.
  ffi::Error operator()(std::function<ffi::Error(Submit const&, Chosen&)> const& enqueue) {
    if (updates() && *frame_->num_commands > 0) {
      if (auto const known = commands.find(frame_->commands[0])) chosen_ = known->chosen;
    }
    ffi::Error failure;
    ffi::Error error = enqueue(
        [&](Launch const& launch) {
          failure = add(launch);
          return failure.success() ? cudaSuccess : cudaErrorUnknown;
        },
        chosen_);
    if (failure.failure()) return failure;
    if (error.failure()) return error;
    if (updates()) return count_ == *frame_->num_commands ? ffi::Error::Success() : other_kernels();
    return count_ > 0 ? ffi::Error::Success() : to_error(frame_->api->request_stream_capture(frame_->context));
  }

 private:
  bool updates() const { return frame_->action == RecordApi::kUpdate; }

  ffi::Error add(Launch const& launch) {
    std::vector<RecordApi::KernelArgument> arguments;
    for (Launch::Argument const& argument : launch.arguments) {
      arguments.push_back({argument.data, int64_t(argument.size), RecordApi::kHostValue});
    }
    RecordApi::KernelArguments const all{arguments.data(), int64_t(arguments.size())};
    LaunchShape const& shape = launch.shape;
    int64_t const index = count_++;
    ++launches;
    if (updates()) {
      if (index >= *frame_->num_commands) return other_kernels();
      void const* const command = frame_->commands[index];
      auto const known = commands.find(command);
      bool const same = known && known->kernel == launch.kernel && known->grid[0] == shape.grid.x &&
                        known->grid[1] == shape.grid.y && known->grid[2] == shape.grid.z;
      return same ? to_error(frame_->api->update_launch(frame_->context, command, &all)) : other_kernels();
    }

    if (index >= frame_->max_commands) return ffi::Error::Internal("XLA records too few kernels of one call");
    char const* name;
    JAX_QMM_RETURN_IF_ERROR(cuda_error(cudaFuncGetName(&name, launch.kernel), "naming a kernel"));
    size_t const size = image_size(launch.image);
    if (size == 0) return ffi::Error::Internal("the CUDA compiler keeps device code in a way that is not known here");
    RecordApi::LaunchDims const launch_dims{dims(shape.grid), dims(shape.block),
                                            shape.clustered() ? dims(shape.cluster) : RecordApi::Dim3{0, 0, 0}};
    void const** const command = &frame_->commands[index];
    JAX_QMM_RETURN_IF_ERROR(to_error(frame_->api->create_launch(
        frame_->context, name, launch.image, size, RecordApi::kCubin, launch_dims, shape.shared_memory,
        /*uses_pdl=*/true, &all,
        /*dependencies=*/index > 0 ? command - 1 : nullptr, /*num_dependencies=*/index > 0, command)));
    *frame_->num_commands = count_;
    commands.put(*command, {launch.kernel, {shape.grid.x, shape.grid.y, shape.grid.z}, chosen_});
    return ffi::Error::Success();
  }

  ffi::Error other_kernels() const {
    return ffi::Error::Internal(
        "a program that ran before needs other kernels now, for its buffers are aligned otherwise; "
        "compile it again");
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
  Chosen chosen_;
};

}  // namespace

int64_t count_recorded() { return launches; }

}  // namespace jax_qmm

namespace xla::ffi {

std::optional<jax_qmm::Queue> CtxDecoding<jax_qmm::OnStream>::Decode(XLA_FFI_Api const* api,
                                                                     XLA_FFI_ExecutionContext* ctx,
                                                                     DiagnosticEngine& diagnostic) {
  auto const stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
  if (!stream) return std::nullopt;
  return [submit = jax_qmm::on_stream(*stream)](auto const& enqueue) {
    jax_qmm::Chosen none;
    return enqueue(submit, none);
  };
}

std::optional<jax_qmm::Queue> CtxDecoding<jax_qmm::InGraph>::Decode(XLA_FFI_Api const* api,
                                                                    XLA_FFI_ExecutionContext* ctx,
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
