// Blocks of a cluster wait for each other, and store to each other's shared memory.
#pragma once

#include "cute/arch/cluster_sm90.hpp"

namespace jax_qmm {

// Without a release, which takes up to 1 us: what other blocks read of this one's memory are barriers, which have a
// fence of their own.
__device__ inline void sync_cluster() {
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
}

// The same, after which a block has what others have stored to it.
__device__ inline void sync_stores_of_cluster() {
  cute::cluster_arrive();
  cute::cluster_wait();
}

// To what cute::set_block_rank gives as a place in another block's shared memory.
__device__ inline void store_to_cluster(uint32_t place, int4 values) {
  asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(values.x), "r"(values.y),
               "r"(values.z), "r"(values.w)
               : "memory");
}
__device__ inline void store_to_cluster(uint32_t place, float4 values) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place), "f"(values.x), "f"(values.y),
               "f"(values.z), "f"(values.w)
               : "memory");
}

}  // namespace jax_qmm
