// The ABI of XLA's FFI stage "record", which the headers of the oldest jaxlib that we support lack. XLA calls it
// unstable and does not always change its version with it, so it is used with the runtimes in kRuntimes alone, and with
// the releases of JAX that _compat.py lists; tests/ffi/record_abi.cc compares it with their headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace jax_qmm {

constexpr int kRecordStage = 4;
constexpr int64_t kRecordExtension = 128;

// What a known runtime is recognized by: minor versions, all major ones being 0, and a size.
struct Runtime {
  int api_minor;
  size_t api_size;  // of its XLA_FFI_Api
  int record_minor;
};
constexpr Runtime kRuntimes[] = {
    {4, 200, 1},  // jaxlib 0.11.2
    {5, 208, 2},  // jaxlib 0.12.0, 0.12.0.1
};

// The runtime that has this API, or null where it is none of them.
inline Runtime const* find_runtime(XLA_FFI_Api const& api) {
  for (Runtime const& runtime : kRuntimes) {
    if (api.api_version.major_version == 0 && api.api_version.minor_version == runtime.api_minor &&
        api.struct_size == runtime.api_size) {
      return &runtime;
    }
  }
  return nullptr;
}

struct RecordApi {
  struct Dim3 {
    int32_t x, y, z;
  };
  struct LaunchDims {
    Dim3 grid, block, cluster;  // cluster all 0 where there is none
  };
  struct KernelArgument {
    void const* address;
    int64_t size;
    int type;
  };
  struct KernelArguments {
    KernelArgument const* arguments;
    int64_t count;
  };
  static constexpr int kCubin = 1, kHostValue = 1, kUpdate = 1;

  XLA_FFI_Error* (*create_launch)(void* context, char const* kernel_name, void const* kernel_data, int64_t kernel_size,
                                  int format, LaunchDims, uint32_t shared_memory, int32_t uses_pdl,
                                  KernelArguments const*, void const* const* dependencies, uint32_t num_dependencies,
                                  void const** command);
  XLA_FFI_Error* (*update_launch)(void* context, void const* command, KernelArguments const*);
  void *create_memcpy, *update_memcpy;
  XLA_FFI_Error* (*request_stream_capture)(void* context);
};

struct RecordFrame {
  void* context;
  RecordApi const* api;
  int action;  // kUpdate, or to create
  void const** commands;
  int64_t* num_commands;
  int64_t max_commands;
};

struct Extension {
  size_t struct_size;
  int64_t type;
  int32_t major_version, minor_version;
  Extension const* next;
  RecordFrame* frame;
};

struct FindExtensionArgs {
  size_t struct_size;
  void* extension_start;
  void* context;
  int64_t type;
  Extension const* extension;  // out
};

// A known runtime's XLA_FFI_Api: behind what version 0.3 of it has stands the function that finds extensions.
struct ApiWithExtensions {
  unsigned char version_0_3[192];
  XLA_FFI_Error* (*find_extension)(FindExtensionArgs*);
};

struct HandlerBundle {
  XLA_FFI_Handler *instantiate, *prepare, *initialize, *execute, *record;
};

struct RegisterArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_ByteSpan name, platform;
  HandlerBundle bundle;
  XLA_FFI_Handler_Traits traits;
};

}  // namespace jax_qmm
