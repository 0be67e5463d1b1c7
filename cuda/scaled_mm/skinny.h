// The kernel for few rows of a, defined in skinny.cu.
#pragma once

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm {

constexpr int kSkinnyM = 8;      // most rows of a
constexpr int kSkinnyRows = 16;  // of b in a block
constexpr int kSkinnyStep = 64;  // bytes of each row: one load of 16 bytes by each thread

template <DType In, int OutBytes, int Warps, int Steps, int BlocksPerSm, bool kFull = false>
struct Skinny {
  static cudaError_t prepare(bool& fits);
  static cudaError_t launch(ScaledMm const& problem, int swizzle, Gpu const& gpu, Submit const& submit);
};

}  // namespace jax_qmm

// The kernel of one SKINNY line of instances_sm80.def.
#define JAX_QMM_SKINNY(in, ...) ::jax_qmm::Skinny<::jax_qmm::DType::in, __VA_ARGS__>
