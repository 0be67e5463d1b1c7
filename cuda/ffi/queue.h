// Where a handler's kernels go: on XLA's stream, or into the CUDA graph of the program, as the FFI stage "record" has
// it. A kernel there may start while the one before it ends; a call that XLA captures instead is a graph within that
// graph, which waits.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "ffi/helpers.h"
#include "ffi/record_abi.h"
#include "launch.h"

namespace jax_qmm {

// Which of several kernels a call takes. It is null where the call is to choose and say, and given where its kernels
// are in a graph already, of which only the arguments can change.
using Chosen = std::optional<std::pair<int, int>>;

// Calls its argument with a Submit, and the choice to keep.
using Queue = std::function<ffi::Error(std::function<ffi::Error(Submit const&, Chosen&)> const& enqueue)>;

// Contexts that are decoded to a Queue.
struct OnStream {};
struct InGraph {};

// The beginnings of the two bindings of a handler.
inline auto bind_execute() { return ffi::Ffi::Bind().Ctx<OnStream>(); }
inline auto bind_record() { return ffi::Ffi::Bind<static_cast<ffi::ExecutionStage>(kRecordStage)>().Ctx<InGraph>(); }

// How many kernels were added to graphs or changed there.
int64_t count_recorded();

}  // namespace jax_qmm

template <>
struct xla::ffi::CtxDecoding<jax_qmm::OnStream> {
  using Type = jax_qmm::Queue;
  static std::optional<Type> Decode(XLA_FFI_Api const* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic);
};

template <>
struct xla::ffi::CtxDecoding<jax_qmm::InGraph> {
  using Type = jax_qmm::Queue;
  static std::optional<Type> Decode(XLA_FFI_Api const* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic);
};
