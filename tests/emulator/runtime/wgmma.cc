// wgmma, which takes its operands from shared memory.
#include "decode.h"
#include "tiles.h"

namespace emu {
namespace {

struct WgmmaShape {
  int n, k;
  Type d, a, b;
  bool a_in_registers, saturate;
  int negate_a = 1, negate_b = 1;
  bool transpose_a = false, transpose_b = false;  // M or N is contiguous
};

// Where the bytes of an operand lie: rows (M or N) by K, in tiles of 8 rows, or of 8 K where rows are contiguous.
struct Descriptor {
  uint32_t start, leading, stride;
  int swizzle;
  explicit Descriptor(uint64_t bits)
      : start(uint32_t(bits & 0x3fff) << 4),
        leading(uint32_t(bits >> 16 & 0x3fff) << 4),
        stride(uint32_t(bits >> 32 & 0x3fff) << 4) {
    int const mode = bits >> 62;  // 1: 128 bytes, 2: 64, 3: 32
    swizzle = mode == 0 ? 0 : 4 - mode;
  }
  uint32_t address(int row, int k, int bytes, bool row_contiguous) const {
    uint32_t a;
    if (!row_contiguous) {
      uint32_t const kb = k * bytes;
      if (swizzle == 0)
        a = start + row / 8 * stride + row % 8 * 16 + kb / 16 * leading + kb % 16;
      else
        a = start + row / 8 * stride + row % 8 * (16u << swizzle) + kb;
    } else {
      uint32_t const t = 16 / bytes;
      if (swizzle == 0)
        a = start + row % t * bytes + row / t * stride + k % 8 * 16 + k / 8 * leading;
      else
        a = start + row % t * bytes + row / t % (1u << swizzle) * 16 + row / (t << swizzle) * leading +
            k % 8 * (16u << swizzle) + k / 8 * stride;
    }
    return swizzle_address(swizzle, a);
  }
};

// Reads rows [first, first + count) into values; `good` of a row becomes 0 where it has what was never written.
template <class V>
bool gather(Warp& w, Inst const& i, Descriptor const& d, int first, int count, int k, Type type, bool row_contiguous,
            V* out, int row_step, int k_step, Clocks const& issued, uint8_t* good) {
  int const bytes = type == Type::TF32 ? 4 : bytes_of(type);
  Cta& t = *w.cta;
  Options const& options = Options::get();
  auto const check = [&](uint32_t at, uint32_t size) {
    if (at < kSharedBase || at + size > t.shared_end) {
      t.launch->report(
          w, i, 0, "memory",
          "wgmma reads shared memory at " + std::to_string(at) + ", which ends at " + std::to_string(t.shared_end));
      return false;
    }
    if (!t.state.empty()) {
      for (uint32_t b = 0; b < size; ++b) {
        uint8_t& state = t.state[at + b];
        if (state & kInFlight && options.check_async) {
          t.launch->report(w, i, 0, "async",
                           "wgmma reads byte " + std::to_string(at + b) +
                               " of shared memory before a wait for the asynchronous copy that writes it");
          break;
        }
      }
    }
    if (!issued.empty()) race_access(w, t, i, 0, at, size, false, &issued);
    proxy_access(w, t, i, 0, at, size, false, issued);
    return true;
  };
  uint8_t const* const shared = t.shared.data();
  if (!row_contiguous) {
    int const each = 16 / bytes;
    for (int r = 0; r < count; ++r) {
      for (int c = 0; c < k; c += each) {
        uint32_t const at = d.address(first + r, c, bytes, false);
        if (!check(at, 16)) return false;
        if (!w.defined.empty() && !all_defined(&t.state[at], 16)) good[r] = 0;
        uint32_t words[4];
        std::memcpy(words, shared + at, 16);
        for (int j = 0; j < 4; ++j)
          elements<V>(type, words[j], out + r * row_step + (c + j * each / 4) * k_step, k_step);
      }
    }
  } else {
    int const each = 16 / bytes;
    for (int r = 0; r < count; r += each) {
      for (int c = 0; c < k; ++c) {
        uint32_t const at = d.address(first + r, c, bytes, true);
        if (!check(at, 16)) return false;
        for (int j = 0; j < each && r + j < count; ++j) {
          if (!w.defined.empty() && !all_defined(&t.state[at + j * bytes], bytes)) good[r + j] = 0;
          uint32_t bits = 0;
          std::memcpy(&bits, shared + at + j * bytes, bytes);
          out[(r + j) * row_step + c * k_step] = element<V>(type, bits);
        }
      }
    }
  }
  return true;
}

// Each warp of the four computes its 16 rows when it comes here. The results are there at once, but not to be used
// before wgmma.wait_group: Warp::track and the clocks of races see to that.
template <class V>
void multiply(Warp& w, Inst const& i, WgmmaShape const& s) {
  std::vector<V> a(16 * s.k), b(s.n * s.k), sums(16 * s.n);
  Clocks const issued = race_issue(w);
  int const a_op = 1, b_op = 2;
  uint8_t good_a[16], good_b[256];
  std::memset(good_a, 1, sizeof(good_a)), std::memset(good_b, 1, sizeof(good_b));
  if (s.a_in_registers) {
    int const each = 32 / bits_of(s.a);
    for (int lane = 0; lane < 32; ++lane) {
      for (int r = 0; r < 4; ++r) {
        uint32_t const word = w.rows[i.ops[i.begin[a_op] + r].row + lane];
        int const row = lane / 4 + 8 * (r % 2), k = r / 2 * 4 * each + lane % 4 * each;
        elements<V>(s.a, word, a.data() + row * s.k + k, 1);
        if (w.undefined(i.ops[i.begin[a_op] + r], lane)) good_a[row] = 0;
      }
    }
  } else if (!gather<V>(w, i, Descriptor(w.value(i.op(a_op), 0)), 16 * (w.index % 4), 16, s.k, s.a, s.transpose_a,
                        a.data(), s.k, 1, issued, good_a)) {
    return;
  }
  if (!gather<V>(w, i, Descriptor(w.value(i.op(b_op), 0)), 0, s.n, s.k, s.b, s.transpose_b, b.data(), 1, s.n, issued,
                 good_b))
    return;
  bool const accumulate = w.value(i.op(3), 0) & 1;
  double const sign = s.negate_a * s.negate_b;
  if (!w.defined.empty()) {
    int const packed = i.width(0) == s.n / 4 ? 2 : 1;
    for (int r = 0; r < i.width(0); ++r) {
      for (int lane = 0; lane < 32; ++lane) {
        bool good = !accumulate || !w.undefined(i.ops[r], lane);
        for (int e = r * packed; e < (r + 1) * packed; ++e) {
          good &= good_a[lane / 4 + 8 * (e / 2 % 2)] && good_b[e / 4 * 8 + 2 * (lane % 4) + e % 2];
        }
        if (good)
          w.defined[i.ops[r].id] |= 1u << lane;
        else
          w.undefine(i.ops[r], lane, &i - w.cta->launch->kernel->code.data());
      }
    }
  }
  bool const narrow = Options::get().narrow && (s.a == Type::E4M3 || s.a == Type::E5M2) && s.d == Type::F32;
  if constexpr (!std::is_integral_v<V>) {
    if (narrow) {
      for (int j = 0; j < s.n / 8; ++j) {
        for (int lane = 0; lane < 32; ++lane) {
          for (int e = 0; e < 4; ++e) {
            float const c = accumulate ? bit_cast<float>(w.rows[i.ops[4 * j + e].row + lane]) : 0.0f;
            sums[(lane / 4 + 8 * (e / 2)) * s.n + 8 * j + 2 * (lane % 4) + e % 2] = c;
          }
        }
      }
      if (sign < 0)
        for (V& x : a) x = -x;
      multiply_narrowly(a.data(), b.data(), sums.data(), 16, s.n, s.k);
    }
  }
  if (!narrow) multiply_tiles<0>(a.data(), b.data(), sums.data(), 16, s.n, s.k);
  for (int j = 0; j < s.n / 8; ++j) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int e = 0; e < 4; ++e) {
        V sum = sums[(lane / 4 + 8 * (e / 2)) * s.n + 8 * j + 2 * (lane % 4) + e % 2];
        if constexpr (std::is_integral_v<V>) {
          uint32_t& d = w.rows[i.ops[4 * j + e].row + lane];
          int64_t const total = int64_t(accumulate ? int32_t(d) : 0) + sum;
          d = uint32_t(s.saturate ? saturated(total) : int32_t(total));
        } else {
          if (narrow) {
            w.rows[i.ops[4 * j + e].row + lane] = bit_cast<uint32_t>(float(sum));
            continue;
          }
          sum *= sign;
          if (s.d == Type::F32) {
            uint32_t& d = w.rows[i.ops[4 * j + e].row + lane];
            d = bit_cast<uint32_t>(float((accumulate ? bit_cast<float>(d) : 0.0f) + sum));
          } else {
            uint32_t& d = w.rows[i.ops[2 * j + e / 2].row + lane];
            int const at = 16 * (e % 2);
            double const c = accumulate ? half_to_float(uint16_t(d >> at)) : 0.0f;
            d = (d & ~(0xffffu << at)) | encode(kHalf, c + sum) << at;
          }
        }
      }
    }
  }
}

// Registers that ordinary instructions have written since the warp's last wgmma.fence, or wgmma of another shape.
void check_fenced(Warp& w, Inst const& i, WgmmaShape const& s) {
  Launch& launch = *w.cta->launch;
  uint32_t const now = w.mma_fences + 1, shape = now << 12 | s.n / 8 << 6 | s.k / 8;
  if (w.mma_fences == 0) launch.report(w, i, 0, "fence", "no wgmma.fence comes before it");
  for (int op = 0; op <= (s.a_in_registers ? 1 : 0); ++op) {
    for (int r = 0; r < i.width(op); ++r) {
      uint32_t const id = i.ops[i.begin[op] + r].id;
      std::string const& name = launch.kernel->register_names[id];
      if (w.touched[id] == now) {
        launch.report(w, i, 0, "fence",
                      std::string(op ? "reads A from " : "accumulates in ") + name +
                          ", which was written after the last wgmma.fence");
      } else if (op == 0 && w.accumulated[id] >> 12 == (now & 0xfffff) && w.accumulated[id] != shape) {
        launch.report(w, i, 0, "fence",
                      "accumulates in " + name + ", where a wgmma of another shape did, with no wgmma.fence between");
      }
      if (op == 0) w.touched[id] = 0, w.accumulated[id] = shape;
    }
  }
}

uint32_t wgmma(Warp& w, Inst const& i, uint32_t lanes) {
  if (!converged(w, lanes, w.alive)) return 0;
  auto const& s = *static_cast<WgmmaShape const*>(i.extra.get());
  if (!w.touched.empty()) check_fenced(w, i, s);
  if (is_float(s.a))
    multiply<double>(w, i, s);
  else
    multiply<int32_t>(w, i, s);
  if (Options::get().check_async) {
    for (int r = 0; r < i.width(0); ++r) {
      bool known = false;
      for (auto& [id, group] : w.in_flight) {
        if (id == i.ops[r].id) known = true, group = w.mma_group;
      }
      if (!known) w.in_flight.push_back({i.ops[r].id, w.mma_group});
    }
  }
  return lanes;
}
void wgmma_fence(Warp& w, Inst const&, uint32_t) { ++w.mma_fences; }
void wgmma_commit(Warp& w, Inst const&, uint32_t) {
  ++w.mma_group;
  ++w.cta->cluster->events;
  w.mma_clocks.push_back(w.agent_clock);
}
// The four warps of a warpgroup multiply together: a group is done when all have issued it.
uint32_t wgmma_wait(Warp& w, Inst const& i, uint32_t lanes) {
  if (!converged(w, lanes, w.alive)) return 0;
  uint32_t const keep = i.op(0).imm;
  if (w.mma_group <= keep) return lanes;
  uint32_t const finished = w.mma_group - keep;  // groups before this one
  size_t const first = w.index / 4 * 4, last = std::min(first + 4, w.cta->warps.size());
  for (size_t j = first; j < last; ++j) {
    if (w.cta->warps[j].mma_group < finished) return 0;
  }
  size_t kept = 0;
  for (auto const& f : w.in_flight)
    if (f.second >= finished) w.in_flight[kept++] = f;
  w.in_flight.resize(kept);
  for (size_t j = first; j < last && !w.clocks.empty(); ++j) {
    uint32_t& clock = w.clocks[race_actor(w.cta->warps[j], true)];
    clock = std::max(clock, w.cta->warps[j].mma_clocks[finished - 1]);
  }
  return lanes;
}

}  // namespace

bool decode_wgmma(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  if (op != "wgmma") return false;
  auto const [types, shape] = mma_name(p);
  i.cls = Class::Mma;
  i.wgmma = true;
  if (p.parts[1] == "fence") {
    i.exec = wgmma_fence;
  } else if (p.parts[1] == "commit_group") {
    i.exec = wgmma_commit;
  } else if (p.parts[1] == "wait_group") {
    p.sync(wgmma_wait, Class::Mma, 0);
  } else if (p.parts[1] == "mma_async") {
    if (p.has("sp") || types.size() != 3 || shape.size() != 3) throw Error("this wgmma is not implemented");
    auto s = std::make_shared<WgmmaShape>(
        WgmmaShape{shape[1], shape[2], types[0], types[1], types[2], i.width(1) > 1, p.has("satfinite")});
    if (s->a == Type::B1) throw Error("wgmma of single bits is not implemented");
    if (is_float(s->a) && i.count() > 5) {
      s->negate_a = int(i.op(4).imm), s->negate_b = int(i.op(5).imm);
      int next = 6;
      if (!s->a_in_registers && i.count() > 7) s->transpose_a = i.op(next++).imm;
      if (i.count() > next) s->transpose_b = i.op(next).imm;
    }
    i.extra = s;
    i.reads_destination = true;
    return p.sync(wgmma, Class::Mma, 1);
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
