// Handlers of kernels on the emulator as XLA's CPU client calls them: there is no stream, and the kernels run on copies
// of XLA's buffers in memory of the emulator.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cudart_emulator.h"
#include "ffi/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_qmm {

// Calls that ended with reports. XLA drops the error of a call whose result nobody asks for.
inline std::atomic<int> calls_with_reports{0};

// A buffer of XLA's, copied: XLA's own lie side by side, where an access beyond one would be an access to the next.
class Copy {
 public:
  explicit Copy(void* of_xla) : xla_(*static_cast<XLA_FFI_Buffer const*>(of_xla)), copy_(xla_) {
    bytes_ = xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(xla_.dtype));
    for (int64_t i = 0; i < xla_.rank; ++i) bytes_ *= xla_.dims[i];
    // Two to a byte, which ByteWidth doesn't say.
    if (xla_.dtype == XLA_FFI_DataType_S4 || xla_.dtype == XLA_FFI_DataType_U4) bytes_ = (bytes_ + 1) / 2;
    if (cudaMalloc(&copy_.data, bytes_) != cudaSuccess) throw std::bad_alloc();
  }
  ~Copy() { cudaFree(copy_.data); }
  Copy(Copy const&) = delete;

  void fill() { cudaMemcpy(copy_.data, xla_.data, bytes_, cudaMemcpyDefault); }
  void give_back() { cudaMemcpy(xla_.data, copy_.data, bytes_, cudaMemcpyDefault); }
  void* get() { return &copy_; }

 private:
  XLA_FFI_Buffer xla_, copy_;
  size_t bytes_;
};

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
  XLA_FFI_Error* error = target.initialize(&initialize);

  if (error == nullptr) {
    std::vector<std::unique_ptr<Copy>> operands, results;
    std::vector<void*> args, rets;
    for (int64_t j = 0; j < frame->args.size; ++j) {
      args.push_back(operands.emplace_back(std::make_unique<Copy>(frame->args.args[j]))->get());
      operands.back()->fill();
    }
    for (int64_t j = 0; j < frame->rets.size; ++j) {
      rets.push_back(results.emplace_back(std::make_unique<Copy>(frame->rets.rets[j]))->get());
    }
    XLA_FFI_CallFrame execute = *frame;
    execute.api = &api;
    execute.args.args = args.data();
    execute.rets.rets = rets.data();
    error = target.execute(&execute);
    for (auto& result : results) result->give_back();
  }
  if (std::string const reports = emuReports(); !reports.empty()) {
    ++calls_with_reports;
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
