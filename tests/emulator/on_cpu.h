// Handlers of kernels on the emulator as XLA's CPU client calls them: there is no stream, and the emulator must be told
// of XLA's buffers.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cudart_emulator.h"
#include "ffi/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_qmm {

inline void register_buffer(void* of_xla) {
  auto const* const buffer = static_cast<XLA_FFI_Buffer const*>(of_xla);
  size_t bytes = xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(buffer->dtype));
  for (int64_t i = 0; i < buffer->rank; ++i) bytes *= buffer->dims[i];
  emuRegister(buffer->data, bytes);
}

// The handler of target `i` for the CPU. XLA's CPU client has no stage initialize, so it comes first here.
template <size_t i>
XLA_FFI_Error* on_cpu(XLA_FFI_CallFrame* frame) {
  Target const& target = targets()[i];
  if (frame->extension_start != nullptr) return target.execute(frame);  // asks for metadata
  XLA_FFI_Api api = *frame->api;
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = nullptr;
    return nullptr;
  };
  XLA_FFI_CallFrame initialize{XLA_FFI_CallFrame_STRUCT_SIZE, nullptr, &api, frame->ctx,
                               XLA_FFI_ExecutionStage_INITIALIZE};
  initialize.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  initialize.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  initialize.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  if (XLA_FFI_Error* error = target.initialize(&initialize)) return error;

  XLA_FFI_CallFrame execute = *frame;
  execute.api = &api;
  for (int64_t j = 0; j < frame->args.size; ++j) register_buffer(frame->args.args[j]);
  for (int64_t j = 0; j < frame->rets.size; ++j) register_buffer(frame->rets.rets[j]);
  XLA_FFI_Error* error = target.execute(&execute);
  emuForget();
  if (std::string const reports = emuReports(); !reports.empty()) {
    if (error != nullptr) xla::ffi::internal::DestroyError(&api, error);
    XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, reports.c_str(),
                                   XLA_FFI_Error_Code_INTERNAL};
    error = api.XLA_FFI_Error_Create(&args);
  }
  return error;
}

template <size_t... i>
std::vector<std::pair<char const*, XLA_FFI_Handler*>> cpu_handlers(std::index_sequence<i...>) {
  std::vector<std::pair<char const*, XLA_FFI_Handler*>> handlers;
  ((i < targets().size() ? handlers.emplace_back(targets()[i].name, on_cpu<i>) : handlers.front()), ...);
  return handlers;
}

// All targets and their handlers. A handler is a plain function, which knows its target by its number alone.
inline auto cpu_handlers() {
  constexpr size_t kMostTargets = 64;
  if (targets().size() > kMostTargets) throw std::length_error("there are more targets than handlers for the CPU");
  return cpu_handlers(std::make_index_sequence<kMostTargets>{});
}

}  // namespace jax_qmm
