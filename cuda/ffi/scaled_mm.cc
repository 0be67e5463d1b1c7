// jax_qmm_scaled_mm: checks the buffers, fills ScaledMm, launches or records.
#include "scaled_mm/scaled_mm.h"

#include <algorithm>
#include <string_view>

#include "ffi/handlers.h"
#include "ffi/helpers.h"
#include "ffi/queue.h"

namespace jax_qmm {
namespace {

// Reads a vector of shape (1 | batch, 1 | length).
ffi::Error read_vector(ffi::AnyBuffer const& buffer, char const* name, std::initializer_list<DType> dtypes,
                       int64_t batch, int64_t length, Vector& vector) {
  JAX_QMM_RETURN_IF_ERROR(check_dtype(buffer, name, dtypes));
  JAX_QMM_RETURN_IF_ERROR(check_rank(buffer, name, 2));
  auto const dims = buffer.dimensions();
  if ((dims[0] != 1 && dims[0] != batch) || (dims[1] != 1 && dims[1] != length)) {
    return ffi::Error::InvalidArgument(std::string(name) + " has shape " + to_string(dims) + "; it needs 1 or " +
                                       std::to_string(batch) + " rows of 1 or " + std::to_string(length) + " values");
  }
  vector = {buffer.untyped_data(), *dtype_of(buffer), dims[1] == 1 ? 0 : 1, dims[0] == 1 ? 0 : dims[1],
            static_cast<int64_t>(buffer.size_bytes())};
  return ffi::Error::Success();
}

// Reads the vectors, which `names` names in their order, separated by spaces.
ffi::Error read_vectors(ffi::RemainingArgs buffers, std::string_view names, ScaledMm& problem) {
  auto const floats = {DType::kF32, DType::kBF16, DType::kF16}, ints = {DType::kS32};
  for (size_t i = 0; i < buffers.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> const buffer = buffers.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    std::string_view const name = names.substr(0, names.find(' '));
    names.remove_prefix(std::min(names.size(), name.size() + 1));
    auto const read = [&](char const* known, auto dtypes, int length, Vector& vector) {
      return read_vector(*buffer, known, dtypes, problem.batch, length, vector);
    };
    ffi::Error error = name == "scale_a"   ? read("scale_a", floats, problem.m, problem.scale_a)
                       : name == "scale_b" ? read("scale_b", floats, problem.n, problem.scale_b)
                       : name == "bias"    ? read("bias", floats, problem.n, problem.bias)
                       : name == "azp_adj" ? read("azp_adj", ints, problem.n, problem.azp_adj)
                       : name == "azp"     ? read("azp", ints, problem.m, problem.azp)
                                           : ffi::Error::InvalidArgument("names has no vector's name for each operand");
    if (error.failure()) return error;
  }
  if (!names.empty()) return ffi::Error::InvalidArgument("names has more names than there are vectors");
  return ffi::Error::Success();
}

ffi::Error read(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs vectors, ffi::AnyBuffer out,
                std::string_view names, bool fast_accum, ScaledMm& problem) {
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
    JAX_QMM_RETURN_IF_ERROR(check_dtype(out, "out", {DType::kBF16, DType::kF16, DType::kF32, DType::kS32}));
  } else {
    JAX_QMM_RETURN_IF_ERROR(check_dtype(out, "out", {DType::kBF16, DType::kF16, DType::kF32}));
  }
  problem.out_dtype = *dtype_of(out);

  return read_vectors(vectors, names, problem);
}

ffi::Error scaled_mm(Queue const& queue, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs vectors,
                     ffi::Result<ffi::AnyBuffer> out, std::string_view names, bool fast_accum) {
  ScaledMm problem{};
  JAX_QMM_RETURN_IF_ERROR(read(a, b, vectors, *out, names, fast_accum, problem));
  int device, sm_count;
  JAX_QMM_RETURN_IF_ERROR(cuda_error(cudaGetDevice(&device), "cudaGetDevice"));
  JAX_QMM_RETURN_IF_ERROR(
      cuda_error(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute"));
  return queue([&](Submit const& submit, Chosen& chosen) {
    ScaledMmChoice const choice =
        chosen ? ScaledMmChoice{chosen->first, chosen->second} : select_scaled_mm(problem, sm_count);
    chosen = {choice.instance, choice.swizzle};
    cudaError_t const error = launch_scaled_mm(problem, choice, sm_count, submit);
    if (error == cudaSuccess) return ffi::Error::Success();  // before a kernel is put into words
    return cuda_error(error, describe_scaled_mm(choice).c_str());
  });
}

ffi::Error initialize() { return cuda_error(prepare_scaled_mm(), "preparing the scaled_mm kernels"); }

// What both stages take.
template <class Binding>
auto bind(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()            // a (1 | batch, M, K)
      .template Arg<ffi::AnyBuffer>()            // b (1 | batch, N, K)
      .RemainingArgs()                           // vectors, (1 | batch, 1 | M or N) each
      .template Ret<ffi::AnyBuffer>()            // out (batch, M, N)
      .template Attr<std::string_view>("names")  // of the vectors, such as "scale_a scale_b bias"
      .template Attr<bool>("fast_accum");
}

}  // namespace

using ffi::Traits;

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxQmmScaledMmInitialize, initialize, ffi::Ffi::BindInitialize());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxQmmScaledMm, scaled_mm, bind(bind_execute()), {Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxQmmScaledMmRecord, scaled_mm, bind(bind_record()), {Traits::kCmdBufferCompatible});

}  // namespace jax_qmm
