// Products of tiles. Integer sums are exact. Of floats, the products of one instruction are summed in double, and
// rounded once, to nearest: real tensor cores align and truncate, so the last bits differ. Of fp8 by wgmma, where that
// shows, it is modelled (EMU_NARROW=0: not).
#pragma once

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "formats.h"
#include "machine.h"

namespace emu {

// A value of an operand: int for integers, else double, in which products of all types but f64 are exact.
template <class V>
inline __attribute__((always_inline)) V element(Type t, uint32_t bits) {
  switch (t) {
    case Type::S8:
      return V(int8_t(bits));
    case Type::U8:
      return V(uint8_t(bits));
    case Type::S4:
      return V(int32_t(bits << 28) >> 28);
    case Type::U4:
      return V(bits & 15);
    case Type::F16:
      return V(half_to_float(uint16_t(bits)));
    case Type::BF16:
      return V(bf16_to_float(uint16_t(bits)));
    case Type::TF32:
      return V(tf32_to_float(bits));
    case Type::E4M3:
      return V(byte_tables().e4m3[bits & 0xff]);
    case Type::E5M2:
      return V(byte_tables().e5m2[bits & 0xff]);
    default:
      throw Error("mma of a type that is not implemented");
  }
}

// The values of a register, from its lowest bits on, `step` apart.
template <class V>
void elements(Type t, uint32_t word, V* out, int step) {
  auto const each = [&](auto type, int bits) {
    for (int j = 0; j < 32 / bits; ++j)
      out[j * step] = element<V>(type(), bits == 32 ? word : word >> (bits * j) & ((1u << (bits & 31)) - 1));
  };
#define CASE(name, bits) \
  case Type::name:       \
    return each(std::integral_constant<Type, Type::name>(), bits)
  switch (t) {
    CASE(S8, 8);
    CASE(U8, 8);
    CASE(S4, 4);
    CASE(U4, 4);
    CASE(F16, 16);
    CASE(BF16, 16);
    CASE(E4M3, 8);
    CASE(E5M2, 8);
    CASE(TF32, 32);
    default:
      throw Error("mma of a type that is not implemented");
  }
#undef CASE
}

// Sums of products of A, rows of K, and B, columns beside each other for each K: what compilers make vectors of.
template <int kN, class V>
void multiply_tiles(V const* a, V const* b, V* sums, int rows, int any_n, int k) {
  int const n = kN != 0 ? kN : any_n;
  for (int r = 0; r < rows; ++r) {
    V* const sum = sums + r * n;
    for (int j = 0; j < n; ++j) sum[j] = 0;
    for (int i = 0; i < k; ++i) {
      V const x = a[r * k + i];
      V const* const y = b + i * n;
#pragma GCC ivdep
      for (int j = 0; j < n; ++j) sum[j] += x * y[j];
    }
  }
}

// As Hopper sums fp8: all products of a step and the sum so far are aligned to the largest, and cut off below the 13th
// fractional bit of that. `sums` holds what there is so far, and becomes the result. A model: the last bit is not
// vouched for.
inline void multiply_narrowly(double const* a, double const* b, double* sums, int rows, int n, int k) {
  std::vector<double> largest(n), total(n);
  for (int r = 0; r < rows; ++r) {
    double* const sum = sums + r * n;
    for (int j = 0; j < n; ++j) largest[j] = std::fabs(sum[j]);
    for (int i = 0; i < k; ++i) {
      double const x = std::fabs(a[r * k + i]);
      for (int j = 0; j < n; ++j) largest[j] = std::max(largest[j], x * std::fabs(b[i * n + j]));
    }
    // Becomes the reciprocal of the last place that is kept; largest is 2^e or a little more.
    for (int j = 0; j < n; ++j) {
      double const power = bit_cast<double>(bit_cast<uint64_t>(largest[j]) & 0x7ff0000000000000);
      largest[j] = power > 0 && power < INFINITY ? 0x1p13 / power : 0;
      total[j] = std::trunc(sum[j] * largest[j]);
    }
    for (int i = 0; i < k; ++i) {
      double const x = a[r * k + i];
      for (int j = 0; j < n; ++j) total[j] += std::trunc(x * b[i * n + j] * largest[j]);
    }
    for (int j = 0; j < n; ++j) {
      if (largest[j] != 0) {
        sum[j] = total[j] / largest[j];
      } else {  // zeros, infinities, NaNs
        for (int i = 0; i < k; ++i) sum[j] += a[r * k + i] * b[i * n + j];
      }
    }
  }
}

inline int32_t saturated(int64_t x) { return int32_t(std::min<int64_t>(std::max<int64_t>(x, INT32_MIN), INT32_MAX)); }

// The types and the shape in an instruction's name: .m64n16k32.
struct MmaName {
  std::vector<Type> types;
  std::vector<int> shape;
};
inline MmaName mma_name(Pending const& p) {
  MmaName name;
  for (size_t j = 1; j < p.parts.size(); ++j) {
    std::string_view const part = p.parts[j];
    if (Type const t = type_of(part); t != Type::None) name.types.push_back(t);
    if (part.size() <= 3 || part[0] != 'm' || part[1] < '0' || part[1] > '9') continue;
    name.shape.clear();
    for (char c : part) {
      if (c >= '0' && c <= '9')
        name.shape.back() = name.shape.back() * 10 + (c - '0');
      else
        name.shape.push_back(0);
    }
  }
  return name;
}

}  // namespace emu
