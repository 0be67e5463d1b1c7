// Where a call's kernels go: on XLA's stream, or into the CUDA graph of the program, as the FFI stage "record" has it.
// A kernel there may start while the one before it ends. A call that XLA captures from the stream instead is a graph
// within that graph, which waits; so are the calls that can't be recorded.
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

// Why calls are captured though recording was asked for; "" where nothing speaks against recording.
std::string why_captured();
void note_capture(std::string why);

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
