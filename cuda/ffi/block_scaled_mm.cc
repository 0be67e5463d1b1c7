// jax_qmm_block_scaled_mm, jax_qmm_weight_only_conv and jax_qmm_dequantize_weights: check the buffers, fill
// BlockScaledMm, launch or record.
#include "block_scaled_mm/block_scaled_mm.h"

#include <string_view>
#include <utility>

#include "ffi/activation.h"
#include "ffi/buffers.h"
#include "ffi/device.h"
#include "ffi/handlers.h"
#include "ffi/record.h"
#include "ffi/vectors.h"
#include "ffi/windows.h"

namespace jax_qmm {
namespace {

// How many entries of the batch a buffer needs: as many as the result, or one for all.
int64_t batch_of(ffi::AnyBuffer const& buffer, BlockScaledMm const& p) {
  return buffer.dimensions()[0] == 1 ? 1 : p.batch;
}

ffi::Error read_blocks(ffi::AnyBuffer const& buffer, char const* name, std::initializer_list<DType> dtypes,
                       BlockScaledMm const& p, BlockScaledMm::Blocks& to) {
  JAX_QMM_RETURN_IF_ERROR(check_dtype(buffer, name, dtypes));
  JAX_QMM_RETURN_IF_ERROR(check_rank(buffer, name, 3));
  // Without columns there may be no block or one of them.
  int64_t const batch = batch_of(buffer, p), n = p.n, groups = p.k == 0 ? buffer.dimensions()[2] : p.groups();
  JAX_QMM_RETURN_IF_ERROR(check_shape(buffer, name, {batch, n, groups}));
  to = {buffer.untyped_data(), *dtype_of(buffer), batch == 1 ? 0 : n * groups};
  return ffi::Error::Success();
}

ffi::Error read_zero_point(ffi::AnyBuffer const& buffer, BlockScaledMm& p) {
  return read_blocks(buffer, "zero_point", {DType::kS8, DType::kF32, DType::kBF16, DType::kF16}, p, p.zero_point);
}

struct Optional {
  char const* name;
  ffi::Error (*read)(ffi::AnyBuffer const& buffer, BlockScaledMm& problem);
};

Optional const kOptional[] = {
    {"zero_point", read_zero_point},
    {"bias",
     [](ffi::AnyBuffer const& buffer, BlockScaledMm& p) {
       NamedVector<BlockScaledMm, Vector> const bias{"bias", Values::kFloat, &BlockScaledMm::n, &BlockScaledMm::bias};
       return bias.read(buffer, p);
     }},
};

std::initializer_list<DType> const kFloats = {DType::kF32, DType::kBF16, DType::kF16};

// The weights (batch, n, k) with their scales.
ffi::Error read_weights(ffi::AnyBuffer w, ffi::AnyBuffer scale, int64_t batch, int64_t n, int64_t k, int bits,
                        int block, BlockScaledMm& p) {
  auto const refuse = [](std::string const& why) { return ffi::Error::InvalidArgument(why); };
  if (bits != 4 && bits != 8) return refuse("bits is " + std::to_string(bits) + "; it needs to be 4 or 8");
  if (block <= 0 || (block % 16 != 0 && block < k)) {
    return refuse("block is " + std::to_string(block) + "; it needs to be a multiple of 16, or at least K, " +
                  std::to_string(k));
  }
  if (k > BlockScaledMm::kLongestK || n > kLongest || batch > kLongest) {
    return refuse("the weights are " + std::to_string(batch) + " of (" + std::to_string(n) + ", " + std::to_string(k) +
                  "); K may not exceed " + std::to_string(BlockScaledMm::kLongestK) + ", the others " +
                  std::to_string(kLongest));
  }
  p.n = int(n), p.k = int(k), p.batch = int(batch);
  p.bits = bits, p.block = block;
  if (w.element_type() != ffi::U8) return refuse("w needs dtype uint8: packed weights");
  JAX_QMM_RETURN_IF_ERROR(check_rank(w, "w", 3));
  int64_t const w_batch = batch_of(w, p);
  JAX_QMM_RETURN_IF_ERROR(check_shape(w, "w", {w_batch, n, p.row_bytes()}));
  p.w = static_cast<uint8_t const*>(w.untyped_data());
  p.w_batch_stride = w_batch == 1 ? 0 : n * p.row_bytes();
  return read_blocks(scale, "scale", kFloats, p, p.scale);
}

ffi::Error read(ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer scale, ffi::RemainingArgs optional,
                ffi::AnyBuffer out, int bits, int block, std::string_view names, std::string_view activation, float low,
                float high, BlockScaledMm& p) {
  JAX_QMM_RETURN_IF_ERROR(check_dtype(x, "x", {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3}));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(out, "out", kFloats));
  JAX_QMM_RETURN_IF_ERROR(check_rank(x, "x", 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(out, "out", 3));
  int64_t const batch = out.dimensions()[0], m = x.dimensions()[1], n = out.dimensions()[2], k = x.dimensions()[2];
  JAX_QMM_RETURN_IF_ERROR(check_shape(x, "x", {x.dimensions()[0] == 1 ? 1 : batch, m, k}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(out, "out", {batch, m, n}));
  if (m > kLongest) {
    return ffi::Error::InvalidArgument("x has shape " + to_string(x.dimensions()) + "; its rows may not exceed " +
                                       std::to_string(kLongest));
  }
  JAX_QMM_RETURN_IF_ERROR(read_weights(w, scale, batch, n, k, bits, block, p));
  p.m = int(m);
  p.in = *dtype_of(x), p.out_dtype = *dtype_of(out);
  p.x = x.untyped_data(), p.out = out.untyped_data();
  p.x_batch_stride = x.dimensions()[0] == 1 ? 0 : m * k;
  JAX_QMM_RETURN_IF_ERROR(read_vectors(optional, names, kOptional, p));
  return read_activation(activation, low, high, p);
}

ffi::Error run(Destination const& destination, BlockScaledMm& problem,
               std::optional<ffi::Result<ffi::AnyBuffer>> workspace) {
  read_workspace(workspace, problem);
  Gpu const* gpu;
  JAX_QMM_RETURN_IF_ERROR(cuda_error(current_gpu(gpu), "asking what the GPU is"));
  return destination([&](Submit const& submit, Chosen& chosen) {
    std::optional<BlockScaledMmChoice> choice;
    choice = chosen ? BlockScaledMmChoice{chosen->first, chosen->second} : select_block_scaled_mm(problem, *gpu);
    if (!choice)
      return ffi::Error::InvalidArgument("no kernel of this GPU serves x of " + std::to_string(problem.m) + " rows");
    chosen = {choice->instance, choice->split};
    cudaError_t const error = launch_block_scaled_mm(problem, *choice, submit);
    if (error == cudaSuccess) return ffi::Error::Success();  // before a kernel is put into words
    return cuda_error(error, describe_block_scaled_mm(*choice).c_str());
  });
}

ffi::Error block_scaled_mm(Destination const& destination, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer scale,
                           ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out,
                           std::optional<ffi::Result<ffi::AnyBuffer>> workspace, int32_t bits, int32_t block,
                           std::string_view names, std::string_view activation, float low, float high) {
  BlockScaledMm problem{};
  JAX_QMM_RETURN_IF_ERROR(read(x, w, scale, optional, *out, bits, block, names, activation, low, high, problem));
  return run(destination, problem, workspace);
}

ffi::Error read_images(ffi::AnyBuffer lhs, ffi::AnyBuffer out, ffi::Span<int32_t const> taps,
                       ffi::Span<int32_t const> strides, ffi::Span<int32_t const> before,
                       ffi::Span<int32_t const> dilation, BlockScaledMm& p) {
  std::initializer_list<DType> const served = {DType::kBF16, DType::kF16};
  auto const refuse = [](std::string const& why) { return ffi::Error::InvalidArgument(why); };
  JAX_QMM_RETURN_IF_ERROR(check_dtype(lhs, "lhs", served));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(out, "out", kFloats));
  JAX_QMM_RETURN_IF_ERROR(check_rank(lhs, "lhs", kSpatial + 2));
  JAX_QMM_RETURN_IF_ERROR(check_rank(out, "out", kSpatial + 2));
  auto const l = lhs.dimensions(), o = out.dimensions();
  JAX_QMM_RETURN_IF_ERROR(check_lengths({l, o}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(out, "out", {l[0], o[1], o[2], o[3], o[4]}));
  Windows w{};
  JAX_QMM_RETURN_IF_ERROR(read_sizes(taps, "taps", 1, w.taps));
  JAX_QMM_RETURN_IF_ERROR(read_sizes(strides, "strides", 1, w.strides));
  JAX_QMM_RETURN_IF_ERROR(read_sizes(before, "before", -kLongest, w.before));
  JAX_QMM_RETURN_IF_ERROR(read_sizes(dilation, "dilation", 1, w.dilation));
  for (int i = 0; i < kSpatial; ++i) w.image[i] = int(l[1 + i]), w.pixels[i] = int(o[1 + i]);
  w.images = int(l[0]), w.groups = 1, w.channels = int(l[4]);
  if (!in_range(w)) {
    return refuse("lhs has shape " + to_string(l) + " and out " + to_string(o) +
                  "; of an image, a window and the result's pixels none may have more than " +
                  std::to_string(kLongest) + " values");
  }
  if (w.channels == 0 || w.channels % 8 != 0 || reinterpret_cast<uintptr_t>(lhs.untyped_data()) % 16 != 0) {
    return refuse("lhs has shape " + to_string(l) +
                  "; it needs a multiple of 8 channels and an address that is a multiple of 16");
  }
  p.windows = w;
  p.m = w.images * w.pixels[0] * w.pixels[1] * w.pixels[2];
  p.in = *dtype_of(lhs), p.out_dtype = *dtype_of(out);
  p.x = lhs.untyped_data(), p.out = out.untyped_data();
  return ffi::Error::Success();
}

ffi::Error weight_only_conv(Destination const& destination, ffi::AnyBuffer lhs, ffi::AnyBuffer w, ffi::AnyBuffer scale,
                            ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out,
                            std::optional<ffi::Result<ffi::AnyBuffer>> workspace, ffi::Span<int32_t const> taps,
                            ffi::Span<int32_t const> strides, ffi::Span<int32_t const> before,
                            ffi::Span<int32_t const> dilation, int32_t bits, int32_t block, std::string_view names,
                            std::string_view activation, float low, float high) {
  BlockScaledMm problem{};
  JAX_QMM_RETURN_IF_ERROR(read_images(lhs, *out, taps, strides, before, dilation, problem));
  Windows const& of = *problem.windows;
  int64_t const n = out->dimensions()[kSpatial + 1], k = int64_t(of.taps[0]) * of.taps[1] * of.taps[2] * of.channels;
  JAX_QMM_RETURN_IF_ERROR(read_weights(w, scale, 1, n, k, bits, block, problem));
  JAX_QMM_RETURN_IF_ERROR(read_vectors(optional, names, kOptional, problem));
  JAX_QMM_RETURN_IF_ERROR(read_activation(activation, low, high, problem));
  return run(destination, problem, workspace);
}

ffi::Error dequantize(Destination const& destination, ffi::AnyBuffer w, ffi::AnyBuffer scale,
                      std::optional<ffi::AnyBuffer> zero_point, ffi::Result<ffi::AnyBuffer> out, int32_t bits,
                      int32_t block) {
  BlockScaledMm problem{};
  JAX_QMM_RETURN_IF_ERROR(check_dtype(*out, "out", kFloats));
  JAX_QMM_RETURN_IF_ERROR(check_rank(*out, "out", 3));
  auto const dims = out->dimensions();
  JAX_QMM_RETURN_IF_ERROR(read_weights(w, scale, dims[0], dims[1], dims[2], bits, block, problem));
  if (zero_point) JAX_QMM_RETURN_IF_ERROR(read_zero_point(*zero_point, problem));
  problem.out = out->untyped_data(), problem.out_dtype = *dtype_of(*out);
  return destination(
      [&](Submit const& submit, Chosen&) { return cuda_error(dequantize_weights(problem, submit), "dequantizing"); });
}

ffi::Error initialize() {
  JAX_QMM_RETURN_IF_ERROR(begin_call());
  return cuda_error(prepare_block_scaled_mm(), "preparing the block_scaled_mm kernels");
}

// What both stages take.
template <class Binding>
auto bind(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // x (1 | batch, M, K)
      .template Arg<ffi::AnyBuffer>()          // w (1 | batch, N, bytes of padded K)
      .template Arg<ffi::AnyBuffer>()          // scale (1 | batch, N, blocks of K)
      .RemainingArgs()                         // zero_point (1 | batch, N, blocks of K), bias (1 | batch, N)
      .template Ret<ffi::AnyBuffer>()          // out (batch, M, N)
      .template OptionalRet<ffi::AnyBuffer>()  // workspace, as large as the lowering found a kernel to need
      .template Attr<int32_t>("bits")
      .template Attr<int32_t>("block")
      .template Attr<std::string_view>("names")       // of zero_point and bias, where they are given
      .template Attr<std::string_view>("activation")  // none, clamp, gelu or silu
      .template Attr<float>("low")                    // of clamp
      .template Attr<float>("high");
}

template <class Binding>
auto bind_conv(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()                       // lhs (images, *image, channels)
      .template Arg<ffi::AnyBuffer>()                       // w (1, N, bytes of padded K), K is taps, then channels
      .template Arg<ffi::AnyBuffer>()                       // scale (1, N, blocks of K)
      .RemainingArgs()                                      // zero_point (1, N, blocks of K), bias (1, N)
      .template Ret<ffi::AnyBuffer>()                       // out (images, *pixels, N)
      .template OptionalRet<ffi::AnyBuffer>()               // workspace
      .template Attr<ffi::Span<int32_t const>>("taps")      // of each of the three spatial axes
      .template Attr<ffi::Span<int32_t const>>("strides")   // likewise
      .template Attr<ffi::Span<int32_t const>>("before")    // padding
      .template Attr<ffi::Span<int32_t const>>("dilation")  // of the taps
      .template Attr<int32_t>("bits")
      .template Attr<int32_t>("block")
      .template Attr<std::string_view>("names")       // of zero_point and bias, where they are given
      .template Attr<std::string_view>("activation")  // none, clamp, gelu or silu
      .template Attr<float>("low")                    // of clamp
      .template Attr<float>("high");
}

template <class Binding>
auto bind_dequantize(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // w (1 | batch, N, bytes of padded K)
      .template Arg<ffi::AnyBuffer>()          // scale (1 | batch, N, blocks of K)
      .template OptionalArg<ffi::AnyBuffer>()  // zero_point (1 | batch, N, blocks of K)
      .template Ret<ffi::AnyBuffer>()          // out (batch, N, K)
      .template Attr<int32_t>("bits")
      .template Attr<int32_t>("block");
}

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize, ffi::Ffi::BindInitialize());
XLA_FFI_DEFINE_HANDLER(execute_handler, block_scaled_mm, bind(bind_execute()));
XLA_FFI_DEFINE_HANDLER(record_handler, block_scaled_mm, bind(bind_record()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(conv_execute, weight_only_conv, bind_conv(bind_execute()));
XLA_FFI_DEFINE_HANDLER(conv_record, weight_only_conv, bind_conv(bind_record()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(dequantize_execute, dequantize, bind_dequantize(bind_execute()));
XLA_FFI_DEFINE_HANDLER(dequantize_record, dequantize, bind_dequantize(bind_record()),
                       {ffi::Traits::kCmdBufferCompatible});

AddTarget const target({"jax_qmm_block_scaled_mm", initialize_handler, execute_handler, record_handler});
AddTarget const conv_target({"jax_qmm_weight_only_conv", initialize_handler, conv_execute, conv_record});
AddTarget const dequantize_target({"jax_qmm_dequantize_weights", initialize_handler, dequantize_execute,
                                   dequantize_record});

}  // namespace
}  // namespace jax_qmm
