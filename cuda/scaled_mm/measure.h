// Timing of chosen kernels, for tuning and for the tables in the sources.
#pragma once

#include <string>
#include <vector>

#include "scaled_mm/scaled_mm.h"

namespace jax_qmm {

// Median microseconds of one launch of each choice, on the current device, which is `gpu`. `shape` gives m, n, k, in,
// out_dtype, fast_accum and an activation, if there is one; the operands are filled with `pattern`, random bytes that
// are legal for the dtype. The choices take turns, `rounds` times in shuffled orders; each turn replays a CUDA graph
// over as many sets of buffers as exceed the L2 cache several times, so that none serves from it. In it a launch's
// start may overlap the end of the one before, as in graphs that XLA records. Checks the choices, and throws
// std::runtime_error where a CUDA call fails.
std::vector<double> measure_scaled_mm(ScaledMm const& shape, std::vector<ScaledMmChoice> const& choices, Gpu const& gpu,
                                      std::string const& pattern, int rounds);

}  // namespace jax_qmm
