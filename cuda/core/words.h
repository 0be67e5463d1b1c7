// What the words of kernels have in common.
#pragma once

#include <string>

namespace jax_qmm {

inline std::string words_of_tile(int m, int n, int k) {
  return std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
}

}  // namespace jax_qmm
