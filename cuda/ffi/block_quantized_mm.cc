// jax_qmm_block_quantized_mm: checks the buffers, fills BlockQuantizedMm, launches or records.
#include "block_quantized_mm/block_quantized_mm.h"

#include <string_view>
#include <utility>

#include "ffi/activation.h"
#include "ffi/buffers.h"
#include "ffi/device.h"
#include "ffi/handlers.h"
#include "ffi/record.h"
#include "ffi/vectors.h"

namespace jax_qmm {
namespace {

// What one side has of each row and block.
struct NamedBlocks {
  char const* name;
  int BlockQuantizedMm::* rows;
  InBlocks BlockQuantizedMm::* side;
  InBlocks::Vector InBlocks::* to;
  bool may_share = false;

  // Reads a buffer of shape (1 | batch, rows, groups), or with a row for each 2^kLog2Shared.
  ffi::Error read(ffi::AnyBuffer const& buffer, BlockQuantizedMm& p) const {
    JAX_QMM_RETURN_IF_ERROR(check_dtype(buffer, name, {DType::kF32}));
    JAX_QMM_RETURN_IF_ERROR(check_rank(buffer, name, 3));
    // Without columns there may be no block or one of them.
    auto const dims = buffer.dimensions();
    int64_t const batch = dims[0] == 1 ? 1 : p.batch, groups = p.k == 0 ? dims[2] : p.groups();
    int const shift = may_share && dims[1] != p.*rows ? p.kLog2Shared : 0;
    int64_t const count = ceil_div(p.*rows, 1 << shift);
    JAX_QMM_RETURN_IF_ERROR(check_shape(buffer, name, {batch, count, groups}));
    p.*side.*to = {static_cast<float const*>(buffer.untyped_data()), batch == 1 ? 0 : count * groups, shift};
    return ffi::Error::Success();
  }
};

constexpr NamedBlocks of_a(char const* name, InBlocks::Vector InBlocks::* to) {
  return {name, static_cast<int BlockQuantizedMm::*>(&BlockQuantizedMm::m), &BlockQuantizedMm::of_a, to};
}
constexpr NamedBlocks of_b(char const* name, InBlocks::Vector InBlocks::* to, bool may_share = false) {
  return {name, static_cast<int BlockQuantizedMm::*>(&BlockQuantizedMm::n), &BlockQuantizedMm::of_b, to, may_share};
}

NamedOperand<BlockQuantizedMm> const kNamed[] = {
    {"scale_a", [](auto const& buffer, auto& p) { return of_a("scale_a", &InBlocks::scale).read(buffer, p); }},
    {"scale_b", [](auto const& buffer, auto& p) { return of_b("scale_b", &InBlocks::scale, true).read(buffer, p); }},
    {"zero_point_a",
     [](auto const& buffer, auto& p) { return of_a("zero_point_a", &InBlocks::zero_point).read(buffer, p); }},
    {"sums_a", [](auto const& buffer, auto& p) { return of_a("sums_a", &InBlocks::sums).read(buffer, p); }},
    {"zero_point_b",
     [](auto const& buffer, auto& p) { return of_b("zero_point_b", &InBlocks::zero_point).read(buffer, p); }},
    {"sums_b", [](auto const& buffer, auto& p) { return of_b("sums_b", &InBlocks::sums).read(buffer, p); }},
    {"bias",
     [](auto const& buffer, auto& p) {
       return NamedVector<ScaledMm, Vector>{"bias", Values::kFloat, &ScaledMm::n, &ScaledMm::bias}.read(buffer, p);
     }},
};

ffi::Error read(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs named, ffi::AnyBuffer out, int block,
                std::string_view names, std::string_view activation, float low, float high, BlockQuantizedMm& p) {
  auto const refuse = [](std::string const& why) { return ffi::Error::InvalidArgument(why); };
  JAX_QMM_RETURN_IF_ERROR(check_dtype(b, "b", {DType::kS8, DType::kF8E4M3}));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(a, "a", {*dtype_of(b)}));
  JAX_QMM_RETURN_IF_ERROR(check_dtype(out, "out", {DType::kF32, DType::kBF16, DType::kF16}));
  JAX_QMM_RETURN_IF_ERROR(check_rank(a, "a", 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(b, "b", 3));
  JAX_QMM_RETURN_IF_ERROR(check_rank(out, "out", 3));
  auto const batch_of = [](ffi::AnyBuffer const& buffer, int64_t batch) {
    return buffer.dimensions()[0] == 1 ? 1 : batch;
  };
  int64_t const batch = out.dimensions()[0], m = a.dimensions()[1], n = b.dimensions()[1], k = a.dimensions()[2];
  JAX_QMM_RETURN_IF_ERROR(check_shape(a, "a", {batch_of(a, batch), m, k}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(b, "b", {batch_of(b, batch), n, k}));
  JAX_QMM_RETURN_IF_ERROR(check_shape(out, "out", {batch, m, n}));
  if (block < p.kShortest || block > p.kLongest || (block & (block - 1)) != 0) {
    return refuse("block is " + std::to_string(block) + "; it needs to be 32, 64, 128 or 256");
  }
  auto const address = [](ffi::AnyBuffer const& buffer) { return reinterpret_cast<uintptr_t>(buffer.untyped_data()); };
  if (k % 4 != 0 || address(a) % 4 != 0 || address(b) % 4 != 0) {
    return refuse("a has shape " + to_string(a.dimensions()) + "; K and addresses need to be multiples of 4");
  }
  if (k > kLongest || m > kLongest || n > kLongest || batch > kLongest) {
    return refuse("a has shape " + to_string(a.dimensions()) + " and b " + to_string(b.dimensions()) +
                  "; no dimension may exceed " + std::to_string(kLongest));
  }
  p.m = int(m), p.n = int(n), p.k = int(k), p.batch = int(batch);
  p.block = block;
  p.in = *dtype_of(b), p.out_dtype = *dtype_of(out);
  p.a = a.untyped_data(), p.b = b.untyped_data(), p.out = out.untyped_data();
  p.a_batch_stride = batch_of(a, batch) == 1 ? 0 : m * k;
  p.b_batch_stride = batch_of(b, batch) == 1 ? 0 : n * k;
  p.out_batch_stride = m * n;
  JAX_QMM_RETURN_IF_ERROR(read_vectors(named, names, kNamed, p));
  if (p.of_a.scale.data == nullptr && k > 0 && m > 0) return refuse("scale_a is missing");
  if (p.of_b.scale.data == nullptr && k > 0 && n > 0) return refuse("scale_b is missing");
  return read_activation(activation, low, high, p);
}

ffi::Error block_quantized_mm(Destination const& destination, ffi::AnyBuffer a, ffi::AnyBuffer b,
                              ffi::RemainingArgs named, ffi::Result<ffi::AnyBuffer> out, int32_t block,
                              std::string_view names, std::string_view activation, float low, float high) {
  BlockQuantizedMm problem{};
  JAX_QMM_RETURN_IF_ERROR(read(a, b, named, *out, block, names, activation, low, high, problem));
  Gpu const* gpu;
  JAX_QMM_RETURN_IF_ERROR(cuda_error(current_gpu(gpu), "asking what the GPU is"));
  return destination([&](Submit const& submit, Chosen& chosen) {
    std::optional<int> const choice = chosen ? chosen->first : select_block_quantized_mm(problem, *gpu);
    if (!choice) return ffi::Error::InvalidArgument("no kernel of this GPU serves such operands");
    chosen = {*choice, 0};
    cudaError_t const error = launch_block_quantized_mm(problem, *choice, submit);
    if (error == cudaSuccess) return ffi::Error::Success();  // before a kernel is put into words
    return cuda_error(error, describe_block_quantized_mm(*choice).c_str());
  });
}

ffi::Error initialize() {
  JAX_QMM_RETURN_IF_ERROR(begin_call());
  return cuda_error(prepare_block_quantized_mm(), "preparing the block_quantized_mm kernels");
}

// What both stages take.
template <class Binding>
auto bind(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()                 // a (1 | batch, M, K)
      .template Arg<ffi::AnyBuffer>()                 // b (1 | batch, N, K)
      .RemainingArgs()                                // scale_a (1 | batch, M, blocks of K); scale_b
                                                      // (1 | batch, N | N / 128, blocks of K); zero points and sums
                                                      // likewise; bias (1 | batch, N)
      .template Ret<ffi::AnyBuffer>()                 // out (batch, M, N)
      .template Attr<int32_t>("block")                // columns: 32, 64, 128 or 256
      .template Attr<std::string_view>("names")       // of the remaining arguments
      .template Attr<std::string_view>("activation")  // none, clamp, gelu or silu
      .template Attr<float>("low")                    // of clamp
      .template Attr<float>("high");
}

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize, ffi::Ffi::BindInitialize());
XLA_FFI_DEFINE_HANDLER(execute_handler, block_quantized_mm, bind(bind_execute()));
XLA_FFI_DEFINE_HANDLER(record_handler, block_quantized_mm, bind(bind_record()), {ffi::Traits::kCmdBufferCompatible});

AddTarget const target({"jax_qmm_block_quantized_mm", initialize_handler, execute_handler, record_handler});

}  // namespace
}  // namespace jax_qmm
