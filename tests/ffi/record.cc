// The recorder of cuda/ffi against stand-ins for XLA and for the CUDA runtime.
#include "ffi/record.h"

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "ffi/handlers.h"

using namespace jax_qmm;

// The CUDA runtime

int launch_attributes = 0;

cudaError_t cudaFuncGetName(char const** name, void const*) {
  *name = "kernel";
  return cudaSuccess;
}
char const* cudaGetErrorString(cudaError_t) { return "a CUDA error"; }
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const*, void**) {
  launch_attributes = config->numAttrs;
  return cudaSuccess;
}
cudaError_t jax_qmm::current_gpu(Gpu const*& gpu) {
  static Gpu const h200{"NVIDIA H200", 132, 90};
  gpu = &h200;
  return cudaSuccess;
}

// XLA

struct Recorded {
  int32_t uses_pdl;
  void const* after;  // the command it depends on
  std::string value;  // of its first argument
};
std::vector<Recorded> created;
std::map<void const*, std::string> updated;
int captures = 0;
std::vector<std::string> registered;

std::string first_value(RecordApi::KernelArguments const* arguments) {
  return {static_cast<char const*>(arguments->arguments[0].address), size_t(arguments->arguments[0].size)};
}

XLA_FFI_Error* create_launch(void*, char const*, void const*, int64_t, int, RecordApi::LaunchDims, uint32_t,
                             int32_t uses_pdl, RecordApi::KernelArguments const* arguments,
                             void const* const* dependencies, uint32_t num_dependencies, void const** command) {
  created.push_back({uses_pdl, num_dependencies ? dependencies[0] : nullptr, first_value(arguments)});
  *command = reinterpret_cast<void const*>(created.size());
  return nullptr;
}

XLA_FFI_Error* update_launch(void*, void const* command, RecordApi::KernelArguments const* arguments) {
  updated[command] = first_value(arguments);
  return nullptr;
}

XLA_FFI_Error* request_stream_capture(void*) {
  ++captures;
  return nullptr;
}

constexpr RecordApi kRecordApi{create_launch, update_launch, nullptr, nullptr, request_stream_capture};

// A call that XLA records: its commands and the frame that handlers see.
struct Call {
  void const* commands[3] = {};
  int64_t num_commands = 0;
  RecordFrame frame{nullptr, &kRecordApi, 0, commands, &num_commands, 3};
};

Extension extension{sizeof(Extension), kRecordExtension, 0, 0, nullptr, nullptr};

XLA_FFI_Error* find_extension(FindExtensionArgs* args) {
  args->extension = args->type == kRecordExtension ? &extension : nullptr;
  return nullptr;
}

XLA_FFI_Error* register_handler(XLA_FFI_Handler_Register_Args* args) {
  auto const& target = *reinterpret_cast<RegisterArgs const*>(args);
  CHECK(target.bundle.execute != nullptr && target.bundle.record != nullptr);
  CHECK(target.traits == XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
  registered.emplace_back(target.name.ptr, target.name.len);
  return nullptr;
}

// The API of a runtime, larger than any of kRuntimes.
struct Api {
  alignas(8) unsigned char bytes[512] = {};

  explicit Api(Runtime const& runtime) {
    get()->struct_size = runtime.api_size;
    get()->api_version.minor_version = runtime.api_minor;
    get()->XLA_FFI_Handler_Register = register_handler;
    reinterpret_cast<ApiWithExtensions*>(bytes)->find_extension = find_extension;
  }
  XLA_FFI_Api* get() { return reinterpret_cast<XLA_FFI_Api*>(bytes); }
};

// Handlers of other files, which no case calls but for their metadata.

XLA_FFI_Error* no_handler(XLA_FFI_CallFrame*) { return nullptr; }

AddTarget const added[] = {AddTarget({"a", no_handler, no_handler, no_handler}),
                           AddTarget({"b", no_handler, no_handler, no_handler}),
                           AddTarget({"c", no_handler, no_handler, no_handler})};

// Cases

int const kOverlap = std::getenv("JAX_QMM_PDL") ? 0 : 1;  // which Python sets to 0

uint32_t const kFatbin[4] = {0xba55ed50, 16 << 16, 48}, kUnknownImage[4] = {1};
char const kKernels[2] = {};

std::optional<Destination> decode(Runtime runtime, int record_minor, RecordFrame* frame) {
  Api api(runtime);
  static std::vector<Api> alive;  // a Destination points to its API
  alive.reserve(100);
  alive.push_back(api);
  extension.minor_version = record_minor;
  extension.frame = frame;
  ffi::DiagnosticEngine diagnostic;
  return ffi::CtxDecoding<InGraph>::Decode(alive.back().get(), nullptr, diagnostic);
}

// Records `values`, each of which is a kernel's only argument, and returns the error.
ffi::Error record(Call& call, int action, std::vector<int> values, void const* image = kFatbin,
                  void const* kernel = kKernels) {
  call.frame.action = action;
  auto const destination = decode(kRuntimes[1], kRuntimes[1].record_minor, &call.frame);
  CHECK(destination);
  return (*destination)([&](Submit const& submit, Chosen&) {
    for (int value : values) CHECK(submit({kernel, image, {dim3(1), dim3(1)}, {{&value, sizeof(value)}}}) == 0);
    return ffi::Error::Success();
  });
}

int constexpr kCreate = 0, kUpdate = RecordApi::kUpdate;

std::string bytes(int value) { return {reinterpret_cast<char*>(&value), sizeof(value)}; }

void kernels_follow_each_other() {
  Call call;
  CHECK(record(call, kCreate, {7, 8}).success());
  CHECK(captures == 0 && call.num_commands == 2 && created.size() == 2);
  CHECK(created[0].value == bytes(7) && created[1].value == bytes(8));  // each outlived what it pointed to
  CHECK(created[0].after == nullptr && created[1].after == call.commands[0]);
  CHECK(created[0].uses_pdl == kOverlap);
  CHECK(record(call, kUpdate, {9, 10}).success());
  CHECK(created.size() == 2 && captures == 0);
  CHECK(updated[call.commands[0]] == bytes(9) && updated[call.commands[1]] == bytes(10));
}

void launches_have_attributes() {
  CHECK(on_stream(nullptr)({kKernels, kFatbin, {dim3(1), dim3(1)}, {}}) == cudaSuccess);
  CHECK(launch_attributes == kOverlap);
  CHECK(on_stream(nullptr)({kKernels, kFatbin, {dim3(2), dim3(1), 0, dim3(2)}, {}}) == cudaSuccess);
  CHECK(launch_attributes == 1 + kOverlap);
}

void check_refused(std::vector<int> values, void const* image, char const* why) {
  Call call;
  std::string const message = record(call, kCreate, values, image).message();
  CHECK(message.find(why) != std::string::npos && message.find("JAX_QMM_RECORD=0") != std::string::npos);
  CHECK(captures == 0 && created.empty() && call.num_commands == 0);
}

void unknown_images_are_refused() { check_refused({7}, kUnknownImage, "device code"); }
void too_many_kernels_are_refused() { check_refused({1, 2, 3, 4}, kFatbin, "3 kernels of a call, which had 4"); }

void calls_without_kernels_are_captured() {
  Call call;
  CHECK(record(call, kCreate, {}).success());
  CHECK(record(call, kUpdate, {}).success());
  CHECK(captures == 2);
  CHECK(record(call, kUpdate, {7}).failure());
  CHECK(captures == 2 && created.empty() && updated.empty());
}

void other_kernels_are_refused() {
  Call call;
  CHECK(record(call, kCreate, {7, 8}).success());
  CHECK(record(call, kUpdate, {9, 10}, kFatbin, kKernels + 1).message().find("JAX_QMM_RECORD=0") != std::string::npos);
  CHECK(record(call, kUpdate, {9}).failure());
  CHECK(captures == 0 && updated.empty());
}

void choices_are_kept() {
  Call call;
  for (int action : {kCreate, kUpdate}) {
    call.frame.action = action;
    auto const destination = decode(kRuntimes[0], kRuntimes[0].record_minor, &call.frame);
    CHECK(destination);
    ffi::Error const error = (*destination)([&](Submit const& submit, Chosen& chosen) {
      CHECK(bool(chosen) == (action == kUpdate));
      if (action == kUpdate) CHECK(*chosen == std::pair(3, 8));
      chosen = {3, 8};
      CHECK(submit({kKernels, kFatbin, {dim3(1), dim3(1)}, {{&action, sizeof(action)}}}) == cudaSuccess);
      return ffi::Error::Success();
    });
    CHECK(error.success());
  }
}

void unknown_runtimes_are_refused() {
  Call call;
  auto [minor, size, record_minor] = kRuntimes[1];
  CHECK(decode({minor, size, record_minor}, record_minor, &call.frame));
  CHECK(!decode({minor, size, record_minor}, record_minor + 1, &call.frame));
  CHECK(!decode({minor, size, record_minor}, kRuntimes[0].record_minor, &call.frame));
  CHECK(!decode({minor, size + 8, record_minor}, record_minor, &call.frame));
  CHECK(!decode({minor + 1, size, record_minor}, record_minor, &call.frame));
}

void known_runtimes_get_all_targets() {
  for (Runtime const& runtime : kRuntimes) {
    registered.clear();
    Api api(runtime);
    XLA_FFI_CallFrame frame{};
    frame.api = api.get();
    CHECK(register_recording(&frame) == nullptr);
    CHECK((registered == std::vector<std::string>{"a", "b", "c"}) && why_not_recorded().empty());
  }
}

void unknown_runtimes_get_no_targets() {
  Api api({kRuntimes[1].api_minor + 1, kRuntimes[1].api_size + 8, 0});
  XLA_FFI_CallFrame frame{};
  frame.api = api.get();
  CHECK(register_recording(&frame) == nullptr);
  CHECK(registered.empty() && why_not_recorded().find("FFI API 0.6 in 216 bytes") != std::string::npos);
}

int main(int, char** arguments) {
  run_case(arguments, {
                          CASE(kernels_follow_each_other),
                          CASE(launches_have_attributes),
                          CASE(unknown_images_are_refused),
                          CASE(too_many_kernels_are_refused),
                          CASE(calls_without_kernels_are_captured),
                          CASE(other_kernels_are_refused),
                          CASE(choices_are_kept),
                          CASE(unknown_runtimes_are_refused),
                          CASE(known_runtimes_get_all_targets),
                          CASE(unknown_runtimes_get_no_targets),
                      });
}
