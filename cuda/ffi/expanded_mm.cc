// jax_qmm_expanded_mm: checks the buffers, fills ExpandedMm, launches or records.
#include "expanded_mm/expanded_mm.h"

#include <string>
#include <string_view>
#include <utility>

#include "ffi/buffers.h"
#include "ffi/device.h"
#include "ffi/handlers.h"
#include "ffi/record.h"
#include "ffi/vectors.h"

namespace jax_qmm {
namespace {

// A buffer of shape (1 | batch, N, blocks of K).
ffi::Error read_of_blocks(ffi::AnyBuffer const& buffer, char const* name, ExpandedMm const& p, int8_t const*& to,
                          int64_t& batch_stride) {
  JAX_QMM_RETURN_IF_ERROR(check_dtype(buffer, name, {DType::kS8}));
  JAX_QMM_RETURN_IF_ERROR(check_rank(buffer, name, 3));
  bool const shared = buffer.dimensions()[0] == 1;
  JAX_QMM_RETURN_IF_ERROR(check_shape(buffer, name, {shared ? 1 : p.batch, p.n, p.groups()}));
  to = static_cast<int8_t const*>(buffer.untyped_data());
  batch_stride = shared ? 0 : int64_t(p.n) * p.groups();
  return ffi::Error::Success();
}

ffi::Error read_vector(ffi::AnyBuffer const& buffer, char const* name, int ScaledMm::* length, Vector ScaledMm::* to,
                       ScaledMm& p) {
  return NamedVector<ScaledMm, Vector>{name, Values::kFloat, length, to}.read(buffer, p);
}

NamedOperand<ExpandedMm> const kOptional[] = {
    {"zero_point",
     [](auto const& buffer, auto& p) {
       return read_of_blocks(buffer, "zero_point", p, p.zero_point, p.zero_point_batch_stride);
     }},
    {"scale_a",
     [](auto const& buffer, auto& p) { return read_vector(buffer, "scale_a", &ScaledMm::m, &ScaledMm::scale_a, p); }},
    {"scale_b",
     [](auto const& buffer, auto& p) { return read_vector(buffer, "scale_b", &ScaledMm::n, &ScaledMm::scale_b, p); }},
    {"bias", [](auto const& buffer, auto& p) { return read_vector(buffer, "bias", &ScaledMm::n, &ScaledMm::bias, p); }},
};

ffi::Error read(ffi::AnyBuffer a, ffi::AnyBuffer w, ffi::AnyBuffer multiple, ffi::RemainingArgs optional,
                ffi::AnyBuffer out, int block, std::string_view names, ExpandedMm& p) {
  auto const refuse = [](std::string const& why) { return ffi::Error::InvalidArgument(why); };
  JAX_QMM_RETURN_IF_ERROR(check_dtype(a, "a", {DType::kS8}));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(out, "out", {DType::kF32, DType::kBF16, DType::kF16, DType::kS32}));
  if (w.element_type() != ffi::S4) return refuse("w needs to be int4");
  JAX_QMM_RETURN_IF_ERROR(check_rank(a, "a", 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(w, "w", 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(out, "out", 3));
  int64_t const batch = out.dimensions()[0], m = a.dimensions()[1], n = w.dimensions()[1], k = a.dimensions()[2];
  auto const batch_of = [&](ffi::AnyBuffer const& buffer) { return buffer.dimensions()[0] == 1 ? 1 : batch; };
  JAX_QMM_RETURN_IF_ERROR(check_shape(a, "a", {batch_of(a), m, k}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(w, "w", {batch_of(w), n, k}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(out, "out", {batch, m, n}));
  if (k > kLongest || m > kLongest || n > kLongest || batch > kLongest) {
    return refuse("a has shape " + to_string(a.dimensions()) + " and w " + to_string(w.dimensions()) +
                  "; no dimension may exceed " + std::to_string(kLongest));
  }
  auto const address = [](ffi::AnyBuffer const& buffer) { return reinterpret_cast<uintptr_t>(buffer.untyped_data()); };
  if ((address(a) | address(w)) % 16 != 0) return refuse("the addresses of a and w need to be multiples of 16");
  if (k % p.kColumns != 0 || block < 1 || block % p.kColumns != 0) {
    return refuse("K is " + std::to_string(k) + " and block " + std::to_string(block) +
                  "; both need to be multiples of " + std::to_string(p.kColumns));
  }
  p.m = int(m), p.n = int(n), p.k = int(k), p.batch = int(batch), p.block = block;
  p.in = DType::kS8, p.out_dtype = *dtype_of(out);
  p.a = a.untyped_data(), p.b = w.untyped_data(), p.out = out.untyped_data();
  p.a_batch_stride = batch_of(a) == 1 ? 0 : m * k;
  p.b_batch_stride = batch_of(w) == 1 ? 0 : n * k;
  p.out_batch_stride = m * n;
  JAX_QMM_RETURN_IF_ERROR(read_of_blocks(multiple, "multiple", p, p.multiple, p.multiple_batch_stride));
  return read_vectors(optional, names, kOptional, p);
}

ffi::Error expanded_mm(Destination const& destination, ffi::AnyBuffer a, ffi::AnyBuffer w, ffi::AnyBuffer multiple,
                       ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out,
                       std::optional<ffi::Result<ffi::AnyBuffer>> workspace, int32_t block, std::string_view names) {
  ExpandedMm problem{};
  JAX_QMM_RETURN_IF_ERROR(read(a, w, multiple, optional, *out, block, names, problem));
  read_workspace(workspace, problem);
  Gpu const* gpu;
  JAX_QMM_RETURN_IF_ERROR(cuda_error(current_gpu(gpu), "asking what the GPU is"));
  return destination([&](Submit const& submit, Chosen& chosen) {
    std::optional<int> const choice = chosen ? chosen->first : select_expanded_mm(problem, *gpu);
    if (!choice) return ffi::Error::InvalidArgument("no kernel of this GPU serves such operands");
    chosen = {*choice, 0};
    cudaError_t const error = launch_expanded_mm(problem, *choice, submit);
    if (error == cudaSuccess) return ffi::Error::Success();  // before a kernel is put into words
    return cuda_error(error, describe_expanded_mm(*choice).c_str());
  });
}

ffi::Error initialize() {
  JAX_QMM_RETURN_IF_ERROR(begin_call());
  return cuda_error(prepare_expanded_mm(), "preparing the expanded_mm kernels");
}

// What both stages take.
template <class Binding>
auto bind(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()             // a (1 | batch, M, K)
      .template Arg<ffi::AnyBuffer>()             // w (1 | batch, N, K)
      .template Arg<ffi::AnyBuffer>()             // multiple (1 | batch, N, blocks of K)
      .RemainingArgs()                            // zero_point likewise; scale_a (1 | batch, 1 | M), scale_b, bias of N
      .template Ret<ffi::AnyBuffer>()             // out (batch, M, N)
      .template OptionalRet<ffi::AnyBuffer>()     // workspace, as large as the lowering found a kernel to need
      .template Attr<int32_t>("block")            // columns
      .template Attr<std::string_view>("names");  // of the remaining arguments
}

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize, ffi::Ffi::BindInitialize());
XLA_FFI_DEFINE_HANDLER(execute_handler, expanded_mm, bind(bind_execute()));
XLA_FFI_DEFINE_HANDLER(record_handler, expanded_mm, bind(bind_record()), {ffi::Traits::kCmdBufferCompatible});

AddTarget const target({"jax_qmm_expanded_mm", initialize_handler, execute_handler, record_handler});

}  // namespace
}  // namespace jax_qmm
