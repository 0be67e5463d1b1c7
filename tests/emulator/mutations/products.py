"""Mutants of products of one scale a row (cuda/scaled_mm), and the tests that must notice them."""

from mutations.mutant import Mutant

EXACT = "tests/ops/test_scaled_mm_gpu.py::test_int8_is_exact_for_every_shape[{}]"
CHOICES = "tests/ops/test_scaled_mm_choices_gpu.py::test_every_choice_gives_the_same_int8_result[{}-bfloat16]"
RESIDENT = "tests/ops/test_scaled_mm_epilogue_gpu.py::test_rows_that_stream_past_resident_columns[{}]"
EIGHT_BITS = "tests/ops/test_scaled_mm_epilogue_gpu.py::test_8_bit_outputs_of_{}"
TESTS = {
    "8 bits": [
        EIGHT_BITS.format("odd_values[float32-1e-40-bounds4-int8-0]"),
        EIGHT_BITS.format("odd_values[float32-0.37-bounds0-int8-3]"),
        EIGHT_BITS.format("activations_are_off_by_one_step_at_most[silu-silu-0]"),
    ],
    "generic": [EXACT.format(shape) for shape in ((33, 65, 33), (33, 127, 515), (33, 64, 128))],
    "skinny": [CHOICES.format((7, 200, 4624))],
    "one tile": [CHOICES.format((7, 200, 4624)), CHOICES.format((130, 1544, 272))],
    "resident": [
        RESIDENT.format(of) for of in ("one step-64-of all", "many steps-128-of rows", "two rows as one-64-of rows")
    ],
    "multistage": [CHOICES.format((66, 267, 1048)), CHOICES.format((35, 130, 1044))],
    "gemm": [CHOICES.format((130, 1544, 272)), CHOICES.format((333, 392, 2064))],
}

GENERIC = "scaled_mm/generic.cu"
SKINNY = "scaled_mm/skinny.cu"
ONE_TILE = "scaled_mm/one_tile_sm90.cu"
EPILOGUE = "scaled_mm/epilogues_sm90.cuh"
MAIN_LOOP = "scaled_mm/multistage.cuh"
WRITE_TILE = "scaled_mm/write_tile.cuh"
MULTISTAGE = "scaled_mm/gemm_sm80.cuh"
OPERANDS = "scaled_mm/epilogue.cuh"
RESIDENT_B = "scaled_mm/resident.cuh"
RESIDENT_ROWS = "scaled_mm/resident_sm90.cu"
ADD_PARTS = "scaled_mm/split_k.cu"
MUTANTS = [
    Mutant(
        "generic: no barrier before a tile is stored", GENERIC, "    __syncthreads();\n    store_tile", "    store_tile"
    ),
    Mutant(
        "generic: no barrier after a tile is stored",
        GENERIC,
        "    store_tile(smem_b, words_b);\n    __syncthreads();",
        "    store_tile(smem_b, words_b);",
    ),
    Mutant("generic: one row too many is loaded", GENERIC, "if (row >= rows) continue;", "if (row > rows) continue;"),
    Mutant("generic: one byte too many of K", GENERIC, "if (column + j < k)", "if (column + j <= k)"),
    Mutant("generic: one row too many is written", GENERIC, "if (m >= p.m) continue;", "if (m > p.m) continue;"),
    Mutant("generic: one column too many is written", GENERIC, "if (n >= p.n) continue;", "if (n > p.n) continue;"),
    Mutant("generic: words of unaligned rows", GENERIC, "words ? 4 : 1", "4"),
    Mutant("skinny: no barrier before the sums", SKINNY, "  __syncthreads();\n  if (!writes)", "  if (!writes)"),
    Mutant("skinny: one column too many", SKINNY, "m < kSkinnyM && n < p.n", "m < kSkinnyM && n <= p.n"),
    Mutant("skinny: one row too many", SKINNY, "min(row, rows - 1)", "min(row, rows)"),
    Mutant("skinny: a step too many of K", SKINNY, "16 * member >= p.k) continue", "16 * member > p.k) continue"),
    Mutant(
        "multistage: no barrier before a stage is loaded from",
        MAIN_LOOP,
        "          wait_for_copies<C::kStages - 2>();\n          __syncthreads();",
        "          wait_for_copies<C::kStages - 2>();",
    ),
    Mutant(
        "multistage: a copy too few is waited for",
        MAIN_LOOP,
        "          wait_for_copies<C::kStages - 2>();\n          __syncthreads();",
        "          wait_for_copies<C::kStages - 1>();\n          __syncthreads();",
    ),
    Mutant("multistage: terms replace stages that are written to", MAIN_LOOP, "    wait_for_copies<0>();\n"),
    Mutant(
        "multistage: no barrier before other slices' sums are read",
        MULTISTAGE,
        "    __syncthreads();\n    if (at.slice > 0) return;",
        "    if (at.slice > 0) return;",
    ),
    Mutant(
        "multistage: rows of sums not waited for",
        WRITE_TILE,
        "    __syncwarp();\n#pragma unroll 1\n    for (int r",
        "#pragma unroll 1\n    for (int r",
    ),
    Mutant("multistage: one row too many is copied", MAIN_LOOP, "row < rows_ ? row", "row <= rows_ ? row"),
    Mutant("multistage: more of K than there is", MAIN_LOOP, "part < there);", "part <= there);"),
    Mutant(
        "multistage: one row too many is written",
        WRITE_TILE,
        "if (m >= p.m || n >= end_n)",
        "if (m > p.m || n >= end_n)",
    ),
    Mutant("multistage: columns beyond the matrix", WRITE_TILE, "if (n + v < end_n) to[v]", "to[v]"),
    Mutant("multistage: whole stores everywhere", MAIN_LOOP, "out % 16 == 0,", "true,"),
    Mutant("multistage: copies of 16 bytes everywhere", MAIN_LOOP, "in % 16 == 0  ? 16", "true  ? 16"),
    Mutant("multistage: parts of K overlap", MAIN_LOOP, "k_begin + p.k_of_part);", "k_begin + p.k_of_part + 32);"),
    Mutant(
        "multistage: rows beyond the partial sums",
        MULTISTAGE,
        "if (m >= p.m) continue;\n      auto* const row",
        "auto* const row",
    ),
    Mutant("multistage: columns beyond the partial sums", MULTISTAGE, "if (n < pitch) *", "*"),
    Mutant("multistage: one row too many is added up", ADD_PARTS, "if (row >= p.rows ||", "if (row > p.rows ||"),
    Mutant("multistage: columns beyond the matrix are added up", ADD_PARTS, "if (n + v < p.n) to[v]", "to[v]"),
    Mutant("8 bits: quickly by every scale", OPERANDS, " && divisor.factor == 1", ""),
    Mutant("8 bits: quickly without a zero point", OPERANDS, " && zero_point == 0", ""),
    Mutant("8 bits: quickly without a curve", OPERANDS, "= !is_curve && zero", "= zero"),
    Mutant("resident: no wait for loads", RESIDENT_B, "      Full::wait(&shared.full[group][stage], phase);\n"),
    Mutant("resident: the phase stays", RESIDENT_B, "stage = 0, phase ^= 1;", "stage = 0;"),
    Mutant("resident: wrong parity of empty", RESIDENT_B, "(turn - 1) & 1", "turn & 1"),
    Mutant(
        "resident: stages are loaded before they are empty",
        RESIDENT_B,
        "if (turn > 0) Empty::wait",
        "if (false) Empty::wait",
    ),
    Mutant(
        "resident: stages are released a step early",
        RESIDENT_B,
        "      if (i > 0) release(before);\n      before = stage;\n",
        "      before = stage;\n      if (i > 0) release(before);\n",
    ),
    Mutant("resident: no fence of b", RESIDENT_B, "  cutlass::arch::fence_view_async_shared();\n"),
    Mutant("resident: no wait for b", RESIDENT_B, "  wait_for_copies<0>();\n"),
    Mutant("resident: no wait for products", RESIDENT_B, "    warpgroup_wait<0>();\n"),
    Mutant("resident: rows beyond the matrix", RESIDENT_B, "      if (m >= p.m) break;\n"),
    Mutant("resident: columns beyond the matrix", RESIDENT_B, "    if (n >= p.n) continue;\n"),
    Mutant("resident: scales of the first joined row", RESIDENT_B, " * p.joined + row_of_joined));", " * p.joined));"),
    Mutant(
        "resident: zero points of the first joined row",
        RESIDENT_B,
        "int const row = m * p.joined + row_of_joined;",
        "int const row = m * p.joined;",
    ),
    Mutant(
        "resident: b also left of its block", RESIDENT_ROWS, "return 0 <= column && column < k;", "return column < k;"
    ),
    Mutant("resident: bias of other columns", RESIDENT_B, "(first_n + i) % p.columns", "first_n + i"),
    Mutant("one tile: no wait for loads", ONE_TILE, "      Full::wait(&smem.full[stage], phase);\n"),
    Mutant(
        "one tile: a stage released while it is multiplied",
        ONE_TILE,
        "if (before >= 0 && i - 1 + kStages < end) release(before);",
        "if (i + kStages < end) release(stage);",
    ),
    Mutant("one tile: no wait for products", ONE_TILE, "warpgroup_wait<1>();", "warpgroup_wait<7>();"),
    Mutant("one tile: sums used before the last wait", ONE_TILE, "    warpgroup_wait<0>();\n"),
    Mutant(
        "one tile: no barrier before partial sums replace stages",
        ONE_TILE,
        "that the whole cluster must be done.\n  __syncthreads();",
        "that the whole cluster must be done.\n",
    ),
    Mutant(
        "one tile: too few bytes are expected", ONE_TILE, "kShared * rows * kTileK);", "kShared * rows * kTileK / 2);"
    ),
    Mutant(
        "one tile: an arrival too many is expected", ONE_TILE, "kSenders * kMathWarps);", "kSenders * kMathWarps + 1);"
    ),
    Mutant("one tile: wrong parity of empty", ONE_TILE, "(turn - 1) & 1", "turn & 1"),
    Mutant("one tile: no barrier before sums are read", ONE_TILE, "  if constexpr (kSplit == 1) __syncthreads();\n"),
    Mutant("one tile: split-K sums read before they arrive", ONE_TILE, "    Full::wait(&smem.added, 0);\n"),
    Mutant(
        "one tile: rows beyond the matrix are written",
        ONE_TILE,
        "min(kShare, min(p.tile_m, p.m - first_m) - first_row)",
        "min(kShare, p.tile_m - first_row)",
    ),
    Mutant("one tile: columns beyond the matrix", ONE_TILE, "|| first_n + column >= p.n) return", ") return"),
    Mutant(
        "one tile: cluster not in step before sums are sent",
        ONE_TILE,
        "kN * sizeof(Accumulator));\n    sync_cluster();",
        "kN * sizeof(Accumulator));",
    ),
    Mutant(
        "one tile: no fence of the mbarriers' initialization", ONE_TILE, "      cutlass::arch::fence_barrier_init();\n"
    ),
    Mutant("one tile: no fence of wgmma", ONE_TILE, "      warpgroup_arrive();\n"),
    Mutant("gemm: one value too many of a vector", EPILOGUE, "i + thread, end - 1);", "i + thread, end);"),
    Mutant(
        "gemm: more values stored than shared memory has room for",
        EPILOGUE,
        "kSize % Threads == 0 || at < kSize",
        "true",
    ),
    Mutant("gemm: terms are read before they come", EPILOGUE, "      wait_for_copies<0>();\n"),
    Mutant(
        "gemm: no barrier before vectors are read",
        EPILOGUE,
        "sync_needed() const { return !ByLoadWarp;",
        "sync_needed() const { return false;",
    ),
    Mutant("gemm: one slot for the vectors of two tiles", EPILOGUE, "kSlots = ByLoadWarp ? 2 : 1", "kSlots = 1"),
]
