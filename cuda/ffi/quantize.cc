// jax_qmm_quantize_dynamic and jax_qmm_quantize_static: check the buffers, fill Quantize, launch or record.
#include "quantize/quantize.h"

#include <optional>
#include <utility>

#include "ffi/buffers.h"
#include "ffi/device.h"
#include "ffi/handlers.h"
#include "ffi/record.h"

namespace jax_qmm {
namespace {

// Reads x and q, and from the shape of scale whether it has one value for each row or one in all.
ffi::Error read(ffi::AnyBuffer x, ffi::AnyBuffer q, ffi::AnyBuffer scale, std::optional<ffi::AnyBuffer> zero_point,
                std::optional<ffi::AnyBuffer> sums, Quantize& problem) {
  JAX_QMM_RETURN_IF_ERROR(check_dtype(x, "x", {DType::kF32, DType::kBF16, DType::kF16}));
  JAX_QMM_RETURN_IF_ERROR(check_rank(x, "x", 2));
  int64_t const rows = x.dimensions()[0], cols = x.dimensions()[1];
  JAX_QMM_RETURN_IF_ERROR(check_dtype(q, "q", {DType::kS8, DType::kF8E4M3}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(q, "q", {rows, cols}));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(scale, "scale", {DType::kF32}));
  JAX_QMM_RETURN_IF_ERROR(check_rank(scale, "scale", 2));
  bool const per_tensor = scale.dimensions()[0] == 1;
  JAX_QMM_RETURN_IF_ERROR(check_shape(scale, "scale", {per_tensor ? 1 : rows, 1}));
  if (zero_point) {
    JAX_QMM_RETURN_IF_ERROR(check_dtype(*zero_point, "zero_point", {DType::kS32}));
    JAX_QMM_RETURN_IF_ERROR(check_shape(*zero_point, "zero_point", {per_tensor ? 1 : rows, 1}));
    if (dtype_of(q) != DType::kS8) return ffi::Error::InvalidArgument("zero_point needs q to be int8");
  }
  if (sums) {
    JAX_QMM_RETURN_IF_ERROR(check_dtype(*sums, "sums", {DType::kS32}));
    JAX_QMM_RETURN_IF_ERROR(check_shape(*sums, "sums", {per_tensor ? 1 : rows, 1}));
    if (dtype_of(q) != DType::kS8) return ffi::Error::InvalidArgument("sums needs q to be int8");
  }
  problem.x = x.untyped_data();
  problem.q = q.untyped_data();
  problem.rows = rows;
  problem.cols = cols;
  problem.in = *dtype_of(x);
  problem.out = *dtype_of(q);
  problem.per_tensor = per_tensor;
  problem.scale = static_cast<float*>(scale.untyped_data());
  problem.zero_point = zero_point ? static_cast<int32_t*>(zero_point->untyped_data()) : nullptr;
  problem.sums = sums ? static_cast<int32_t*>(sums->untyped_data()) : nullptr;
  return ffi::Error::Success();
}

ffi::Error quantize_and_scale(Destination const& destination, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> q,
                              ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::BufferR1<ffi::U32>> workspace,
                              ffi::RemainingRets more, bool with_sums) {
  // The zero point, if there is one, then the sums.
  std::optional<ffi::AnyBuffer> zero_point, sums;
  for (size_t i = 0; i < more.size(); ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = more.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    (with_sums && i + 1 == more.size() ? sums : zero_point) = **buffer;
  }
  if (more.size() > 2 || bool(sums) != with_sums) {
    return ffi::Error::InvalidArgument("there are " + std::to_string(more.size()) +
                                       " results for a zero point and sums");
  }
  Quantize problem;
  JAX_QMM_RETURN_IF_ERROR(read(x, *q, *scale, zero_point, sums, problem));
  if (workspace->element_count() != 2) return ffi::Error::InvalidArgument("workspace needs 2 elements");
  return destination([&](Submit const& submit, Chosen&) {
    return cuda_error(quantize_dynamic(problem, workspace->typed_data(), submit), "quantize_dynamic");
  });
}

ffi::Error quantize_with_scale(Destination const& destination, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                               std::optional<ffi::AnyBuffer> zero_point, ffi::Result<ffi::AnyBuffer> q,
                               std::optional<ffi::Result<ffi::AnyBuffer>> sums) {
  Quantize problem;
  JAX_QMM_RETURN_IF_ERROR(read(x, *q, scale, zero_point, sums ? std::optional(**sums) : std::nullopt, problem));
  return destination(
      [&](Submit const& submit, Chosen&) { return cuda_error(quantize_static(problem, submit), "quantize_static"); });
}

ffi::Error initialize() {
  JAX_QMM_RETURN_IF_ERROR(begin_call());
  return cuda_error(prepare_quantize(), "loading the quantize kernels");
}

// What both stages take.
template <class Binding>
auto bind_dynamic(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()           // x (R, C)
      .template Ret<ffi::AnyBuffer>()           // q (R, C)
      .template Ret<ffi::AnyBuffer>()           // scale (1 | R, 1)
      .template Ret<ffi::BufferR1<ffi::U32>>()  // workspace (2,)
      .RemainingRets()                          // zero_point, and sums if they are asked for, (1 | R, 1)
      .template Attr<bool>("sums");
}

template <class Binding>
auto bind_static(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()           // x (R, C)
      .template Arg<ffi::AnyBuffer>()           // scale (1 | R, 1)
      .template OptionalArg<ffi::AnyBuffer>()   // zero_point (1 | R, 1)
      .template Ret<ffi::AnyBuffer>()           // q (R, C)
      .template OptionalRet<ffi::AnyBuffer>();  // sums (1 | R, 1)
}

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize, ffi::Ffi::BindInitialize());
XLA_FFI_DEFINE_HANDLER(dynamic_execute, quantize_and_scale, bind_dynamic(bind_execute()));
XLA_FFI_DEFINE_HANDLER(dynamic_record, quantize_and_scale, bind_dynamic(bind_record()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(static_execute, quantize_with_scale, bind_static(bind_execute()));
XLA_FFI_DEFINE_HANDLER(static_record, quantize_with_scale, bind_static(bind_record()),
                       {ffi::Traits::kCmdBufferCompatible});

AddTarget const dynamic_target({"jax_qmm_quantize_dynamic", initialize_handler, dynamic_execute, dynamic_record});
AddTarget const static_target({"jax_qmm_quantize_static", initialize_handler, static_execute, static_record});

}  // namespace

}  // namespace jax_qmm
