// The extension module: the FFI handlers for XLA, and the host functions that Python's explain and tune need.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <map>
#include <stdexcept>
#include <tuple>

#include "block_quantized_mm/block_quantized_mm.h"
#include "block_scaled_mm/block_scaled_mm.h"
#include "conv/conv.h"
#include "core/archs.h"
#include "core/gpu.h"
#include "expanded_mm/expanded_mm.h"
#include "ffi/device.h"
#include "ffi/handlers.h"
#include "ffi/record.h"
#include "scaled_mm/measure.h"
#include "scaled_mm/scaled_mm.h"

#ifdef JAX_QMM_EMULATOR
#include "on_cpu.h"
#define JAX_QMM_RUNTIME "emulator"
#else
#define JAX_QMM_RUNTIME "static"
#endif

namespace nb = nanobind;
using namespace jax_qmm;

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict registrations() {
  nb::dict dict;
#ifdef JAX_QMM_EMULATOR
  for (auto const& [name, handler] : cpu_handlers()) dict[name] = capsule(handler);
#else
  for (Target const& target : targets()) {
    nb::dict stages;
    stages["initialize"] = capsule(target.initialize);
    stages["execute"] = capsule(target.execute);
    dict[target.name] = stages;
  }
#endif
  return dict;
}

DType dtype(std::string const& name) {
  for (DType dtype : {DType::kS8, DType::kF8E4M3, DType::kBF16, DType::kF16, DType::kF32, DType::kS32}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw std::invalid_argument("no kernel has operands of dtype " + name);
}

using Pair = std::pair<int, int>;  // a ScaledMmChoice

Pair pair(ScaledMmChoice choice) { return {choice.instance, choice.swizzle}; }
ScaledMmChoice choice(Pair pair) { return {pair.first, pair.second}; }

void bind_gpu(nb::module_& m) {
  nb::class_<Gpu>(m, "Gpu", "A GPU, as far as the choice of kernels depends on it.")
      .def(nb::new_([](std::string const& name, int sm_count, int arch) { return gpu_of_model(name, sm_count, arch); }),
           nb::arg("name"), nb::arg("sm_count"), nb::arg("arch"),
           "One of any machine: as described, or else like the first described one of its architecture, 90 for 9.0.")
      .def_static(
          "of_device",
          [](int device) {
            Gpu const* gpu;
            if (cudaError_t const error = gpu_of_device(device, gpu))
              throw std::runtime_error(cudaGetErrorString(error));
            return *gpu;
          },
          nb::arg("device"), "A device of this process, by its CUDA ordinal.")
      .def(
          "prepare",
          [](Gpu const& gpu) {
            OnDevice const on_device(gpu);
            if (cudaError_t const error = prepare_scaled_mm()) throw std::runtime_error(cudaGetErrorString(error));
          },
          "Loads the kernels on this device, and asks which of them fit; choices are of those from then on.")
      .def_ro("name", &Gpu::name, "The driver's, which is JAX's device_kind.")
      .def_ro("sm_count", &Gpu::sm_count)
      .def_ro("arch", &Gpu::arch, "Compute capability: 90 is 9.0.")
      .def_ro("copy_rate", &Gpu::copy_rate, "Bytes a second that a copy reads and writes together.")
      .def_ro("peak", &Gpu::peak, "Dense operations on 8 bits a second.")
      .def_ro("clock", &Gpu::clock, "Of the SMs, in Hz.")
      .def_ro("shared_memory", &Gpu::shared_memory, "Bytes that a block may have.")
      .def_ro("device", &Gpu::device, "Its CUDA ordinal in this process, or -1.");
  m.def(
      "describe_gpu",
      [](std::string name, int sm_count, int arch, double copy_rate, double peak, int64_t l2_bytes, double clock,
         int shared_memory, std::map<int, int> cluster_sms) {
        describe_gpu({name, sm_count, arch, copy_rate, peak, l2_bytes, cluster_sms, clock, shared_memory});
      },
      nb::arg("name"), nb::arg("sm_count"), nb::arg("arch"), nb::arg("copy_rate"), nb::arg("peak"), nb::arg("l2_bytes"),
      nb::arg("clock"), nb::arg("shared_memory"), nb::arg("cluster_sms"),
      "Makes known what GPUs of this name and SM count are like.");
}

template <class Problem>
Problem sized(int m, int n, int k, int batch, std::string const& out) {
  Problem problem{};
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.batch = batch;
  problem.out_dtype = dtype(out);
  return problem;
}

// Which kernels serve a problem on a GPU, in words, by the functions of its header; with `kWorkspace`, which of these
// may need some.
template <auto kSelect, auto kChoices, auto kDescribe, bool kWorkspace, class Problem>
void bind_choices(nb::class_<Problem>& type) {
  type.def(
      "select",
      [](Problem const& p, Gpu const& gpu) -> std::optional<std::string> {
        auto const choice = kSelect(p, gpu);
        if (!choice) return std::nullopt;
        return kDescribe(*choice);
      },
      nb::arg("gpu"), "The kernel that serves it on a GPU, in words; None where there is none.");
  if constexpr (kWorkspace) {
    type.def(
        "choices",
        [](Problem const& p, Gpu const& gpu) {
          std::vector<std::pair<std::string, int64_t>> found;
          for (auto const choice : kChoices(p, gpu)) {
            found.emplace_back(kDescribe(choice), workspace_of(p, choice, gpu));
          }
          return found;
        },
        nb::arg("gpu"), "All kernels that serve it, in words, and the bytes of workspace of each.");
    type.def(
        "workspace",
        [](Problem const& p, Gpu const& gpu) {
          auto const choice = kSelect(p, gpu);
          return choice ? workspace_of(p, *choice, gpu) : 0;
        },
        nb::arg("gpu"), "The bytes that the kernel needs beside the result.");
  } else {
    type.def(
        "choices",
        [](Problem const& p, Gpu const& gpu) {
          std::vector<std::string> found;
          for (auto const choice : kChoices(p, gpu)) found.push_back(kDescribe(choice));
          return found;
        },
        nb::arg("gpu"), "All kernels that serve it, in words.");
  }
}

void bind_scaled_mm(nb::module_& m) {
  nb::class_<ScaledMm>(m, "ScaledMmProblem", "A product, and the kernels (index, swizzle) that can compute it.")
      .def(nb::new_([](int m, int n, int k, int batch, std::string const& in, std::string const& out, bool fast_accum,
                       bool full_epilogue) {
             auto problem = sized<ScaledMm>(m, n, k, batch, out);  // at aligned addresses
             problem.in = dtype(in);
             problem.fast_accum = fast_accum;
             problem.workspace_bytes = kMostWorkspace;  // as one that is lowered here gets what it needs
             if (full_epilogue) {
               problem.activation = Activation::kClamp;  // that changes nothing
               problem.low = -INFINITY, problem.high = INFINITY;
             }
             return problem;
           }),
           nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("batch"), nb::arg("dtype"), nb::arg("out_dtype"),
           nb::arg("fast_accum"), nb::arg("full_epilogue") = false,
           "With full_epilogue, one that needs more than scales, a's zero points and a bias; 8-bit results always do.")
      .def(
          "choices",
          [](ScaledMm const& p, Gpu const& gpu) {
            std::vector<Pair> pairs;
            for (ScaledMmChoice c : scaled_mm_choices(p, gpu)) pairs.push_back(pair(c));
            return pairs;
          },
          "The kernels that can serve it on a GPU.")
      .def(
          "select", [](ScaledMm const& p, Gpu const& gpu) { return pair(select_scaled_mm(p, gpu)); },
          "The kernel that serves it on a GPU.")
      .def(
          "workspace", [](ScaledMm const& p, Gpu const& gpu) { return workspace_of(p, select_scaled_mm(p, gpu)); },
          "Bytes that the kernel that serves it on a GPU needs for partial sums.")
      .def(
          "terms",
          [](ScaledMm const& p, Pair chosen, Gpu const& gpu) -> std::optional<std::tuple<double, double, double>> {
            auto const terms = scaled_mm_terms(p, choice(chosen), gpu);
            if (!terms) return std::nullopt;
            return std::tuple(terms->waves, terms->k_tiles, terms->copy_us);
          },
          "What the cost model takes a kernel's time from: waves, K tiles, microseconds of a copy. None where it never "
          "chooses it.")
      .def(
          "predict",
          [](ScaledMm const& p, Pair chosen, Gpu const& gpu) { return predict_scaled_mm(p, choice(chosen), gpu); },
          "Microseconds that a kernel takes by the cost model; infinite where it never chooses it.")
      .def(
          "tune", [](ScaledMm const& p, Pair chosen, Gpu const& gpu) { tune_scaled_mm(p, choice(chosen), gpu); },
          "Fixes the kernel for it on GPUs of this model.")
      .def("tuned", tuned_scaled_mm, "The M that its kernel was fixed at; None where the cost model chooses.")
      .def(
          "measure",
          [](ScaledMm const& p, std::vector<Pair> const& chosen, Gpu const& gpu, nb::bytes pattern, int rounds) {
            std::vector<ScaledMmChoice> choices;
            for (Pair const& pair : chosen) choices.push_back(choice(pair));
            std::string const bytes(static_cast<char const*>(pattern.data()), pattern.size());
            nb::gil_scoped_release release;
            return measure_scaled_mm(p, choices, gpu, bytes, rounds);
          },
          nb::arg("choices"), nb::arg("gpu"), nb::arg("pattern"), nb::arg("rounds"),
          "Median microseconds of each choice on the current device, which is this GPU.");
  m.def("describe_scaled_mm", [](Pair chosen) { return describe_scaled_mm(choice(chosen)); }, "A kernel in words.");
  m.def(
      "set_scaled_mm_cost",
      [](Gpu const& gpu, std::string const& in, std::string const& kernel, double k_tile, double tile, double full_tile,
         double launch,
         double reading) { set_scaled_mm_cost(gpu, dtype(in), kernel, {k_tile, tile, full_tile, launch, reading}); },
      nb::arg("gpu"), nb::arg("dtype"), nb::arg("kernel"), nb::arg("k_tile"), nb::arg("tile"), nb::arg("full_tile"),
      nb::arg("launch"), nb::arg("reading"),
      "Gives a kernel, in words without the swizzle, its cost on GPUs of this model.");
  m.def("scaled_mm_costs_of", scaled_mm_costs_of, "The name of the GPU whose costs serve this one.");
  m.def("clear_scaled_mm_tuning", clear_scaled_mm_tuning, "Forgets what was tuned.");
}

using WindowsOf = std::tuple<int, int, Sizes, Sizes, Sizes, Sizes, Sizes, Sizes>;

Windows windows_of(WindowsOf const& given) {
  auto const& [images, channels, image, taps, pixels, strides, before, dilation] = given;
  return {images, 1, channels, image, taps, pixels, strides, before, dilation};
}

void bind_block_scaled_mm(nb::module_& m) {
  nb::class_<BlockScaledMm> type(m, "BlockScaledMmProblem", "A product with weights that have scales for blocks of K.");
  type.def(
          nb::new_([](int m, int n, int k, int batch, std::string const& in, std::string const& out, int bits,
                      int block, std::optional<std::string> const& zero_point, std::optional<WindowsOf> const& windows,
                      bool ends_apart) {
            auto problem = sized<BlockScaledMm>(m, n, k, batch, out);
            if (windows) problem.windows = windows_of(*windows);
            problem.in = dtype(in);
            problem.bits = bits;
            problem.block = block;
            problem.workspace_bytes = kMostWorkspace;
            if (zero_point) problem.zero_point = {&problem, dtype(*zero_point)};  // any address: nobody reads there
            if (ends_apart) problem.bias.data = &problem;  // which is all that dequantizes_once asks of a bias
            return problem;
          }),
          nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("batch"), nb::arg("dtype"), nb::arg("out_dtype"),
          nb::arg("bits"), nb::arg("block"), nb::arg("zero_point"), nb::arg("windows") = nb::none(),
          nb::arg("ends_apart") = false,
          "Of x's dtype, the result's, and the zero points' (int8 or a float dtype), None without. Where rows of x are "
          "windows on images: how many, their channels, and of three axes sizes of the image, the window and the "
          "result, strides, padding before the image, and dilation of the window. It ends apart where XLA, given "
          "dequantized weights, would take a pass of its own for a bias or an activation.")
      .def(
          "predict", [](BlockScaledMm const& p, Gpu const& gpu) { return 1e6 * predict_block_scaled_mm(p, gpu); },
          nb::arg("gpu"), "Microseconds that it is predicted to take; infinite where there is none.")
      .def("dequantizes_once", dequantizes_once, nb::arg("gpu"),
           "Whether XLA's product of weights that are dequantized once is predicted to be faster than any kernel.");
  bind_choices<select_block_scaled_mm, block_scaled_mm_choices, describe_block_scaled_mm, true>(type);
  m.def("restrict_block_scaled_mm", restrict_block_scaled_mm, nb::arg("words"),
        "Leaves only the kernels whose words have this to choose from, not XLA's product; all with \"\". For tests.");
}

void bind_block_quantized_mm(nb::module_& m) {
  nb::class_<BlockQuantizedMm> type(m, "BlockQuantizedMmProblem", "A product, and the kernel that can compute it.");
  type.def(nb::new_([](int m, int n, int k, int batch, std::string const& in, std::string const& out, int block,
                       std::string const& zero_points, bool shared_b) {
             auto problem = sized<BlockQuantizedMm>(m, n, k, batch, out);
             problem.in = dtype(in);
             problem.block = block;
             static float const somewhere = 0;  // any address: nobody reads there
             for (char const side : zero_points) {
               if (side != 'a' && side != 'b') throw nb::value_error("zero_points names the sides a and b");
               (side == 'a' ? problem.of_a : problem.of_b).zero_point.data = &somewhere;
             }
             if (shared_b) problem.of_b.scale.shift = problem.kLog2Shared;
             return problem;
           }),
           nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("batch"), nb::arg("dtype"), nb::arg("out_dtype"),
           nb::arg("block"), nb::arg("zero_points"), nb::arg("shared_b") = false,
           "With zero points of the sides that are named, \"a\", \"b\" or \"ab\"; whether 128 rows of b share their "
           "scales.");
  bind_choices<select_block_quantized_mm, block_quantized_mm_choices, describe_block_quantized_mm, false>(type);
  m.def("restrict_block_quantized_mm", restrict_block_quantized_mm, nb::arg("words"),
        "Leaves only the kernels whose words have this to choose from; all with \"\". For tests.");
}

void bind_expanded_mm(nb::module_& m) {
  nb::class_<ExpandedMm> type(m, "ExpandedMmProblem",
                              "A product of int8 and int4, and the kernel that can compute it.");
  type.def(nb::new_([](int m, int n, int k, int batch, std::string const& out, int block) {
             auto problem = sized<ExpandedMm>(m, n, k, batch, out);
             problem.in = DType::kS8;
             problem.block = block;
             problem.workspace_bytes = kMostWorkspace;
             return problem;
           }),
           nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("batch"), nb::arg("out_dtype"), nb::arg("block"));
  bind_choices<select_expanded_mm, expanded_mm_choices, describe_expanded_mm, true>(type);
  m.def("restrict_expanded_mm", restrict_expanded_mm, nb::arg("words"),
        "Leaves only the kernels whose words have this to choose from; all with \"\". For tests.");
}

void bind_conv(nb::module_& m) {
  nb::class_<Conv> type(m, "ConvProblem", "A convolution, and the kernel that can compute it.");
  type.def(nb::new_([](int batch, int images, int channels, int n, int groups, Sizes image, Sizes taps, Sizes pixels,
                       Sizes strides, Sizes before, Sizes dilation, std::string const& out, bool zero_points,
                       std::string const& residual) {
             Conv problem{};
             alignas(16) static float const somewhere = 0;  // any address: nobody reads there
             if (zero_points) problem.azp.data = &somewhere;
             if (!residual.empty()) problem.residual = {&somewhere, dtype(residual)};
             problem.batch = batch;
             problem.images = images, problem.channels = channels, problem.n = n, problem.groups = groups;
             problem.image = image, problem.taps = taps, problem.pixels = pixels;
             problem.strides = strides, problem.before = before, problem.dilation = dilation;
             problem.m = images * pixels[0] * pixels[1] * pixels[2];
             problem.k = taps[0] * taps[1] * taps[2] * channels;
             problem.out_dtype = dtype(out);
             return problem;
           }),
           nb::arg("batch"), nb::arg("images"), nb::arg("channels"), nb::arg("n"), nb::arg("groups"), nb::arg("image"),
           nb::arg("taps"), nb::arg("pixels"), nb::arg("strides"), nb::arg("before"), nb::arg("dilation"),
           nb::arg("out_dtype"), nb::arg("zero_points"), nb::arg("residual") = "",
           "Of channels of a group and output channels n, whether any side has zero points, and the dtype of a "
           "residual, if there is one. The others are of three axes: sizes of the image, the window and the result, "
           "strides, padding before the image, and dilation of the window.");
  bind_choices<select_conv, conv_choices, describe_conv, false>(type);
  m.def("restrict_conv", restrict_conv, nb::arg("words"),
        "Leaves only the kernels whose words have this to choose from; all with \"\". For tests.");
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.def("registrations", registrations, "FFI targets and the handlers of their stages, without those that record.");
  m.def(
      "register_recording", [] { return capsule(register_recording); },
      "A handler that registers all targets with all stages while it is registered itself; why_not_recorded() "
      "says why not.");
  m.def("why_not_recorded", why_not_recorded, "Why calls are not recorded though it was asked for; \"\" if they are.");
  m.def("count_recorded", count_recorded, "How many kernels were added to XLA's CUDA graphs or changed there.");
  m.def("launches_overlap", overlap_allowed, "Whether kernels may start while the one before them ends.");
  m.def("ffi_api_version", [] { return std::pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); }, "Of the handlers' headers.");
  m.def(
      "call_before_first_kernel",
      [](nb::callable function) {
        // Never freed: Python may be gone when static objects go.
        call_before_first_kernel([kept = new nb::callable(std::move(function))] {
          nb::gil_scoped_acquire acquire;
          try {
            (*kept)();
          } catch (nb::python_error& error) {
            error.discard_as_unraisable("jax_qmm, before its first kernel");
          }
        });
      },
      "Calls a function once, before the first kernel that XLA calls in this process, from a thread of XLA.");
  m.def("driver_version", driver_version, "The CUDA version of the driver, 13000 for 13.0; 0 without one.");
  m.def(
      "why_unfit",
      [](std::string const& name, int capability, int driver) {
        std::string const why = why_unfit_driver(driver);
        return why.empty() ? why_unfit_gpu(name, capability) : why;
      },
      nb::arg("name"), nb::arg("capability"), nb::arg("driver"),
      "Why no kernel runs on a GPU of this compute capability, 90 for 9.0, under a driver of this version; \"\" if "
      "they do.");
  m.def(
      "runtime", [] { return JAX_QMM_RUNTIME; },
      "The CUDA runtime: static, which is NVIDIA's, or emulator, whose kernels run on the CPU.");
#ifdef JAX_QMM_EMULATOR
  m.def("calls_with_reports", [] { return calls_with_reports.load(); }, "How many calls the emulator reported on.");
#endif
  m.def(
      "architectures", [] { return std::vector<std::string>{JAX_QMM_ARCHS}; }, "GPU architectures with kernels here.");
  m.def(
      "compiled_for", compiled_for, nb::arg("capability"),
      "The compute capability that the code was compiled for which GPUs of this one run, 90 for 9.0; 0 where they run "
      "none.");
  bind_gpu(m);
  bind_scaled_mm(m);
  bind_block_scaled_mm(m);
  bind_block_quantized_mm(m);
  bind_expanded_mm(m);
  bind_conv(m);
}
