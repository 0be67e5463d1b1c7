// jax_qmm_expanded_mm: checks the buffers, fills ExpandedMm, launches or records.
#include "expanded_mm/expanded_mm.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "ffi/buffers.h"
#include "ffi/device.h"
#include "ffi/handlers.h"
#include "ffi/record.h"

namespace jax_qmm {
namespace {

ffi::Error read(ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer multiple, std::optional<ffi::AnyBuffer> zero_point,
                ffi::AnyBuffer out, int block, ExpandedMm& p) {
  auto const refuse = [](std::string const& why) { return ffi::Error::InvalidArgument(why); };
  JAX_QMM_RETURN_IF_ERROR(check_dtype(x, "x", {DType::kS8}));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(multiple, "multiple", {DType::kS8}));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(out, "out", {DType::kS32}));
  if (w.element_type() != ffi::S4) return refuse("w needs to be int4");
  JAX_QMM_RETURN_IF_ERROR(check_rank(x, "x", 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(w, "w", 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(out, "out", 3));
  int64_t const batch = out.dimensions()[0], m = x.dimensions()[1], n = w.dimensions()[1], k = x.dimensions()[2];
  if (std::max({batch, m, n, k}) > std::numeric_limits<int>::max() / 2) return refuse("a size is not below 2^30");
  if (k % p.kColumns != 0 || block < 1 || block % p.kColumns != 0) {
    return refuse("K is " + std::to_string(k) + " and block " + std::to_string(block) +
                  "; both need to be multiples of " + std::to_string(p.kColumns));
  }
  auto const batch_of = [&](ffi::AnyBuffer const& buffer) { return buffer.dimensions()[0] == 1 ? 1 : batch; };
  auto const stride = [&](ffi::AnyBuffer const& buffer, int64_t elements) {
    return buffer.dimensions()[0] == 1 ? 0 : elements;
  };
  int64_t const groups = ceil_div(k, block);
  JAX_QMM_RETURN_IF_ERROR(check_shape(x, "x", {batch_of(x), m, k}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(w, "w", {batch_of(w), n, k}));
  JAX_QMM_RETURN_IF_ERROR(check_rank(multiple, "multiple", 3));
  JAX_QMM_RETURN_IF_ERROR(check_shape(multiple, "multiple", {batch_of(multiple), n, groups}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(out, "out", {batch, m, n}));
  if (zero_point) {
    JAX_QMM_RETURN_IF_ERROR(check_dtype(*zero_point, "zero_point", {DType::kS8}));
    JAX_QMM_RETURN_IF_ERROR(check_rank(*zero_point, "zero_point", 3));
    JAX_QMM_RETURN_IF_ERROR(check_shape(*zero_point, "zero_point", {batch_of(*zero_point), n, groups}));
    p.zero_point = static_cast<int8_t const*>(zero_point->untyped_data());
    p.zero_point_batch_stride = stride(*zero_point, n * groups);
  }
  p.x = static_cast<int8_t const*>(x.untyped_data());
  p.w = static_cast<uint8_t const*>(w.untyped_data());
  p.multiple = static_cast<int8_t const*>(multiple.untyped_data());
  p.out = static_cast<int32_t*>(out.untyped_data());
  p.batch = int(batch), p.m = int(m), p.n = int(n), p.k = int(k), p.block = block;
  p.x_batch_stride = stride(x, m * k), p.w_batch_stride = stride(w, n * k);
  p.multiple_batch_stride = stride(multiple, n * groups);
  return ffi::Error::Success();
}

ffi::Error expanded_mm(Destination const& destination, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer multiple,
                       std::optional<ffi::AnyBuffer> zero_point, ffi::Result<ffi::AnyBuffer> out, int32_t block) {
  ExpandedMm problem{};
  JAX_QMM_RETURN_IF_ERROR(read(x, w, multiple, zero_point, *out, block, problem));
  return destination(
      [&](Submit const& submit, Chosen&) { return cuda_error(launch_expanded_mm(problem, submit), "expanded_mm"); });
}

ffi::Error initialize() {
  JAX_QMM_RETURN_IF_ERROR(begin_call());
  return cuda_error(prepare_expanded_mm(), "loading the expanded_mm kernels");
}

// What both stages take.
template <class Binding>
auto bind(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // x (1 | batch, M, K)
      .template Arg<ffi::AnyBuffer>()          // w (1 | batch, N, K)
      .template Arg<ffi::AnyBuffer>()          // multiple (1 | batch, N, blocks of K)
      .template OptionalArg<ffi::AnyBuffer>()  // zero_point, likewise
      .template Ret<ffi::AnyBuffer>()          // out (batch, M, N)
      .template Attr<int32_t>("block");        // columns
}

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize, ffi::Ffi::BindInitialize());
XLA_FFI_DEFINE_HANDLER(execute_handler, expanded_mm, bind(bind_execute()));
XLA_FFI_DEFINE_HANDLER(record_handler, expanded_mm, bind(bind_record()), {ffi::Traits::kCmdBufferCompatible});

AddTarget const target({"jax_qmm_expanded_mm", initialize_handler, execute_handler, record_handler});

}  // namespace
}  // namespace jax_qmm
