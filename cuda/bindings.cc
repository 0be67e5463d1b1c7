// The extension module: the FFI handlers for XLA, and the host functions that Python's explain and tune need.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "ffi/handlers.h"
#include "ffi/queue.h"
#include "scaled_mm/measure.h"
#include "scaled_mm/scaled_mm.h"

namespace nb = nanobind;
using namespace jax_qmm;

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict registrations(bool record) {
  nb::dict dict;
  if (record) {
    dict["jax_qmm_register"] = capsule(JaxQmmRegister);
    return dict;
  }
  for (Target const& target : kTargets) {
    nb::dict stages;
    stages["initialize"] = capsule(target.initialize);
    stages["execute"] = capsule(target.execute);
    dict[target.name] = stages;
  }
  return dict;
}

DType dtype(std::string const& name) {
  for (DType dtype : {DType::kS8, DType::kF8E4M3, DType::kBF16, DType::kF16, DType::kF32, DType::kS32}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw std::invalid_argument("no kernel has operands of dtype " + name);
}

// A product at aligned addresses.
ScaledMm shape(int m, int n, int k, int batch, std::string const& in, std::string const& out, bool fast_accum) {
  ScaledMm problem{};
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.batch = batch;
  problem.in = dtype(in);
  problem.out_dtype = dtype(out);
  problem.fast_accum = fast_accum;
  return problem;
}

using Pair = std::pair<int, int>;  // a ScaledMmChoice

ScaledMmChoice choice(Pair pair) { return {pair.first, pair.second}; }

}  // namespace

NB_MODULE(_kernels, m) {
  m.def(
      "registrations", registrations,
      "FFI targets and their handlers; or, where XLA takes handlers of the stage record, the one that registers all.");
  m.def("count_recorded", count_recorded, "How many kernels were added to XLA's CUDA graphs or changed there.");
  m.def("ffi_api_version", [] { return std::pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); }, "Of the handlers' headers.");
  m.def(
      "architectures", [] { return std::vector<std::string>{JAX_QMM_ARCHS}; }, "GPU architectures with kernels here.");
  m.def(
      "select_scaled_mm",
      [](int m, int n, int k, int batch, std::string const& in, std::string const& out, bool fast_accum, int sm_count) {
        ScaledMmChoice const chosen = select_scaled_mm(shape(m, n, k, batch, in, out, fast_accum), sm_count);
        return Pair(chosen.instance, chosen.swizzle);
      },
      "The kernel (index, swizzle) for a product on a GPU with that many SMs.");
  m.def("describe_scaled_mm", [](Pair chosen) { return describe_scaled_mm(choice(chosen)); }, "A kernel in words.");
  m.def(
      "scaled_mm_choices",
      [](int m, int n, int k, int batch, std::string const& in, std::string const& out, bool fast_accum) {
        std::vector<Pair> pairs;
        for (ScaledMmChoice c : scaled_mm_choices(shape(m, n, k, batch, in, out, fast_accum))) {
          pairs.emplace_back(c.instance, c.swizzle);
        }
        return pairs;
      },
      "The kernels that can serve a product.");
  m.def(
      "scaled_mm_terms",
      [](int m, int n, int k, int batch, std::string const& in, std::string const& out, bool fast_accum, Pair chosen,
         int sm_count) -> std::optional<std::tuple<double, double, double>> {
        auto const terms = scaled_mm_terms(shape(m, n, k, batch, in, out, fast_accum), choice(chosen), sm_count);
        if (!terms) return std::nullopt;
        return std::tuple(terms->waves, terms->k_tiles, terms->copy_us);
      },
      "What the cost model takes a kernel's time from: waves, K tiles, microseconds of a copy. None where it never "
      "chooses it.");
  m.def(
      "tune_scaled_mm",
      [](int m, int n, int k, int batch, std::string const& in, std::string const& out, bool fast_accum, Pair chosen) {
        tune_scaled_mm(shape(m, n, k, batch, in, out, fast_accum), choice(chosen));
      },
      "Fixes the kernel for a product in this process.");
  m.def(
      "tuned_scaled_mm",
      [](int m, int n, int k, int batch, std::string const& in, std::string const& out, bool fast_accum) {
        return tuned_scaled_mm(shape(m, n, k, batch, in, out, fast_accum));
      },
      "The M that the kernel for a product was fixed at; None where the cost model chooses.");
  m.def("clear_scaled_mm_tuning", clear_scaled_mm_tuning, "Forgets every tune_scaled_mm.");
  m.def(
      "measure_scaled_mm",
      [](int m, int n, int k, std::string const& in, std::string const& out, bool fast_accum,
         std::vector<Pair> const& chosen, nb::bytes pattern, int rounds) {
        std::vector<ScaledMmChoice> choices;
        for (auto const& pair : chosen) choices.push_back(choice(pair));
        std::string const bytes(static_cast<char const*>(pattern.data()), pattern.size());
        nb::gil_scoped_release release;
        return measure_scaled_mm(shape(m, n, k, 1, in, out, fast_accum), choices, bytes, rounds);
      },
      "Median microseconds of each choice on the current device.");
}
