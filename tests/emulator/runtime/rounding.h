// What an instruction on floats says of rounding, subnormals and saturation.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cmath>

#include "decode.h"
#include "formats.h"

namespace emu {

constexpr int64_t kFtz = 1, kSat = 2, kRelu = 4, kNan = 8, kAbs = 16;  // in Inst::aux, beside a rounding << 8

inline Rounding rounding_of(Pending const& p) {
  for (auto part : p.parts) {
    if (part == "rz" || part == "rzi") return Rounding::Zero;
    if (part == "rm" || part == "rmi") return Rounding::Down;
    if (part == "rp" || part == "rpi") return Rounding::Up;
    if (part == "rna") return Rounding::NearestAway;
  }
  return Rounding::Nearest;
}

struct RoundingScope {
  int const before = std::fegetround();
  explicit RoundingScope(Rounding r) {
    if (r != Rounding::Nearest)
      std::fesetround(r == Rounding::Zero ? FE_TOWARDZERO : r == Rounding::Down ? FE_DOWNWARD : FE_UPWARD);
  }
  ~RoundingScope() { std::fesetround(before); }
};

template <class T>
T flush(T x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(T(0), x) : x;
}
template <class T>
T finish(T x, int64_t aux) {
  if (aux & kFtz) x = flush(x);
  if (aux & kSat) x = x > 0 ? std::min(x, T(1)) : T(0);
  if (aux & kRelu) x = x > 0 ? x : x != x ? x : T(0);
  return x;
}

}  // namespace emu
