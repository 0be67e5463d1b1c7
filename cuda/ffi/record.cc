#include "ffi/record.h"

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

// A launch that outlives its arguments.
class Planned {
 public:
  explicit Planned(Launch const& launch) : kernel(launch.kernel), image(launch.image), shape(launch.shape) {
    if (cudaFuncGetName(&name, kernel)) name = nullptr;
    for (Launch::Argument const& argument : launch.arguments) {
      values_.emplace_back(static_cast<char const*>(argument.data), argument.size);
    }
    for (std::string const& value : values_) {
      arguments_.push_back({value.data(), int64_t(value.size()), RecordApi::kHostValue});
    }
  }
  Planned(Planned&&) = default;

  RecordApi::KernelArguments arguments() const { return {arguments_.data(), int64_t(arguments_.size())}; }

  void const *kernel, *image;
  LaunchShape shape;
  char const* name;  // null where CUDA does not know it

 private:
  std::vector<std::string> values_;
  std::vector<RecordApi::KernelArgument> arguments_;
};

// What is known of a kernel in a graph: which it is and its grid, the rest of the launch following from these, and the
// choice that its call made.
struct Known {
  void const* kernel;
  dim3 grid;
  Chosen chosen;

  bool is(Planned const& planned) const {
    dim3 const other = planned.shape.grid;
    return kernel == planned.kernel && grid.x == other.x && grid.y == other.y && grid.z == other.z;
  }
};

// By XLA's command. What is known of a graph that is gone is replaced when its address is used again.
class Commands {
 public:
  void put(void const* command, Known known) {
    std::lock_guard lock(mutex_);
    known_.insert_or_assign(command, known);
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

std::mutex reason_mutex;
std::string reason;

// Adds the kernels of one call to the graph, one after the other, or changes the arguments of those that it has. All
// launches are planned before the first one is recorded, so that a call that fails leaves none.
class Recorder {
 public:
  Recorder(XLA_FFI_Api const* api, RecordFrame* frame) : api_(api), frame_(frame) {}

  ffi::Error operator()(std::function<ffi::Error(Submit const&, Chosen&)> const& submit_all) {
    bool const update = frame_->action == RecordApi::kUpdate;
    Chosen chosen;
    if (update && *frame_->num_commands > 0) {
      if (auto const known = commands.find(frame_->commands[0])) chosen = known->chosen;
    }
    std::vector<Planned> plan;
    JAX_QMM_RETURN_IF_ERROR(submit_all(
        [&](Launch const& launch) {
          plan.emplace_back(launch);
          return cudaSuccess;
        },
        chosen));
    // XLA wants a command of each call. One without kernels captures nothing.
    if (plan.empty() && *frame_->num_commands == 0) {
      return to_error(frame_->api->request_stream_capture(frame_->context));
    }
    if (update) return change(plan);
    if (std::string const why = why_not_recorded(plan); !why.empty()) {
      return ffi::Error::Internal("kernels can't be recorded here, for " + why + "; set JAX_QMM_RECORD=0");
    }
    return create(plan, chosen);
  }

 private:
  std::string why_not_recorded(std::vector<Planned> const& plan) const {
    if (int64_t(plan.size()) > frame_->max_commands) {
      return "XLA records " + std::to_string(frame_->max_commands) + " kernels of a call, which had " +
             std::to_string(plan.size());
    }
    for (Planned const& planned : plan) {
      if (image_size(planned.image) == 0) return "the CUDA compiler keeps device code in a way that is not known";
      if (planned.name == nullptr) return "CUDA does not name a kernel";
    }
    return "";
  }

  ffi::Error create(std::vector<Planned> const& plan, Chosen const& chosen) {
    Gpu const* gpu;
    JAX_QMM_RETURN_IF_ERROR(cuda_error(current_gpu(gpu), "asking what the GPU is"));
    for (size_t i = 0; i < plan.size(); ++i) {
      Planned const& planned = plan[i];
      LaunchShape const& shape = planned.shape;
      RecordApi::LaunchDims const launch_dims{dims(shape.grid), dims(shape.block),
                                              shape.clustered() ? dims(shape.cluster) : RecordApi::Dim3{0, 0, 0}};
      RecordApi::KernelArguments const arguments = planned.arguments();
      void const** const command = &frame_->commands[i];
      JAX_QMM_RETURN_IF_ERROR(to_error(frame_->api->create_launch(
          frame_->context, planned.name, planned.image, image_size(planned.image), RecordApi::kCubin, launch_dims,
          shape.shared_memory, launches_overlap(*gpu), &arguments,
          /*dependencies=*/i > 0 ? command - 1 : nullptr, /*num_dependencies=*/i > 0, command)));
      *frame_->num_commands = i + 1;
      commands.put(*command, {planned.kernel, shape.grid, chosen});
      ++launches;
    }
    return ffi::Error::Success();
  }

  ffi::Error change(std::vector<Planned> const& plan) {
    bool same = int64_t(plan.size()) == *frame_->num_commands;
    for (size_t i = 0; same && i < plan.size(); ++i) {
      auto const known = commands.find(frame_->commands[i]);
      same = known && known->is(plan[i]);
    }
    if (!same) {
      return ffi::Error::Internal(
          "a program that has run needs other kernels now, for its buffers are aligned otherwise, and XLA does not "
          "exchange what it has recorded; compile the program again, or set JAX_QMM_RECORD=0");
    }
    for (size_t i = 0; i < plan.size(); ++i) {
      RecordApi::KernelArguments const arguments = plan[i].arguments();
      JAX_QMM_RETURN_IF_ERROR(to_error(frame_->api->update_launch(frame_->context, frame_->commands[i], &arguments)));
      ++launches;
    }
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
};

}  // namespace

int64_t count_recorded() { return launches; }

std::string why_not_recorded() {
  std::lock_guard lock(reason_mutex);
  return reason;
}

void note_not_recorded(std::string why) {
  std::lock_guard lock(reason_mutex);
  reason = std::move(why);
}

}  // namespace jax_qmm

namespace xla::ffi {

std::optional<jax_qmm::Destination> CtxDecoding<jax_qmm::OnStream>::Decode(XLA_FFI_Api const* api,
                                                                           XLA_FFI_ExecutionContext* ctx,
                                                                           DiagnosticEngine& diagnostic) {
  auto const stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, ctx, diagnostic);
  if (!stream) return std::nullopt;
  return [submit = jax_qmm::on_stream(*stream)](auto const& submit_all) {
    jax_qmm::Chosen none;
    return submit_all(submit, none);
  };
}

std::optional<jax_qmm::Destination> CtxDecoding<jax_qmm::InGraph>::Decode(XLA_FFI_Api const* api,
                                                                          XLA_FFI_ExecutionContext* ctx,
                                                                          DiagnosticEngine& diagnostic) {
  using namespace jax_qmm;
  char const* const unknown = "XLA's runtime records kernels in a way that jax_qmm does not know; set JAX_QMM_RECORD=0";
  Runtime const* const runtime = find_runtime(*api);
  if (runtime == nullptr) {
    diagnostic.Emit(unknown);
    return std::nullopt;
  }
  FindExtensionArgs args{sizeof(FindExtensionArgs), nullptr, ctx, kRecordExtension, nullptr};
  if (XLA_FFI_Error* error = reinterpret_cast<ApiWithExtensions const*>(api)->find_extension(&args)) {
    diagnostic.Emit("finding XLA's record extension: ") << internal::GetErrorMessage(api, error);
    internal::DestroyError(api, error);
    return std::nullopt;
  }
  if (args.extension == nullptr || args.extension->major_version != 0 ||
      args.extension->minor_version != runtime->record_minor) {
    diagnostic.Emit(unknown);
    return std::nullopt;
  }
  return Recorder(api, args.extension->frame);
}

}  // namespace xla::ffi
