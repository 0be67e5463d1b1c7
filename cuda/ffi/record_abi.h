// The ABI of XLA's FFI stage "record", which the headers of the oldest jaxlib that we support lack: version 0.1, as
// c_api.h and record_c_api.h of jaxlib 0.11.2 have it. Version 0.2, of jaxlib 0.12, only adds to it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace jax_qmm {

constexpr int kRecordStage = 4;
constexpr int64_t kRecordExtension = 128;

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
  XLA_FFI_ExecutionContext* context;
  int64_t type;
  Extension const* extension;  // out
};

// The runtime's API, whose next field is the function that finds extensions.
struct ApiWithExtensions {
  XLA_FFI_Api api;
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
