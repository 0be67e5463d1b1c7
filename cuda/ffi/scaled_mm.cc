// jax_qmm_scaled_mm: checks the buffers, fills ScaledMm, launches or records.
#include "scaled_mm/scaled_mm.h"

#include <string_view>
#include <utility>

#include "ffi/activation.h"
#include "ffi/buffers.h"
#include "ffi/device.h"
#include "ffi/handlers.h"
#include "ffi/output.h"
#include "ffi/record.h"
#include "ffi/vectors.h"

namespace jax_qmm {
namespace {

// A new term of the epilogue adds its vector here.
NamedVector<ScaledMm, Vector> const kVectors[] = {
    {"scale_a", Values::kFloat, &ScaledMm::m, &ScaledMm::scale_a},
    {"scale_b", Values::kFloat, &ScaledMm::n, &ScaledMm::scale_b},
    {"bias", Values::kFloat, &ScaledMm::n, &ScaledMm::bias},
    {"azp_adj", Values::kInt32, &ScaledMm::n, &ScaledMm::azp_adj},
    {"azp", Values::kInt32, &ScaledMm::m, &ScaledMm::azp},
    {"sums_a", Values::kInt32, &ScaledMm::m, &ScaledMm::sums_a},
    {"azp_b", Values::kInt32, &ScaledMm::n, &ScaledMm::azp_b},
    {"out_scale", Values::kFloat, nullptr, &ScaledMm::out_scale},
    {"out_zero_point", Values::kInt32, nullptr, &ScaledMm::out_zero_point},
};

// Whether the vectors, the activation and the dtypes go together.
ffi::Error check(ScaledMm const& p) {
  auto const refuse = [](std::string const& why) { return ffi::Error::InvalidArgument(why); };
  if ((p.sums_a.data == nullptr) != (p.azp_b.data == nullptr)) {
    return refuse("sums_a and azp_b were not given together; either needs the other");
  }
  if (p.in == DType::kF8E4M3) {
    for (auto const& vector : kVectors) {
      if (vector.values == Values::kInt32 && vector.length != nullptr && (p.*vector.to).data != nullptr) {
        return refuse(std::string(vector.name) + " has integers of sums of int8; a has dtype float8_e4m3fn");
      }
    }
  }
  if (p.out_dtype == DType::kS32 && needs_full_epilogue(p)) {
    return refuse("out has dtype int32: raw sums, which take no activation, sums_a or azp_b");
  }
  return check_output(p);
}

ffi::Error read(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs vectors, ffi::AnyBuffer out,
                std::string_view names, bool fast_accum, std::string_view activation, float low, float high,
                ScaledMm& problem) {
  JAX_QMM_RETURN_IF_ERROR(check_dtype(a, "a", {DType::kS8, DType::kF8E4M3}));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(b, "b", {*dtype_of(a)}));
  JAX_QMM_RETURN_IF_ERROR(check_rank(a, "a", 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(b, "b", 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(out, "out", 3));
  int64_t const batch = out.dimensions()[0], m = a.dimensions()[1], n = b.dimensions()[1], k = a.dimensions()[2];
  JAX_QMM_RETURN_IF_ERROR(check_shape(a, "a", {a.dimensions()[0] == 1 ? 1 : batch, m, k}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(b, "b", {b.dimensions()[0] == 1 ? 1 : batch, n, k}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(out, "out", {batch, m, n}));
  for (int64_t dim : {batch, m, n, k}) {
    if (dim > kLongest) {
      return ffi::Error::InvalidArgument("a has shape " + to_string(a.dimensions()) + " and b " +
                                         to_string(b.dimensions()) + "; no dimension may exceed " +
                                         std::to_string(kLongest));
    }
  }

  problem.a = a.untyped_data();
  problem.b = b.untyped_data();
  problem.out = out.untyped_data();
  problem.m = static_cast<int>(m);
  problem.n = static_cast<int>(n);
  problem.k = static_cast<int>(k);
  problem.batch = static_cast<int>(batch);
  problem.a_batch_stride = a.dimensions()[0] == 1 ? 0 : m * k;
  problem.b_batch_stride = b.dimensions()[0] == 1 ? 0 : n * k;
  problem.out_batch_stride = m * n;
  problem.in = *dtype_of(a);
  problem.fast_accum = fast_accum;
  bool const int8 = problem.in == DType::kS8;
  if (int8) {
    JAX_QMM_RETURN_IF_ERROR(
        check_dtype(out, "out", {DType::kBF16, DType::kF16, DType::kF32, DType::kS8, DType::kF8E4M3, DType::kS32}));
  } else {
    JAX_QMM_RETURN_IF_ERROR(
        check_dtype(out, "out", {DType::kBF16, DType::kF16, DType::kF32, DType::kS8, DType::kF8E4M3}));
  }
  problem.out_dtype = *dtype_of(out);

  JAX_QMM_RETURN_IF_ERROR(read_vectors(vectors, names, kVectors, problem));
  JAX_QMM_RETURN_IF_ERROR(read_activation(activation, low, high, problem));
  return check(problem);
}

ffi::Error scaled_mm(Destination const& destination, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs vectors,
                     ffi::Result<ffi::AnyBuffer> out, std::optional<ffi::Result<ffi::AnyBuffer>> workspace,
                     std::string_view names, bool fast_accum, std::string_view activation, float low, float high) {
  ScaledMm problem{};
  JAX_QMM_RETURN_IF_ERROR(read(a, b, vectors, *out, names, fast_accum, activation, low, high, problem));
  read_workspace(workspace, problem);
  Gpu const* gpu;
  JAX_QMM_RETURN_IF_ERROR(cuda_error(current_gpu(gpu), "asking what the GPU is"));
  return destination([&](Submit const& submit, Chosen& chosen) {
    ScaledMmChoice choice{};
    if (chosen) choice = {chosen->first, chosen->second};
    // A graph that has one kernel refuses another, and says why: better than what this one would say of the addresses.
    if (!chosen || !suits_alignment(problem, choice)) choice = select_scaled_mm(problem, *gpu);
    chosen = {choice.instance, choice.swizzle};
    cudaError_t const error = launch_scaled_mm(problem, choice, *gpu, submit);
    if (error == cudaSuccess) return ffi::Error::Success();  // before a kernel is put into words
    return cuda_error(error, describe_scaled_mm(choice).c_str());
  });
}

ffi::Error initialize() {
  JAX_QMM_RETURN_IF_ERROR(begin_call());
  return cuda_error(prepare_scaled_mm(), "preparing the scaled_mm kernels");
}

// What both stages take.
template <class Binding>
auto bind(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()            // a (1 | batch, M, K)
      .template Arg<ffi::AnyBuffer>()            // b (1 | batch, N, K)
      .RemainingArgs()                           // vectors, (1 | batch, 1 | M or N) each
      .template Ret<ffi::AnyBuffer>()            // out (batch, M, N)
      .template OptionalRet<ffi::AnyBuffer>()    // workspace, as large as the lowering found a kernel to need
      .template Attr<std::string_view>("names")  // of the vectors, such as "scale_a scale_b bias"
      .template Attr<bool>("fast_accum")
      .template Attr<std::string_view>("activation")  // none, clamp, gelu or silu
      .template Attr<float>("low")                    // of clamp
      .template Attr<float>("high");
}

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize, ffi::Ffi::BindInitialize());
XLA_FFI_DEFINE_HANDLER(execute_handler, scaled_mm, bind(bind_execute()));
XLA_FFI_DEFINE_HANDLER(record_handler, scaled_mm, bind(bind_record()), {ffi::Traits::kCmdBufferCompatible});

AddTarget const target({"jax_qmm_scaled_mm", initialize_handler, execute_handler, record_handler});

}  // namespace

}  // namespace jax_qmm
