// Narrow floating-point formats.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "machine.h"

namespace emu {

enum class Rounding : uint8_t { Nearest, Zero, Down, Up, NearestAway };

struct Format {
  int exponent_bits, mantissa_bits;
  bool infinity;
  uint32_t nan, largest;  // codes without the sign
};
constexpr Format kHalf{5, 10, true, 0x7fff, 0x7bff}, kBfloat{8, 7, true, 0x7fff, 0x7f7f},
    kE4m3{4, 3, false, 0x7f, 0x7e}, kE5m2{5, 2, true, 0x7f, 0x7b}, kTf32{8, 10, true, 0x3ffff, 0x3fbff};

inline double decode(Format const& f, uint32_t code) {
  int const bias = (1 << (f.exponent_bits - 1)) - 1;
  uint32_t const magnitude = code & ((1u << (f.exponent_bits + f.mantissa_bits)) - 1);
  uint32_t const e = magnitude >> f.mantissa_bits, m = magnitude & ((1u << f.mantissa_bits) - 1);
  double x;
  if (f.infinity && e == (1u << f.exponent_bits) - 1)
    x = m == 0 ? INFINITY : NAN;
  else if (!f.infinity && magnitude == f.nan)
    x = NAN;
  else
    x = e == 0 ? std::ldexp(double(m), 1 - bias - f.mantissa_bits)
               : std::ldexp(double(m | 1u << f.mantissa_bits), int(e) - bias - f.mantissa_bits);
  return code >> (f.exponent_bits + f.mantissa_bits) & 1 ? -x : x;
}

inline uint32_t encode(Format const& f, double x, Rounding rounding = Rounding::Nearest, bool saturate = false) {
  uint32_t const sign = std::signbit(x) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0;
  if (std::isnan(x)) return f.nan;
  double const a = std::fabs(x);
  uint32_t const inf = f.infinity ? ((1u << f.exponent_bits) - 1) << f.mantissa_bits : f.nan;
  if (std::isinf(x)) return sign | (saturate ? f.largest : inf);
  if (a == 0) return sign;
  int const bias = (1 << (f.exponent_bits - 1)) - 1;
  int e;
  std::frexp(a, &e);
  e = std::max(e - 1, 1 - bias);
  double const q = std::ldexp(a, f.mantissa_bits - e), floor = std::floor(q), rest = q - floor;
  bool const odd = std::fmod(floor, 2) != 0;
  bool up = false;
  switch (rounding) {
    case Rounding::Nearest:
      up = rest > 0.5 || (rest == 0.5 && odd);
      break;
    case Rounding::NearestAway:
      up = rest >= 0.5;
      break;
    case Rounding::Zero:
      break;
    case Rounding::Down:
      up = sign != 0 && rest > 0;
      break;
    case Rounding::Up:
      up = sign == 0 && rest > 0;
      break;
  }
  uint64_t r = uint64_t(floor) + up;
  uint64_t const one = 1ull << f.mantissa_bits;
  if (r >= 2 * one) r >>= 1, ++e;
  uint64_t const code = r < one ? r : (uint64_t(e + bias) << f.mantissa_bits) + (r - one);
  if (code > f.largest) {
    bool const to_largest = saturate || (rounding == Rounding::Zero) || (rounding == Rounding::Down && !sign) ||
                            (rounding == Rounding::Up && sign);
    return sign | (to_largest ? f.largest : inf);
  }
  return sign | uint32_t(code);
}

inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float f) {
  if (f != f) return 0x7fff;
  return _cvtss_sh(f, 0);
}
inline float bf16_to_float(uint16_t h) { return bit_cast<float>(uint32_t(h) << 16); }
inline uint16_t float_to_bf16(float f) {
  if (f != f) return 0x7fff;
  uint32_t const b = bit_cast<uint32_t>(f);
  return uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
inline float tf32_to_float(uint32_t b) { return bit_cast<float>(b & 0xffffe000); }

// Values of the 8-bit formats by code.
struct ByteTables {
  float e4m3[256], e5m2[256];
  ByteTables() {
    for (int i = 0; i < 256; ++i) e4m3[i] = float(decode(kE4m3, i)), e5m2[i] = float(decode(kE5m2, i));
  }
};
inline ByteTables const& byte_tables() {
  static ByteTables const tables;
  return tables;
}

// a * b + c, whose product is exact in double, rounded to odd, so that a second rounding is right.
inline double fma_to_odd(double a, double b, double c) {
  double const p = a * b, s = p + c;
  if (!std::isfinite(s)) return s;
  double const bb = s - p, error = (p - (s - bb)) + (c - bb);
  if (error != 0 && !(bit_cast<uint64_t>(s) & 1)) {
    return std::nextafter(s, error > 0 ? INFINITY : -INFINITY);
  }
  return s;
}

}  // namespace emu
