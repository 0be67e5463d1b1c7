// How blocks of a cluster share K: each has some slots of terms, of four blocks of columns.
#pragma once

#include "block_quantized_mm/instances.h"
#include "core/cluster.cuh"

namespace jax_qmm::block_quantized {

struct PartOfK {
  int first_slot, end_slot;
  int blocks;  // of columns, of which the last part may have fewer in its last slot

  __device__ PartOfK(int all_blocks, int part, int parts) {
    int const all_slots = (all_blocks - 1) / kBlocksOfSlot + 1;
    first_slot = all_slots * part / parts, end_slot = all_slots * (part + 1) / parts;
    blocks = min(all_blocks, end_slot * kBlocksOfSlot) - first_slot * kBlocksOfSlot;
  }
};

// Of a tile whose sums two warpgroups have, each of half of its rows: quarters are divided among the parts of K, which
// are four at most. A quarter is half of the columns, and of the sums of a thread.
struct QuartersOfTile {
  int part, parts;

  __device__ int owner(int group, int half) const { return (2 * group + half) * parts / 4; }
  __device__ bool is_own(int group, int half) const { return owner(group, half) == part; }

  // Sends sums to those that own them, and adds up those of this part's own from all parts, in their order. Takes
  // `memory` of each block of the cluster: [part][four sums of a thread][thread].
  template <int kCount>
  __device__ void add(float (&sums)[kCount], int group, void* memory) const {
    constexpr int kOfHalf = kCount / 2;
    auto* const received = static_cast<float4*>(memory);
    auto const place = [&](int of, int i) { return &received[(of * kCount + i) / 4 * 128 + threadIdx.x % 128]; };
    __syncwarp();    // of lanes that a branch may have parted: sync_cluster is for whole warps
    sync_cluster();  // other blocks may be at their stages
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_own(group, half)) continue;
      auto const here = static_cast<uint32_t>(__cvta_generic_to_shared(place(part, half * kOfHalf)));
      uint32_t const to = cute::set_block_rank(here, owner(group, half));
#pragma unroll
      for (int i = 0; i < kOfHalf; i += 4) {
        float const* const four = &sums[half * kOfHalf + i];
        store_to_cluster(to + i / 4 * 128 * sizeof(float4), make_float4(four[0], four[1], four[2], four[3]));
      }
    }
    sync_stores_of_cluster();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!is_own(group, half)) continue;
      float* const own = &sums[half * kOfHalf];
      float total[kOfHalf] = {};
#pragma unroll 1
      for (int of = 0; of < parts; ++of) {
        if (of == part) {
#pragma unroll
          for (int i = 0; i < kOfHalf; ++i) total[i] += own[i];
          continue;
        }
#pragma unroll
        for (int i = 0; i < kOfHalf; i += 4) {
          float4 const four = *place(of, half * kOfHalf + i);
          total[i] += four.x, total[i + 1] += four.y, total[i + 2] += four.z, total[i + 3] += four.w;
        }
      }
#pragma unroll
      for (int i = 0; i < kOfHalf; ++i) own[i] = total[i];
    }
  }
};

}  // namespace jax_qmm::block_quantized
