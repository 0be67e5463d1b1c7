// What every handler needs: buffers as dtype, shape and address, and errors that name the argument.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "core/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jax_qmm {

namespace ffi = ::xla::ffi;

#define JAX_QMM_RETURN_IF_ERROR(expression) \
  if (ffi::Error error = (expression); error.failure()) return error

inline ffi::Error cuda_error(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(error));
}

inline std::optional<DType> dtype_of(ffi::AnyBuffer const& buffer) {
  switch (buffer.element_type()) {
    case ffi::S8:
      return DType::kS8;
    case ffi::F8E4M3FN:
      return DType::kF8E4M3;
    case ffi::BF16:
      return DType::kBF16;
    case ffi::F16:
      return DType::kF16;
    case ffi::F32:
      return DType::kF32;
    case ffi::S32:
      return DType::kS32;
    default:
      return std::nullopt;
  }
}

inline std::string to_string(ffi::AnyBuffer::Dimensions dims) {
  std::string text;
  for (int64_t dim : dims) text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return "(" + text + ")";
}

// Whether the buffer's dtype is one of those listed.
inline ffi::Error check_dtype(ffi::AnyBuffer const& buffer, char const* name, std::initializer_list<DType> allowed) {
  std::optional<DType> const dtype = dtype_of(buffer);
  std::string names;
  for (DType other : allowed) {
    if (dtype == other) return ffi::Error::Success();
    names += (names.empty() ? "" : ", ") + std::string(dtype_name(other));
  }
  return ffi::Error::InvalidArgument(std::string(name) + " has XLA's dtype " +
                                     std::to_string(static_cast<int>(buffer.element_type())) + "; it needs one of " +
                                     names);
}

inline ffi::Error check_shape(ffi::AnyBuffer const& buffer, char const* name, std::initializer_list<int64_t> shape) {
  auto const dims = buffer.dimensions();
  bool equal = dims.size() == shape.size();
  for (size_t i = 0; equal && i < dims.size(); ++i) equal = dims[i] == shape.begin()[i];
  if (equal) return ffi::Error::Success();
  ffi::AnyBuffer::Dimensions const wanted(shape.begin(), shape.size());
  return ffi::Error::InvalidArgument(std::string(name) + " has shape " + to_string(dims) + "; it needs " +
                                     to_string(wanted));
}

// Of an op whose lowering may have found a kernel to need workspace.
template <class Problem>
void read_workspace(std::optional<ffi::Result<ffi::AnyBuffer>> workspace, Problem& problem) {
  if (!workspace) return;
  problem.workspace = (*workspace)->untyped_data();
  problem.workspace_bytes = int64_t((*workspace)->size_bytes());
}

inline ffi::Error check_rank(ffi::AnyBuffer const& buffer, char const* name, size_t rank) {
  auto const dims = buffer.dimensions();
  if (dims.size() == rank) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(name) + " has shape " + to_string(dims) + "; it needs " +
                                     std::to_string(rank) + " dimensions");
}

}  // namespace jax_qmm
