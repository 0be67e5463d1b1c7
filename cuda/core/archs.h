// The architectures that this build has code for, from the definitions of CMake: JAX_QMM_ARCHS, the list of those with
// machine code, and JAX_QMM_PTX, the one that is kept as PTX too, or 0.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>

namespace jax_qmm {

// The compute capability (90 is 9.0) that the code was compiled for which a GPU of this one runs; 0 where it runs none.
// Machine code runs on GPUs of its own major version and no lower minor one; that of "90a" on 9.0 alone. PTX runs on
// all later ones.
inline int compiled_for(int capability) {
  int best = 0;
  for (std::string const arch : {JAX_QMM_ARCHS}) {
    int const built = std::atoi(arch.c_str());
    bool const runs = arch.back() == 'a' ? built == capability : built / 10 == capability / 10 && built <= capability;
    if (runs) best = std::max(best, built);
  }
  if (best == 0 && JAX_QMM_PTX > 0 && JAX_QMM_PTX <= capability) return JAX_QMM_PTX;
  return best;
}

}  // namespace jax_qmm
