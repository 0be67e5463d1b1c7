// Whether an output's dtype, scale and zero point go together.
#pragma once

#include <string>

#include "ffi/buffers.h"
#include "scaled_mm/problem.h"

namespace jax_qmm {

inline ffi::Error check_output(ScaledMm const& p) {
  auto const refuse = [](std::string const& why) { return ffi::Error::InvalidArgument(why); };
  std::string const out = std::string("out has dtype ") + dtype_name(p.out_dtype);
  bool const narrow = bytes_of(p.out_dtype) == 1;
  if (narrow && p.out_scale.data == nullptr) return refuse(out + "; it needs out_scale");
  if (!narrow && p.out_scale.data != nullptr) return refuse(out + ", which has no scale; out_scale needs 8 bits");
  if (p.out_dtype != DType::kS8 && p.out_zero_point.data != nullptr) {
    return refuse(out + ", which has no zero point; out_zero_point needs int8");
  }
  return ffi::Error::Success();
}

}  // namespace jax_qmm
