// Whether this build's kernels run on a GPU, under the driver at hand. Where they don't, the reasons say what helps,
// and are "" where they do.
#pragma once

#include <functional>
#include <string>

#include "ffi/buffers.h"

namespace jax_qmm {

// `version` 13000 is a driver for CUDA 13.0; 0 is none, of which nothing is said.
std::string why_unfit_driver(int version);
int driver_version();

// `capability` 90 is 9.0.
std::string why_unfit_gpu(std::string const& name, int capability);

// What is to be done in this process before the first kernel that XLA calls, whoever has lowered it.
void call_before_first_kernel(std::function<void()>);

// Every call of XLA comes here before its kernels: an error where the driver or the current device is unfit, since
// nobody has asked before for a program that was lowered in another process.
ffi::Error begin_call();

}  // namespace jax_qmm
