// What the handler of scaled_mm makes of XLA's buffers, with stand-ins for the kernels.
#include "ffi/scaled_mm.cc"

#include <cmath>
#include <vector>

#include "check.h"

using namespace jax_qmm;

// The kernels: a choice of instance 1 does not suit the addresses of an operand at `kElsewhere`.

ScaledMm launched{};
ScaledMmChoice launched_choice{};
char* const kSomewhere = reinterpret_cast<char*>(1 << 20);
char* const kElsewhere = kSomewhere + 1;

namespace jax_qmm {
ScaledMmChoice select_scaled_mm(ScaledMm const&, Gpu const&) { return {7, 8}; }
bool suits_alignment(ScaledMm const& p, ScaledMmChoice choice) { return choice.instance != 1 || p.a != kElsewhere; }
std::string describe_scaled_mm(ScaledMmChoice) { return ""; }
cudaError_t prepare_scaled_mm() { return cudaSuccess; }
cudaError_t launch_scaled_mm(ScaledMm const& problem, ScaledMmChoice choice, Gpu const&, Submit const&) {
  launched = problem;
  launched_choice = choice;
  return cudaSuccess;
}
cudaError_t current_gpu(Gpu const*& gpu) {
  static Gpu const h200{"NVIDIA H200", 132, 90};
  gpu = &h200;
  return cudaSuccess;
}
ffi::Error begin_call() { return ffi::Error::Success(); }
AddTarget::AddTarget(Target) {}
}  // namespace jax_qmm

std::optional<Destination> ffi::CtxDecoding<OnStream>::Decode(XLA_FFI_Api const*, XLA_FFI_ExecutionContext*,
                                                              ffi::DiagnosticEngine&) {
  return std::nullopt;
}
std::optional<Destination> ffi::CtxDecoding<InGraph>::Decode(XLA_FFI_Api const*, XLA_FFI_ExecutionContext*,
                                                             ffi::DiagnosticEngine&) {
  return std::nullopt;
}
char const* cudaGetErrorString(cudaError_t) { return "a CUDA error"; }

// XLA's buffers

int constexpr kBatch = 2, kM = 3, kN = 16, kK = 32;

struct Buffer {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> dims;
  void* data = kSomewhere;

  XLA_FFI_Buffer xla() { return {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, data, int64_t(dims.size()), dims.data()}; }
};

// What the handler computes besides the sums.
struct Epilogue {
  XLA_FFI_DataType out = XLA_FFI_DataType_BF16;
  std::string activation = "none";
  float low = -INFINITY, high = INFINITY;
};

// Calls the handler for operands of a's dtype, where the graph of the call has the kernel `kept`.
ffi::Error call(std::vector<Buffer> vectors, std::string const& names, Buffer a = {XLA_FFI_DataType_S8, {1, kM, kK}},
                Chosen kept = std::nullopt, Epilogue epilogue = {},
                std::optional<ffi::Result<ffi::AnyBuffer>> workspace = std::nullopt) {
  Buffer b{a.dtype, {kBatch, kN, kK}}, out{epilogue.out, {kBatch, kM, kN}};
  XLA_FFI_Buffer xla_a = a.xla(), xla_b = b.xla(), xla_out = out.xla();
  std::vector<XLA_FFI_Buffer> buffers;
  for (Buffer& vector : vectors) buffers.push_back(vector.xla());
  std::vector<void*> pointers;
  for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> types(buffers.size(), XLA_FFI_ArgType_BUFFER);
  XLA_FFI_Args args{XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(buffers.size()), types.data(), pointers.data()};
  Destination const destination = [&](auto const& submit_all) {
    Chosen chosen = kept;
    return submit_all([](Launch const&) { return cudaSuccess; }, chosen);
  };
  return scaled_mm(destination, ffi::AnyBuffer(&xla_a), ffi::AnyBuffer(&xla_b), ffi::RemainingArgs(&args, 0),
                   ffi::Result<ffi::AnyBuffer>(ffi::AnyBuffer(&xla_out)), workspace, names, false, epilogue.activation,
                   epilogue.low, epilogue.high);
}

ffi::Error call_with(std::vector<Buffer> vectors, std::string const& names, Epilogue epilogue,
                     XLA_FFI_DataType in = XLA_FFI_DataType_S8) {
  return call(vectors, names, {in, {1, kM, kK}}, std::nullopt, epilogue);
}

Buffer floats(int64_t rows, int64_t values) { return {XLA_FFI_DataType_F32, {rows, values}}; }
Buffer ints(int64_t rows, int64_t values) { return {XLA_FFI_DataType_S32, {rows, values}}; }

bool has(Vector const& vector, DType dtype, int64_t stride, int64_t batch_stride) {
  return vector.data == kSomewhere && vector.dtype == dtype && vector.stride == stride &&
         vector.batch_stride == batch_stride;
}

bool refused(ffi::Error const& error, char const* why) { return error.message().find(why) != std::string::npos; }

void vectors_go_where_their_names_say() {
  CHECK(call({ints(1, kN), floats(1, 1), floats(kBatch, kM), ints(1, 1), {XLA_FFI_DataType_BF16, {1, kN}}},
             "azp_adj scale_b scale_a azp bias")
            .success());
  CHECK(launched.m == kM && launched.n == kN && launched.k == kK && launched.batch == kBatch);
  CHECK(launched.a_batch_stride == 0 && launched.b_batch_stride == kN * kK);
  CHECK(has(launched.scale_a, DType::kF32, 1, kM) && has(launched.scale_b, DType::kF32, 0, 0));
  CHECK(has(launched.azp_adj, DType::kS32, 1, 0) && has(launched.azp, DType::kS32, 0, 0));
  CHECK(has(launched.bias, DType::kBF16, 1, 0));
}

void the_workspace_is_as_large_as_its_buffer() {
  CHECK(call({}, "").success() && launched.workspace == nullptr && launched.workspace_bytes == 0);
  Buffer workspace{XLA_FFI_DataType_U8, {96}, kElsewhere};
  XLA_FFI_Buffer xla = workspace.xla();
  ffi::Result<ffi::AnyBuffer> const result{ffi::AnyBuffer(&xla)};
  CHECK(call({}, "", {XLA_FFI_DataType_S8, {1, kM, kK}}, std::nullopt, {}, result).success());
  CHECK(launched.workspace == kElsewhere && launched.workspace_bytes == 96);
}

void other_vectors_are_refused() {
  CHECK(refused(call({floats(1, 1)}, "shift"), "\"shift\""));
  CHECK(refused(call({floats(1, 1), floats(1, 1)}, "scale_a"), "operand 1"));
  CHECK(refused(call({floats(1, 1)}, "scale_a scale_b"), "more names"));
  CHECK(refused(call({ints(1, 1)}, "scale_a"), "scale_a has XLA's dtype"));
  CHECK(refused(call({floats(1, 1)}, "azp"), "azp has XLA's dtype"));
  CHECK(refused(call({floats(1, kN)}, "scale_a"), "scale_a has shape (1, 16); it needs 1 or 2 rows of 1 or 3 values"));
  CHECK(refused(call({floats(3, 1)}, "bias"), "bias has shape (3, 1)"));
}

void the_whole_epilogue_is_read() {
  std::vector<Buffer> const vectors{ints(1, kM), ints(1, 1), floats(kBatch, 1), ints(1, 1)};
  std::string const names = "sums_a azp_b out_scale out_zero_point";
  CHECK(call_with(vectors, names, {XLA_FFI_DataType_S8, "clamp", 0, 6}).success());
  CHECK(has(launched.sums_a, DType::kS32, 1, 0) && has(launched.azp_b, DType::kS32, 0, 0));
  CHECK(has(launched.out_scale, DType::kF32, 0, 1) && has(launched.out_zero_point, DType::kS32, 0, 0));
  CHECK(launched.out_dtype == DType::kS8 && launched.activation == Activation::kClamp);
  CHECK(launched.low == 0 && launched.high == 6);
  for (auto [name, activation] : {std::pair("none", Activation::kNone), std::pair("gelu", Activation::kGelu),
                                  std::pair("silu", Activation::kSilu)}) {
    CHECK(call_with({}, "", {XLA_FFI_DataType_F32, name}).success() && launched.activation == activation);
  }
}

// Alone, so that kernels that exist keep serving what they did.
void a_term_an_activation_and_8_bits_need_the_full_epilogue() {
  CHECK(call({ints(1, 1), ints(1, kN), floats(1, 1), floats(1, 1), floats(1, kN)}, "azp azp_adj scale_a scale_b bias")
            .success());
  CHECK(!needs_full_epilogue(launched));
  CHECK(call({ints(1, kM), ints(1, kN)}, "sums_a azp_b").success() && needs_full_epilogue(launched));
  CHECK(call_with({}, "", {XLA_FFI_DataType_BF16, "silu"}).success() && needs_full_epilogue(launched));
  CHECK(call_with({floats(1, 1)}, "out_scale", {XLA_FFI_DataType_F8E4M3FN}).success() && needs_full_epilogue(launched));
}

void what_does_not_go_together_is_refused() {
  auto const f8 = XLA_FFI_DataType_F8E4M3FN, s8 = XLA_FFI_DataType_S8, s32 = XLA_FFI_DataType_S32;
  CHECK(
      refused(call_with({}, "", {XLA_FFI_DataType_F32, "relu"}), "activation is \"relu\"; it needs to be none, clamp"));
  CHECK(refused(call_with({}, "", {XLA_FFI_DataType_F32, "clamp", 2, 1}), "low is 2.000000 and high is 1.000000"));
  CHECK(refused(call_with({}, "", {XLA_FFI_DataType_F32, "clamp", NAN, 1}), "low is nan"));
  CHECK(refused(call({ints(1, kM)}, "sums_a"), "sums_a and azp_b were not given together"));
  CHECK(refused(call({ints(1, 1)}, "azp_b"), "sums_a and azp_b were not given together"));
  CHECK(refused(call_with({ints(1, 1)}, "azp", Epilogue{}, f8), "azp has integers of sums of int8"));
  CHECK(refused(call_with({}, "", {s8}), "out has dtype int8; it needs out_scale"));
  CHECK(refused(call_with({}, "", {f8}, f8), "out has dtype float8_e4m3fn; it needs out_scale"));
  CHECK(refused(call({floats(1, 1)}, "out_scale"), "out has dtype bfloat16, which has no scale"));
  CHECK(refused(call_with({floats(1, 1), ints(1, 1)}, "out_scale out_zero_point", {f8}), "which has no zero point"));
  CHECK(refused(call_with({}, "", {s32, "silu"}), "out has dtype int32: raw sums"));
  CHECK(refused(call_with({ints(1, kM), ints(1, 1)}, "sums_a azp_b", {s32}), "out has dtype int32: raw sums"));
  CHECK(refused(call_with({}, "", {s32}, f8), "out has XLA's dtype"));
  CHECK(refused(call_with({floats(1, kN)}, "out_scale", {s8}), "out_scale has shape (1, 16)"));
}

void a_graph_keeps_its_kernel_where_that_suits() {
  CHECK(call({}, "").success() && launched_choice == (ScaledMmChoice{7, 8}));
  Buffer a{XLA_FFI_DataType_S8, {1, kM, kK}};
  CHECK(call({}, "", a, std::pair(1, 4)).success() && launched_choice == (ScaledMmChoice{1, 4}));
  a.data = kElsewhere;
  CHECK(call({}, "", a, std::pair(1, 4)).success() && launched_choice == (ScaledMmChoice{7, 8}));
  CHECK(call({}, "", a, std::pair(-1, 1)).success() && launched_choice == (ScaledMmChoice{-1, 1}));
}

int main(int, char** arguments) {
  run_case(arguments, {
                          CASE(vectors_go_where_their_names_say),
                          CASE(the_workspace_is_as_large_as_its_buffer),
                          CASE(other_vectors_are_refused),
                          CASE(the_whole_epilogue_is_read),
                          CASE(a_term_an_activation_and_8_bits_need_the_full_epilogue),
                          CASE(what_does_not_go_together_is_refused),
                          CASE(a_graph_keeps_its_kernel_where_that_suits),
                      });
}
