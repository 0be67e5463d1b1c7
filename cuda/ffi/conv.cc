// jax_qmm_conv: checks the buffers, fills Conv, launches or records.
#include "conv/conv.h"

#include <string_view>
#include <utility>

#include "ffi/activation.h"
#include "ffi/buffers.h"
#include "ffi/device.h"
#include "ffi/handlers.h"
#include "ffi/output.h"
#include "ffi/record.h"
#include "ffi/vectors.h"
#include "ffi/windows.h"

namespace jax_qmm {
namespace {

// A value for each of the output, whose count no int may hold.
ffi::Error read_residual(ffi::AnyBuffer const& buffer, Conv& p) {
  JAX_QMM_RETURN_IF_ERROR(check_dtype(buffer, "residual", {DType::kS8, DType::kBF16, DType::kF16, DType::kF32}));
  JAX_QMM_RETURN_IF_ERROR(check_rank(buffer, "residual", 3));
  int64_t const entries = buffer.dimensions()[0] == 1 ? 1 : p.batch;
  JAX_QMM_RETURN_IF_ERROR(check_shape(buffer, "residual", {entries, p.m, p.n}));
  int64_t const stride = entries == 1 ? 0 : int64_t(p.m) * p.n;
  p.residual = {buffer.untyped_data(), *dtype_of(buffer), 1, stride, int64_t(buffer.size_bytes())};
  return ffi::Error::Success();
}

struct Operand : NamedVector<Conv, Vector> {
  ffi::Error read(ffi::AnyBuffer const& buffer, Conv& problem) const {
    return to == &Conv::residual ? read_residual(buffer, problem) : NamedVector::read(buffer, problem);
  }
};

Operand const kOperands[] = {
    {{"scale_lhs", Values::kFloat, &Conv::images, &Conv::scale_a}},
    {{"scale_rhs", Values::kFloat, &Conv::n, &Conv::scale_b}},
    {{"bias", Values::kFloat, &Conv::n, &Conv::bias}},
    {{"zero_point_lhs", Values::kInt32, &Conv::images, &Conv::azp}},
    {{"sums_rhs", Values::kInt32, &Conv::n, &Conv::azp_adj}},
    {{"sums_lhs", Values::kInt32, &Conv::sums, &Conv::sums_a}},
    {{"zero_point_rhs", Values::kInt32, &Conv::n, &Conv::azp_b}},
    {{"residual", Values::kFloat, nullptr, &Conv::residual}},
    {{"scale_residual", Values::kFloat, nullptr, &Conv::scale_residual}},
    {{"zero_point_residual", Values::kInt32, nullptr, &Conv::zero_point_residual}},
    {{"out_scale", Values::kFloat, nullptr, &Conv::out_scale}},
    {{"out_zero_point", Values::kInt32, nullptr, &Conv::out_zero_point}},
};

ffi::Error read(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::RemainingArgs vectors, ffi::AnyBuffer out,
                ffi::Span<int32_t const> strides, ffi::Span<int32_t const> before, ffi::Span<int32_t const> dilation,
                int32_t groups, std::string_view names, std::string_view activation, float low, float high, Conv& p) {
  auto const refuse = [](std::string const& why) { return ffi::Error::InvalidArgument(why); };
  JAX_QMM_RETURN_IF_ERROR(check_dtype(lhs, "lhs", {DType::kS8}));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(rhs, "rhs", {DType::kS8}));
  JAX_QMM_RETURN_IF_ERROR(
      check_dtype(out, "out", {DType::kBF16, DType::kF16, DType::kF32, DType::kS8, DType::kF8E4M3, DType::kS32}));
  JAX_QMM_RETURN_IF_ERROR(check_rank(lhs, "lhs", kSpatial + 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(rhs, "rhs", kSpatial + 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(out, "out", kSpatial + 3));
  auto const l = lhs.dimensions(), r = rhs.dimensions(), o = out.dimensions();
  JAX_QMM_RETURN_IF_ERROR(check_lengths({l, r, o}));
  int64_t const batch = o[0], images = l[1], n = r[1], channels = r[5];
  bool const depthwise = channels == 1 && groups == n;
  if (groups < 1 || (groups > Conv::kMostGroups && !depthwise) || n % groups != 0) {
    return refuse("groups is " + std::to_string(groups) + "; it needs to divide rhs's output channels and be at most " +
                  std::to_string(Conv::kMostGroups));
  }
  auto const batch_of = [&](ffi::AnyBuffer::Dimensions dims) { return dims[0] == 1 ? 1 : batch; };
  JAX_QMM_RETURN_IF_ERROR(check_shape(lhs, "lhs", {batch_of(l), images, l[2], l[3], l[4], groups * channels}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(rhs, "rhs", {batch_of(r), n, r[2], r[3], r[4], channels}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(out, "out", {batch, images, o[2], o[3], o[4], n}));
  auto const address = [](ffi::AnyBuffer const& buffer) { return reinterpret_cast<uintptr_t>(buffer.untyped_data()); };
  if ((depthwise ? n : channels) % 4 != 0 || address(lhs) % 4 != 0 || address(rhs) % 4 != 0) {
    return refuse("rhs has shape " + to_string(r) + "; channels and addresses need to be multiples of 4");
  }
  if (depthwise && r[2] * r[3] * r[4] > Conv::kMostTaps) {
    return refuse("rhs has shape " + to_string(r) + "; depthwise it may have " + std::to_string(Conv::kMostTaps) +
                  " taps");
  }
  JAX_QMM_RETURN_IF_ERROR(read_sizes(strides, "strides", 1, p.strides));
  JAX_QMM_RETURN_IF_ERROR(read_sizes(before, "before", -kLongest, p.before));
  JAX_QMM_RETURN_IF_ERROR(read_sizes(dilation, "dilation", 1, p.dilation));
  for (int i = 0; i < kSpatial; ++i) {
    p.image[i] = int(l[2 + i]), p.taps[i] = int(r[2 + i]), p.pixels[i] = int(o[2 + i]);
  }
  p.images = int(images), p.groups = groups, p.channels = int(channels);
  if (!in_range(p)) {
    return refuse("lhs has shape " + to_string(l) + ", rhs " + to_string(r) + " and out " + to_string(o) +
                  "; of an image, a window and the result's pixels none may have more than " +
                  std::to_string(kLongest) + " values");
  }
  p.m = p.images * p.pixels[0] * p.pixels[1] * p.pixels[2], p.sums = p.m * p.groups;
  p.k = p.taps[0] * p.taps[1] * p.taps[2] * p.channels;
  if (p.k == 0) return refuse("rhs has shape " + to_string(r) + "; the window needs to have values");
  p.n = int(n), p.batch = int(batch);
  p.in = DType::kS8, p.out_dtype = *dtype_of(out);
  p.a = lhs.untyped_data(), p.b = rhs.untyped_data(), p.out = out.untyped_data();
  int64_t const image = int64_t(p.image[0]) * p.image[1] * p.image[2] * p.channels * p.groups;
  p.a_batch_stride = l[0] == 1 ? 0 : images * image;
  p.b_batch_stride = r[0] == 1 ? 0 : n * p.k;
  p.out_batch_stride = int64_t(p.m) * p.n;
  JAX_QMM_RETURN_IF_ERROR(read_vectors(vectors, names, kOperands, p));
  JAX_QMM_RETURN_IF_ERROR(read_activation(activation, low, high, p));
  for (auto const& [one, other] : {std::pair(&p.azp, &p.azp_adj), std::pair(&p.sums_a, &p.azp_b)}) {
    if ((one->data == nullptr) != (other->data == nullptr)) {
      return refuse("zero_point_lhs needs sums_rhs, and zero_point_rhs sums_lhs; one of them was given without");
    }
  }
  if (p.residual.data != nullptr && (depthwise || p.out_dtype == DType::kS32)) {
    return refuse("residual was given; depthwise convolutions and int32 outputs have none");
  }
  return check_output(p);
}

ffi::Error conv(Destination const& destination, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::RemainingArgs vectors,
                ffi::Result<ffi::AnyBuffer> out, ffi::Span<int32_t const> strides, ffi::Span<int32_t const> before,
                ffi::Span<int32_t const> dilation, int32_t groups, std::string_view names, std::string_view activation,
                float low, float high) {
  Conv problem{};
  JAX_QMM_RETURN_IF_ERROR(
      read(lhs, rhs, vectors, *out, strides, before, dilation, groups, names, activation, low, high, problem));
  Gpu const* gpu;
  JAX_QMM_RETURN_IF_ERROR(cuda_error(current_gpu(gpu), "asking what the GPU is"));
  return destination([&](Submit const& submit, Chosen& chosen) {
    std::optional<int> const choice = chosen ? chosen->first : select_conv(problem, *gpu);
    if (!choice) return ffi::Error::InvalidArgument("no kernel for convolutions fits this GPU");
    chosen = {*choice, 0};
    cudaError_t const error = launch_conv(problem, *choice, submit);
    if (error == cudaSuccess) return ffi::Error::Success();  // before a kernel is put into words
    return cuda_error(error, describe_conv(*choice).c_str());
  });
}

ffi::Error initialize() {
  JAX_QMM_RETURN_IF_ERROR(begin_call());
  return cuda_error(prepare_conv(), "preparing the kernels for convolutions");
}

// What both stages take.
template <class Binding>
auto bind(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()                       // lhs (1 | batch, images, *image, groups * channels)
      .template Arg<ffi::AnyBuffer>()                       // rhs (1 | batch, N, *taps, channels)
      .RemainingArgs()                                      // vectors, (1 | batch, 1 | length) each
      .template Ret<ffi::AnyBuffer>()                       // out (batch, images, *pixels, N)
      .template Attr<ffi::Span<int32_t const>>("strides")   // of each of the three spatial axes
      .template Attr<ffi::Span<int32_t const>>("before")    // padding
      .template Attr<ffi::Span<int32_t const>>("dilation")  // of rhs
      .template Attr<int32_t>("groups")                     // of channels
      .template Attr<std::string_view>("names")             // of the vectors
      .template Attr<std::string_view>("activation")        // none, clamp, gelu or silu
      .template Attr<float>("low")                          // of clamp
      .template Attr<float>("high");
}

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize, ffi::Ffi::BindInitialize());
XLA_FFI_DEFINE_HANDLER(execute_handler, conv, bind(bind_execute()));
XLA_FFI_DEFINE_HANDLER(record_handler, conv, bind(bind_record()), {ffi::Traits::kCmdBufferCompatible});

AddTarget const target({"jax_qmm_conv", initialize_handler, execute_handler, record_handler});

}  // namespace
}  // namespace jax_qmm
