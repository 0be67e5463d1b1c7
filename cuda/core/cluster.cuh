// Blocks of a cluster wait for each other.
#pragma once

#include "cute/arch/cluster_sm90.hpp"

namespace jax_qmm {

// Without a release, which takes up to 1 us: what other blocks read of this one's memory are barriers, which have a
// fence of their own.
__device__ inline void sync_cluster() {
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
}

}  // namespace jax_qmm
