// mma.sync, and what loads, stores and transposes its fragments.
#include "decode.h"
#include "tiles.h"

namespace emu {
namespace {

struct MmaShape {
  int m, n, k;
  Type d, a, b, c;
  bool saturate;
};

// Rows of A in steps of 8, and K in steps of four registers' worth, as all shapes have it: register r of A has row g +
// 8 (r % 2) for M = 16, and the K of r / 2.
uint32_t mma(Warp& w, Inst const& i, uint32_t lanes) {
  if (!converged(w, lanes, w.alive)) return 0;
  auto const& s = *static_cast<MmaShape const*>(i.extra.get());
  int const each = 32 / bits_of(s.a);
  auto const reg = [&](int op, int r, int lane) { return w.rows[i.ops[i.begin[op] + r].row + lane]; };
  int const m_regs = s.m / 8;
  auto run = [&](auto zero) {
    using V = decltype(zero);
    V a[16 * 256], b[256 * 8], sums[16 * 8];
    for (int lane = 0; lane < 32; ++lane) {
      int const g = lane / 4, t = lane % 4;
      for (int r = 0; r < i.width(1); ++r) {
        uint32_t const word = reg(1, r, lane);
        int const row = g + 8 * (r % m_regs), k = r / m_regs * 4 * each + t * each;
        elements<V>(s.a, word, a + row * s.k + k, 1);
      }
      for (int r = 0; r < i.width(2); ++r) {
        uint32_t const word = reg(2, r, lane);
        int const k = r * 4 * each + t * each;
        elements<V>(s.b, word, b + k * 8 + g, 8);
      }
    }
    multiply_tiles<8>(a, b, sums, s.m, 8, s.k);
    for (int lane = 0; lane < 32; ++lane) {
      int const g = lane / 4, t = lane % 4;
      for (int e = 0; e < 2 * m_regs; ++e) {
        int const row = g + 8 * (e / 2), col = 2 * t + e % 2;
        if constexpr (std::is_integral_v<V>) {
          int64_t const sum = int64_t(int32_t(reg(3, e, lane))) + sums[row * 8 + col];
          w.rows[i.ops[e].row + lane] = uint32_t(s.saturate ? saturated(sum) : int32_t(sum));
        } else {
          double const sum = sums[row * 8 + col];
          if (s.d == Type::F32) {
            double const c = s.c == Type::F32 ? bit_cast<float>(reg(3, e, lane))
                                              : half_to_float(uint16_t(reg(3, e / 2, lane) >> (16 * (e % 2))));
            w.rows[i.ops[e].row + lane] = bit_cast<uint32_t>(float(c + sum));
          } else {
            double const c = s.c == Type::F32 ? bit_cast<float>(reg(3, e, lane))
                                              : half_to_float(uint16_t(reg(3, e / 2, lane) >> (16 * (e % 2))));
            uint32_t const code = encode(kHalf, c + sum);
            uint32_t& d = w.rows[i.ops[e / 2].row + lane];
            // C may be the same register: its other half was read or is not yet.
            d = e % 2 == 0 ? (s.c == Type::F32 ? code : (d & 0xffff0000) | code) : (d & 0xffff) | code << 16;
            if (e % 2 == 0 && i.ops[e / 2].row != i.ops[i.begin[3] + (s.c == Type::F32 ? e : e / 2)].row) d = code;
          }
        }
      }
    }
  };
  if (!w.defined.empty()) {
    bool rows[16], columns[8];
    std::fill_n(rows, 16, true), std::fill_n(columns, 8, true);
    uint32_t from = 0;
    for (int lane = 0; lane < 32; ++lane) {
      for (int op = 1; op <= 2; ++op) {
        for (int r = 0; r < i.width(op); ++r) {
          Operand const& o = i.ops[i.begin[op] + r];
          if (!w.undefined(o, lane)) continue;
          (op == 1 ? rows[lane / 4 + 8 * (r % m_regs)] : columns[lane / 4]) = false;
          from = w.origin[o.id];
        }
      }
    }
    int const packed = i.width(0) == m_regs ? 2 : 1;
    for (int r = 0; r < i.width(0); ++r) {
      for (int lane = 0; lane < 32; ++lane) {
        bool good = !w.undefined(i.ops[i.begin[3] + r], lane);
        if (!good) from = w.origin[i.ops[i.begin[3] + r].id];
        for (int e = r * packed; e < (r + 1) * packed; ++e)
          good &= rows[lane / 4 + 8 * (e / 2)] && columns[2 * (lane % 4) + e % 2];
        w.defined[i.ops[r].id] |= 1u << lane;
        if (!good) w.undefine(i.ops[r], lane, from);
      }
    }
  }
  if (is_float(s.a))
    run(double());
  else
    run(int32_t());
  return lanes;
}

uint32_t mma_f64(Warp& w, Inst const& i, uint32_t lanes) {
  if (!converged(w, lanes, w.alive)) return 0;
  auto const& s = *static_cast<MmaShape const*>(i.extra.get());
  auto const reg = [&](int op, int r, int lane) { return w.row<double>(i.ops[i.begin[op] + r])[lane]; };
  int const m_regs = s.m / 8;
  double a[16][16], b[8][16], d[32][4];
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < i.width(1); ++r) a[lane / 4 + 8 * (r % m_regs)][r / m_regs * 4 + lane % 4] = reg(1, r, lane);
    for (int r = 0; r < i.width(2); ++r) b[lane / 4][r * 4 + lane % 4] = reg(2, r, lane);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 2 * m_regs; ++e) {
      double sum = reg(3, e, lane);
      for (int k = 0; k < s.k; ++k) sum = std::fma(a[lane / 4 + 8 * (e / 2)][k], b[2 * (lane % 4) + e % 2][k], sum);
      d[lane][e] = sum;
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 2 * m_regs; ++e) w.row<double>(i.ops[e])[lane] = d[lane][e];
  }
  return lanes;
}

// ldmatrix and stmatrix: vec matrices of 8 rows of 16 bytes, whose addresses lanes 8 j to 8 j + 7 have. aux: transposed
uint32_t ldmatrix(Warp& w, Inst const& i, uint32_t lanes) {
  if (!converged(w, lanes, w.alive)) return 0;
  uint64_t addresses[32];
  for (int j = 0; j < i.vec; ++j) {
    uint16_t tile[8][8] = {};
    for (int r = 0; r < 8; ++r) {
      int const l = 8 * j + r;
      uint64_t const a = addresses[l] = w.value(i.op(1), l) + i.op(1).imm;
      if (uint8_t const* const p = resolve(w, i, l, i.space, a, 16, Access::Read)) {
        std::memcpy(tile[r], p, 16);
        uint8_t const* const state = w.defined.empty() ? nullptr : shared_state(w, p);
        for (int c = 0; c < 8; ++c) {
          if (state == nullptr || all_defined(state + 2 * c, 2)) continue;
          w.undefine(i.ops[j], i.aux ? 4 * c + r / 2 : 4 * r + c / 2, &i - w.cta->launch->kernel->code.data());
        }
      }
    }
    for (int l = 0; l < 32; ++l) {
      int const r = l / 4, c = 2 * (l % 4);
      uint32_t const low = i.aux ? tile[c][r] : tile[r][c], high = i.aux ? tile[c + 1][r] : tile[r][c + 1];
      w.rows[i.ops[j].row + l] = low | high << 16;
    }
  }
  if (Options::get().stats) {
    for (int j = 0; j < i.vec; ++j) {
      int banks[32] = {}, most = 0;
      for (int r = 0; r < 8; ++r)
        for (int b = 0; b < 4; ++b) most = std::max(most, ++banks[(addresses[8 * j + r] / 4 + b) % 32]);
      w.cta->cluster->shared_wavefronts += most;
      ++w.cta->cluster->shared_ideal;
    }
  }
  return lanes;
}
uint32_t stmatrix(Warp& w, Inst const& i, uint32_t lanes) {
  if (!converged(w, lanes, w.alive)) return 0;
  ++w.cta->cluster->events;
  for (int j = 0; j < i.vec; ++j) {
    uint16_t tile[8][8];
    for (int l = 0; l < 32; ++l) {
      int const r = l / 4, c = 2 * (l % 4);
      uint32_t const v = w.rows[i.ops[i.begin[1] + j].row + l];
      (i.aux ? tile[c][r] : tile[r][c]) = uint16_t(v);
      (i.aux ? tile[c + 1][r] : tile[r][c + 1]) = uint16_t(v >> 16);
    }
    for (int r = 0; r < 8; ++r) {
      int const l = 8 * j + r;
      uint8_t* const p = resolve(w, i, l, i.space, w.value(i.op(0), l) + i.op(0).imm, 16, Access::Write);
      if (p == nullptr) continue;
      std::memcpy(p, tile[r], 16);
      uint8_t* const state = w.defined.empty() ? nullptr : shared_state(w, p);
      for (int c = 0; c < 8 && state != nullptr; ++c) {
        if (w.undefined(i.ops[i.begin[1] + j], i.aux ? 4 * c + r / 2 : 4 * r + c / 2))
          state[2 * c] = state[2 * c + 1] = 0;
      }
    }
  }
  return lanes;
}
uint32_t movmatrix(Warp& w, Inst const& i, uint32_t lanes) {
  if (!converged(w, lanes, w.alive)) return 0;
  uint16_t tile[8][8];
  for (int l = 0; l < 32; ++l) {
    uint32_t const v = w.rows[i.op(1).row + l];
    tile[l / 4][2 * (l % 4)] = uint16_t(v), tile[l / 4][2 * (l % 4) + 1] = uint16_t(v >> 16);
  }
  uint32_t const defined = w.defined.empty() ? kAll : w.defined[i.op(1).id];
  for (int l = 0; l < 32; ++l) {
    w.rows[i.op(0).row + l] = tile[2 * (l % 4)][l / 4] | uint32_t(tile[2 * (l % 4) + 1][l / 4]) << 16;
    if (w.defined.empty()) continue;
    w.defined[i.op(0).id] |= 1u << l;
    int const from = 8 * (l % 4) + l / 8;  // and the row behind it
    if ((defined >> from & defined >> (from + 4) & 1) == 0) w.undefine(i.op(0), l, w.origin[i.op(1).id]);
  }
  return lanes;
}

}  // namespace

bool decode_mma(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  auto const [types, shape] = mma_name(p);
  if (op == "mma") {
    if (p.has("sp") || p.has("sp::ordered_metadata") || types.size() != 4 || shape.size() != 3)
      throw Error("this mma is not implemented");
    auto s = std::make_shared<MmaShape>(
        MmaShape{shape[0], shape[1], shape[2], types[0], types[1], types[2], types[3], p.has("satfinite")});
    if (p.parts[1] == "sync" && shape[1] != 8) throw Error("this mma is not implemented");
    if (s->m == 8 && is_float(s->a) && s->a != Type::F64) throw Error("mma.m8n8k4 of f16 is not implemented");
    if (s->a == Type::B1) throw Error("mma of single bits is not implemented");
    i.extra = s;
    return p.sync(s->a == Type::F64 ? mma_f64 : mma, Class::Mma, 1);
  }
  if (op == "ldmatrix" || op == "stmatrix") {
    if (!p.has("m8n8")) throw Error("only m8n8");
    i.space = Space::Shared;
    if (!p.has("shared") && !p.has("shared::cta") && !p.has("shared::cluster")) i.space = Space::Generic;
    i.aux = p.has("trans");
    i.vec = p.has("x4") ? 4 : p.has("x2") ? 2 : 1;
    p.sync(op == "ldmatrix" ? ldmatrix : stmatrix, Class::Mma, op == "ldmatrix");
    i.cls = Class::LoadStore;
    return true;
  }
  if (op == "movmatrix") return p.sync(movmatrix, Class::Mma, 1);
  return false;
}

}  // namespace emu
