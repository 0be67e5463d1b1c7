// Scaled matrix products of 8-bit operands: all that the FFI handlers and the bindings see of this family.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <vector>

#include "core/gpu.h"
#include "core/launch.h"
#include "scaled_mm/problem.h"

namespace jax_qmm {

// What will run: an entry of the kernel table, or the kernel for any alignment when `instance` is -1.
struct ScaledMmChoice {
  int instance;
  int swizzle;  // side of the square of tiles that are computed together, for reuse in L2

  bool operator==(ScaledMmChoice const& other) const { return instance == other.instance && swizzle == other.swizzle; }
};

// Chooses a kernel on the host from the shape, the dtypes and the addresses' alignment; launches nothing. Choices on a
// device of this process are kept, so that only the first call for a shape takes microseconds.
ScaledMmChoice select_scaled_mm(ScaledMm const& problem, Gpu const& gpu);

// Whether a choice that was made for this product at other addresses serves it at these.
bool suits_alignment(ScaledMm const& problem, ScaledMmChoice choice);

// Everything that can serve the problem on the GPU, and a choice in words.
std::vector<ScaledMmChoice> scaled_mm_choices(ScaledMm const& problem, Gpu const& gpu);
std::string describe_scaled_mm(ScaledMmChoice choice);

// Bytes of workspace that a choice needs. Those that need more than the problem has are no choices.
int64_t workspace_of(ScaledMm const& problem, ScaledMmChoice choice);

// Throws std::invalid_argument where a choice is none of `scaled_mm_choices`.
void check_scaled_mm_choice(ScaledMm const& problem, ScaledMmChoice choice, Gpu const& gpu);

// The cost model
// --------------

// Of a kernel on a GPU.
struct ScaledMmCost {
  double k_tile, tile, full_tile;  // microseconds of one K tile in every SM, of a tile's end, of one with full epilogue
  double launch;                   // microseconds
  double reading;                  // time of the operands' and the result's bytes, against a copy's
};

// Gives GPUs of this model the cost of a kernel, which is in the words of `describe_scaled_mm` without the swizzle.
// Results of 4 bytes and of 1 have the costs of those of 2. Does nothing where this build has no such kernel; a kernel
// without a cost is not chosen unless it is tuned.
void set_scaled_mm_cost(Gpu const& gpu, DType in, std::string const& kernel, ScaledMmCost cost);

// The name of the GPU whose costs serve this one: its own, or else the first of its architecture that has any.
std::string scaled_mm_costs_of(Gpu const& gpu);

// What the cost model takes a kernel's time from.
struct ScaledMmTerms {
  double waves;    // rounds of tiles until all SMs are done
  double k_tiles;  // of each
  double copy_us;  // in which a copy reads and writes as many bytes as the operands and the result have
};

// None where `select_scaled_mm` never chooses this kernel or swizzle.
std::optional<ScaledMmTerms> scaled_mm_terms(ScaledMm const& problem, ScaledMmChoice choice, Gpu const& gpu);

// Microseconds that a choice takes by the cost model; infinite where `select_scaled_mm` never chooses it.
double predict_scaled_mm(ScaledMm const& problem, ScaledMmChoice choice, Gpu const& gpu);

// Measured choices
// ----------------

// Makes `select_scaled_mm` answer `choice` on GPUs of this model for problems of these dtypes, this N, K and batch, and
// an M of more than three quarters of this one's up to it, unless a smaller M is tuned or their addresses are not
// aligned as the kernel needs. Checks the choice.
void tune_scaled_mm(ScaledMm const& problem, ScaledMmChoice choice, Gpu const& gpu);

// The M of the tuned problem whose choice `select_scaled_mm` answers; none where it has none.
std::optional<int> tuned_scaled_mm(ScaledMm const& problem, Gpu const& gpu);
void clear_scaled_mm_tuning();

// Running
// -------

// Loads the kernels on the current device, and finds out which it can't run, which are not chosen from then on. Call it
// once per device, outside of stream capture.
cudaError_t prepare_scaled_mm();

// Submits the kernel, or the two, that compute the product on the current device. Empty outputs are legal, and need
// none.
cudaError_t launch_scaled_mm(ScaledMm const& problem, ScaledMmChoice choice, Gpu const& gpu, Submit const& submit);

}  // namespace jax_qmm
