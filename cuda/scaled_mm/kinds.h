// What the kernels of the table differ in, besides numbers.
#pragma once

namespace jax_qmm {

// Where sums are exact int32 or full float32, and where fp8 is summed in the tensor cores' narrow accumulator.
enum class Accum { kFast, kFull };

// CUTLASS' persistent blocks, whose two math warpgroups take turns at tiles or share one (gemm_sm90.h). Or a kernel of
// our own: skinny.h, one_tile_sm90.h, resident_sm90.h, gemm_sm80.h.
enum class Schedule { kPingpong, kCooperative, kSkinny, kOneTile, kResidentB, kMultistage };

}  // namespace jax_qmm
