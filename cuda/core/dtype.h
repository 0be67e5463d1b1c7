// The element types of all kernels' operands.
#pragma once

namespace jax_qmm {

enum class DType { kS8, kF8E4M3, kBF16, kF16, kF32, kS32 };

constexpr char const* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kS8:
      return "int8";
    case DType::kF8E4M3:
      return "float8_e4m3fn";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF32:
      return "float32";
    case DType::kS32:
      return "int32";
  }
  return "";
}

constexpr int bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kS8:
    case DType::kF8E4M3:
      return 1;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF32:
    case DType::kS32:
      return 4;
  }
  return 0;
}

}  // namespace jax_qmm
