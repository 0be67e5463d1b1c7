// The types of PTX.
#include <array>

#include "ptx.h"

namespace emu {
namespace {

struct TypeInfo {
  char const* name;
  Type type;
  int bits;
  bool is_signed, is_float;
};
constexpr TypeInfo kTypes[] = {
    {"pred", Type::Pred, 1, false, false},    {"b8", Type::B8, 8, false, false},
    {"b16", Type::B16, 16, false, false},     {"b32", Type::B32, 32, false, false},
    {"b64", Type::B64, 64, false, false},     {"b128", Type::B128, 128, false, false},
    {"u8", Type::U8, 8, false, false},        {"u16", Type::U16, 16, false, false},
    {"u32", Type::U32, 32, false, false},     {"u64", Type::U64, 64, false, false},
    {"s8", Type::S8, 8, true, false},         {"s16", Type::S16, 16, true, false},
    {"s32", Type::S32, 32, true, false},      {"s64", Type::S64, 64, true, false},
    {"f16", Type::F16, 16, true, true},       {"f16x2", Type::F16x2, 32, true, true},
    {"bf16", Type::BF16, 16, true, true},     {"bf16x2", Type::BF16x2, 32, true, true},
    {"tf32", Type::TF32, 32, true, true},     {"f32", Type::F32, 32, true, true},
    {"f64", Type::F64, 64, true, true},       {"e4m3", Type::E4M3, 8, true, true},
    {"e5m2", Type::E5M2, 8, true, true},      {"e4m3x2", Type::E4M3x2, 16, true, true},
    {"e5m2x2", Type::E5M2x2, 16, true, true}, {"s4", Type::S4, 4, true, false},
    {"u4", Type::U4, 4, false, false},        {"b1", Type::B1, 1, false, false},
    {"f32x2", Type::F32x2, 64, true, true},
};
TypeInfo const& info(Type t) {
  static auto const by_type = [] {
    std::array<TypeInfo, 64> all;
    all.fill({"", Type::None, 0, false, false});
    for (auto const& i : kTypes) all[size_t(i.type)] = i;
    return all;
  }();
  return by_type[size_t(t)];
}

}  // namespace

Type type_of(std::string_view name) {
  for (auto const& i : kTypes)
    if (name == i.name) return i.type;
  return Type::None;
}
int bits_of(Type t) { return info(t).bits; }
bool is_signed(Type t) { return info(t).is_signed; }
bool is_float(Type t) { return info(t).is_float; }

RegClass class_of(Type t) {
  int const bits = bits_of(t);
  return t == Type::Pred ? RegClass::Pred : bits <= 32 ? RegClass::Word : bits == 64 ? RegClass::Pair : RegClass::Quad;
}

}  // namespace emu
