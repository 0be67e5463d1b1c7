// Where a call's kernels go: on XLA's stream, or into the CUDA graph of the program, as the FFI stage "record" has it.
// Only what is recorded is for graphs. What XLA captures from a stream is a graph within its graph, whose arguments it
// changes later but not its kernel: a call that chose another one then left wrong results, and no error.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "core/launch.h"
#include "ffi/buffers.h"
#include "ffi/record_abi.h"

namespace jax_qmm {

// Which of several kernels a call takes. Null where the call is to choose and to say so; set where its kernels are in a
// graph already, of which only the arguments can change.
using Chosen = std::optional<std::pair<int, int>>;

// Calls its argument, which submits all kernels of the call, with a Submit and the choice to keep.
using Destination = std::function<ffi::Error(std::function<ffi::Error(Submit const&, Chosen&)> const& submit_all)>;

// Contexts that are decoded to a Destination.
struct OnStream {};
struct InGraph {};

// The beginnings of the two bindings of a handler.
inline auto bind_execute() { return ffi::Ffi::Bind().Ctx<OnStream>(); }
inline auto bind_record() { return ffi::Ffi::Bind<static_cast<ffi::ExecutionStage>(kRecordStage)>().Ctx<InGraph>(); }

// How many kernels were added to graphs or changed there.
int64_t count_recorded();

// Why calls are not recorded though that was asked for; "" where nothing speaks against it.
std::string why_not_recorded();
void note_not_recorded(std::string why);

}  // namespace jax_qmm

template <>
struct xla::ffi::CtxDecoding<jax_qmm::OnStream> {
  using Type = jax_qmm::Destination;
  static std::optional<Type> Decode(XLA_FFI_Api const* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic);
};

template <>
struct xla::ffi::CtxDecoding<jax_qmm::InGraph> {
  using Type = jax_qmm::Destination;
  static std::optional<Type> Decode(XLA_FFI_Api const* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic);
};
