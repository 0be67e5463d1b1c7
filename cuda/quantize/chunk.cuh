// What quantizers hold of an array in registers, and the range of it.
#pragma once

#include <type_traits>

#include "quantize/arithmetic.cuh"

namespace jax_qmm::quantize {

template <class In>
using Pair = std::conditional_t<std::is_same_v<In, __half>, __half2, __nv_bfloat162>;

__device__ inline float absolute(float x) { return fabsf(x); }
__device__ inline __half2 absolute(__half2 x) { return __habs2(x); }
__device__ inline __nv_bfloat162 absolute(__nv_bfloat162 x) { return __habs2(x); }
__device__ inline __half2 max_nan(__half2 a, __half2 b) { return __hmax2_nan(a, b); }
__device__ inline __half2 min_nan(__half2 a, __half2 b) { return __hmin2_nan(a, b); }
__device__ inline __nv_bfloat162 max_nan(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2_nan(a, b); }
__device__ inline __nv_bfloat162 min_nan(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmin2_nan(a, b); }
__device__ inline float largest(float x) { return x; }
__device__ inline float largest(__half2 x) { return max_nan(__low2float(x), __high2float(x)); }
__device__ inline float largest(__nv_bfloat162 x) { return max_nan(__low2float(x), __high2float(x)); }

// V consecutive elements in registers: a load of 16 bytes, or one element where the alignment allows no more. Pairs of
// 16-bit elements stay packed, which halves the registers of a row and the work of finding its range.
template <class In, int V>
struct Chunk {
  using Lane = std::conditional_t<V == 1 || std::is_same_v<In, float>, float, Pair<In>>;
  static constexpr int kLanes = V == 1 ? 1 : 4;
  Lane lanes[kLanes];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) lanes[i] = Lane{};
  }

  __device__ void load(In const* x) {
    if constexpr (V == 1) {
      lanes[0] = static_cast<float>(*x);
    } else {
      static_assert(V * sizeof(In) == sizeof(uint4) && sizeof(lanes) == sizeof(uint4));
      // No read-only load: what wrote x may have ended after this kernel began.
      uint4 const bits = *reinterpret_cast<uint4 const*>(x);
      memcpy(lanes, &bits, sizeof(bits));
    }
  }

  __device__ float operator[](int i) const {
    if constexpr (std::is_same_v<Lane, float>) {
      return lanes[i];
    } else {
      return i % 2 == 0 ? __low2float(lanes[i / 2]) : __high2float(lanes[i / 2]);
    }
  }
};

template <Kind kind, class Lane>
struct Bounds {
  Lane high{}, low{};

  template <class Chunk>
  __device__ void include(Chunk const& chunk) {
#pragma unroll
    for (Lane lane : chunk.lanes) {
      if constexpr (kind == Kind::kInt8ZeroPoint) {
        high = max_nan(high, lane);
        low = min_nan(low, lane);
      } else {
        high = max_nan(high, absolute(lane));
      }
    }
  }

  __device__ Range range() const { return {range_bits(largest(high)), range_bits(largest(absolute(low)))}; }
};

}  // namespace jax_qmm::quantize
