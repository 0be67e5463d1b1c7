"""Mutants of the quantizers (cuda/quantize), and the tests that must notice them."""

from mutations.mutant import Mutant

SUMS = "tests/ops/test_quantize_gpu.py::test_sums_of_what_shares_a_scale[float32-{}]"
ROWS = "tests/ops/test_quantize_gpu.py::test_every_row_length[float32-{}]"
TESTS = {
    "quantize": [*(ROWS.format(cols) for cols in (64, 100, 1000, 4096, 8200)), SUMS.format(64), SUMS.format(8200)],
}

QUANTIZE = "quantize/kernels.cuh"
MUTANTS = [
    Mutant(
        "quantize: one chunk too many is loaded",
        QUANTIZE,
        "if (i < count) chunks[j].load(x + f",
        "chunks[j].load(x + f",
    ),
    Mutant("quantize: one chunk too many is stored", QUANTIZE, "if (i >= count) break;", "if (i > count) break;"),
    Mutant(
        "quantize: a short row too many is loaded",
        QUANTIZE,
        "if (row_of(i) < rows) chunks[i][j].load(",
        "chunks[i][j].load(",
    ),
    Mutant(
        "quantize: a short row too many is stored",
        QUANTIZE,
        "bool const is_there = row < rows,",
        "bool const is_there = true,",
    ),
    Mutant("quantize: the sum of a part of a short row", QUANTIZE, "sum += store<kind, true", "sum = store<kind, true"),
    Mutant(
        "quantize: the range of a part of a short row",
        QUANTIZE,
        "= lanes / 2; apart > 0; apart /= 2) {",
        "= lanes / 4; apart > 0; apart /= 2) {",
    ),
    Mutant("quantize: one row too many", QUANTIZE, "if (row >= rows) return;", "if (row > rows) return;"),
    Mutant(
        "quantize: no barrier in the reduction", QUANTIZE, "    __syncthreads();\n    range = lane", "    range = lane"
    ),
    Mutant(
        "quantize: idle warps' ranges too", QUANTIZE, "lane < blockDim.x / 32 ? warps[lane] : Range{}", "warps[lane]"
    ),
    Mutant("quantize: a row's sum is not cleared", QUANTIZE, "if (threadIdx.x == 0) sums.of_rows[row] = 0;"),
    Mutant(
        "quantize: the sum of one warp",
        QUANTIZE,
        "if (threadIdx.x % 32 == 0) atomicAdd",
        "if (threadIdx.x == 0) atomicAdd",
    ),
    Mutant("quantize: one sum too many is cleared", QUANTIZE, "if (row < rows) of_rows", "if (row <= rows) of_rows"),
]
