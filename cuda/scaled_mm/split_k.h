// Split-K across blocks: each block of a multistage kernel sums a part of K, and a second kernel adds the parts up in
// their order, so that a result is the same in every run.
#pragma once

#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm::sm80 {

// The workspace holds (parts, batch, m, pitch) sums of 4 bytes. Columns from n on are what a tile has there.
constexpr int pitch_of_part(int n) { return (n + 7) / 8 * 8; }

constexpr int64_t sums_of_part(ScaledMm const& p) { return int64_t(p.batch) * p.m * pitch_of_part(p.n); }

cudaError_t prepare_add_parts();
cudaError_t add_parts(ScaledMm const& problem, int parts, Submit const& submit);

}  // namespace jax_qmm::sm80
