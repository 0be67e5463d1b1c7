"""Breaks the kernels, one place at a time, and says whether the GPU tests on the emulator notice, and by what.

    python tests/emulator/mutants.py [PART OF A NAME ...]

Works on a copy of the sources in build/emulator/mutants, where each mutant compiles only what it changes, for a minute.
Ends with 1 if a mutant that must be noticed is not, or if the tests of the unchanged kernels fail.
"""

import dataclasses
import os
import re
import subprocess
import sys

from build import BUILD, ROOT, build

COPY = BUILD / "mutants"
# A few kernels, so that compiling a mutant is quick: of each family those that have all its parts.
KERNELS = """
GEMM(kS8, kFull, 2, 128, 128, 128, 2, 1, kPingpong, false)
GEMM(kS8, kFull, 2, 256, 128, 128, 1, 2, kCooperative, false)
SKINNY(kS8, 2, 16, 2, 2)
MULTISTAGE(kS8, kFull, 16, 64, 128, 1, 2, 2, 6)
MULTISTAGE(kS8, kFull, 128, 128, 64, 2, 2, 1, 3)
ONE_TILE(kS8, 2, 64, 16, 256, 1, 1, 1, 1, false)
ONE_TILE(kS8, 2, 128, 128, 128, 2, 1, 1, 1, false)
ONE_TILE(kS8, 2, 64, 32, 128, 1, 1, 6, 1, true)
RESIDENT_B(64)
RESIDENT_B(128)
"""
EXACT = "tests/ops/test_scaled_mm_gpu.py::test_int8_is_exact_for_every_shape[{}]"
CHOICES = "tests/ops/test_scaled_mm_choices_gpu.py::test_every_choice_gives_the_same_int8_result[{}-bfloat16]"
SUMS = "tests/ops/test_quantize_gpu.py::test_sums_of_what_shares_a_scale[float32-8200]"
ROWS = "tests/ops/test_quantize_gpu.py::test_every_row_length[float32-{}]"
BLOCKS = "tests/ops/test_block_scaled_mm_gpu.py::{}"
BLOCKS_SM90 = "tests/ops/test_block_scaled_mm_sm90_gpu.py::{}"
BOTH_SIDES = "tests/ops/test_block_quantized_mm_gpu.py::{}"
OF_FLOATS = "tests/ops/test_block_quantized_mm_floats_gpu.py::{}"
EXPANDED = "tests/ops/test_expanded_mm_gpu.py::{}"
CONVS = "tests/ops/test_conv_gpu.py::{}"
WEIGHTS_OF_WINDOWS = "tests/ops/test_weight_only_conv_gpu.py::{}"
RESIDENT = "tests/ops/test_scaled_mm_epilogue_gpu.py::test_rows_that_stream_past_resident_columns[{}]"
EIGHT_BITS = "tests/ops/test_scaled_mm_epilogue_gpu.py::test_8_bit_outputs_of_{}"
TESTS = {
    "8 bits": [
        EIGHT_BITS.format("odd_values[float32-1e-40-bounds4-int8-0]"),
        EIGHT_BITS.format("odd_values[float32-0.37-bounds0-int8-3]"),
        EIGHT_BITS.format("activations_are_off_by_one_step_at_most[silu-silu-0]"),
    ],
    "block scaled": [
        BLOCKS.format("test_rows_around_the_tiles[9-4]"),
        BLOCKS.format("test_blocks_and_zero_points[16-int8-bfloat16-4]"),
    ],
    "direct": [
        BLOCKS.format("TestDirect::test_steps[8-35-5200-128-int8-bfloat16-4]"),
        BLOCKS.format("TestDirect::test_steps[1-33-129-16-int8-bfloat16-4]"),
        BLOCKS.format("TestDirect::test_blocks_stay_for_several_tiles[1-1100-bfloat16-4]"),
        BLOCKS.format("TestDirect::test_blocks_stay_for_several_tiles[5-777-bfloat16-4]"),
    ],
    "weights by wgmma": [
        BLOCKS_SM90.format("test_shapes_and_blocks[1-129-520-256-int8-bfloat16-4]"),
        BLOCKS_SM90.format("test_shapes_and_blocks[130-140-1416-320-none-bfloat16-4]"),
    ],
    "weights of streams": [
        BLOCKS_SM90.format("test_blocks_stay_and_share_tiles[257-264-392-128-batch1-float16-bfloat16-4]"),
        BLOCKS_SM90.format("test_blocks_stay_and_share_tiles[300-136-1416-64-batch0-bfloat16-bfloat16-4]"),
        BLOCKS_SM90.format("test_blocks_stay_and_share_tiles[64-520-1288-320-batch2-bfloat16-bfloat16-4]"),
        BLOCKS_SM90.format("test_blocks_stay_and_share_tiles[48-72-4232-384-batch3-bfloat16-bfloat16-4]"),
    ],
    "weights of windows": [
        WEIGHTS_OF_WINDOWS.format(f"test_windows_by_wgmma[{tile}-bfloat16-4-{name}]")
        for tile, name in (
            ("64x128x128", "strides and dilation"),
            ("128x128x128", "steps of several taps, beyond the last"),
            ("256x128x128 cluster 2", "several images"),
        )
    ],
    "weights in int8": [
        EXPANDED.format(
            f"test_persistent_blocks[{sizes}-True-bfloat16-sm90 wgmma 256x128x128 cluster 2 persistent int4]"
        )
        for sizes in ("1-300-136-1440-96", "2-257-264-416-64")
    ],
    "weights in fp8": [
        BLOCKS_SM90.format("test_shapes_and_blocks[1-129-520-256-int8-float8_e4m3fn-4]"),
        BLOCKS_SM90.format("test_shapes_and_blocks[130-140-1416-320-none-float8_e4m3fn-4]"),
    ],
    "blocks by wgmma": [
        BOTH_SIDES.format("test_several_tiles_of_wgmma[64x64x128]"),
        BOTH_SIDES.format("test_rows_of_whole_sixteens[wgmma 16x64x128-35-9-1424-128]"),
        BOTH_SIDES.format("test_batches_bias_and_activation_of_whole_sixteens[wgmma 64x64x128]"),
        BOTH_SIDES.format("test_parts_of_k_of_float8[128-3088-32x64x128]"),
        BOTH_SIDES.format("test_parts_of_k_of_float8_are_added_once"),
    ],
    "blocks that stay": [
        BOTH_SIDES.format("test_blocks_that_stay[208-64-None-None]"),
        BOTH_SIDES.format("test_blocks_that_stay[1040-128-int-None]"),
        BOTH_SIDES.format("test_blocks_that_stay[1808-256-int-int]"),
        BOTH_SIDES.format("test_wgmma_with_one_scale_of_b[700-384-272-cluster 2 persistent float8_e4m3fn]"),
        BOTH_SIDES.format("test_persistent_blocks_that_share_k[2-batch0-150-128-2064-128]"),
        BOTH_SIDES.format("test_persistent_blocks_that_share_k[3-batch2-65-256-2560-1]"),
    ],
    "blocks of few rows": [
        BOTH_SIDES.format("test_rows_of_whole_sixteens[few rows 8x16x512-5-33-4176-64]"),
        BOTH_SIDES.format("test_rows_of_whole_sixteens[few rows 16x32x1024-19-70-304-64]"),
        BOTH_SIDES.format("test_zero_points_of_whole_sixteens[few rows 8x32x2048-int-float32-256]"),
    ],
    "quantizing few rows": [
        OF_FLOATS.format("test_is_the_reference[bfloat16-9-70-5136-256-8x32x1024]"),
        OF_FLOATS.format("test_zero_points[False-False-128-16x32x1024]"),
    ],
    "quantize": [*(ROWS.format(cols) for cols in (64, 100, 1000, 4096, 8200)), SUMS],
    "generic": [EXACT.format(shape) for shape in ((33, 65, 33), (33, 127, 515), (33, 64, 128))],
    "skinny": [CHOICES.format((7, 200, 4624))],
    "one tile": [CHOICES.format((7, 200, 4624)), CHOICES.format((130, 1544, 272))],
    "resident": [
        RESIDENT.format(of) for of in ("one step-64-of all", "many steps-128-of rows", "two rows as one-64-of rows")
    ],
    "multistage": [CHOICES.format((66, 267, 1048)), CHOICES.format((35, 130, 1044))],
    "conv": [
        *(
            CONVS.format(f"test_sums[64x64x64-zero points-{name}]")
            for name in ("groups", "two axes", "copies of 4 bytes")
        ),
        CONVS.format("test_groups_end_within_whole_stores[64x64x64-int8]"),
        CONVS.format("test_residuals[64x64x64-1-int8 with a zero point-19-int8]"),
        CONVS.format("test_batches_with_residuals[(0, None, 0)]"),
    ],
    "conv by wgmma": [
        *(
            CONVS.format(f"test_sums[wgmma {tile}-zero points-{name}]")
            for tile, name in (
                *(("128x64x64", "groups"), ("128x64x64", "asymmetric padding")),
                *(("128x64x128 cluster 2", "many pixels"), ("128x256x128", "many pixels")),
            )
        ),
        CONVS.format("test_parts_of_k[channels of several stages-wgmma 128x64x128 split-K 4]"),
    ],
    "short windows": [
        *(
            CONVS.format(f"test_sums_of_short_windows[(127, None)-{name}-windows of {size} bytes]")
            for name, size in (
                *(("7x7 stride 2", 224), ("asymmetric padding", 64), ("cut", 64), ("one axis", 64)),
                *(("several turns", 64), ("pieces of 4 bytes", 64)),
            )
        ),
        CONVS.format("test_outputs_of_short_windows[35-relu-int8-windows of 64 bytes]"),
    ],
    "depthwise": [CONVS.format(f"test_sums_of_each_channel[(127, None)-{count} channels]") for count in (20, 48, 148)],
    "squares": [
        CONVS.format(f"test_sums_of_squares[(127, None)-{name}]")
        for name in (
            "3x3, 148 channels",
            "3x3, several tiles of a thread",
            "3x3 stride 2, uneven",
            "5x5",
            "7x7, small image",
        )
    ],
    "expanded": [
        EXPANDED.format(f"test_shapes[{name}-1-9-33-2080-64-True]")
        for name in (
            "sm80 few rows 32x32x512 int4",
            "sm80 multistage 64x64x128 int4",
            "sm90 wgmma 128x64x128 split-K 2 int4",
            "sm90 wgmma 256x128x128 int4",
        )
    ],
    "gemm": [CHOICES.format((130, 1544, 272)), CHOICES.format((333, 392, 2064))],
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old` becomes `new`, once, in a file of cuda/. Its name begins with its family."""

    name: str
    file: str
    old: str
    new: str = ""
    noticed: bool = True

    @property
    def family(self):
        return self.name.partition(":")[0]


GENERIC, SKINNY, ONE_TILE = (f"scaled_mm/{name}.cu" for name in ("generic", "skinny", "one_tile_sm90"))
QUANTIZE, EPILOGUE, CONV = "quantize/kernels.cuh", "scaled_mm/epilogues_sm90.cuh", "conv/implicit_gemm.cu"
WINDOWS, DEPTHWISE, SQUARES = (f"conv/{name}.cu" for name in ("wgmma_sm90", "depthwise", "depthwise_square"))
SHORT_WINDOWS, RESIDUAL = "conv/short_window.cu", "conv/residual.cuh"
MAIN_LOOP, WRITE_TILE, MULTISTAGE = (f"scaled_mm/{name}.cuh" for name in ("multistage", "write_tile", "gemm_sm80"))
WRITE_ROWS, OPERANDS = "scaled_mm/write_rows.cuh", "scaled_mm/epilogue.cuh"
RESIDENT_B, RESIDENT_ROWS = "scaled_mm/resident.cuh", "scaled_mm/resident_sm90.cu"
ADD_PARTS = "scaled_mm/split_k.cu"
WEIGHTS, STREAMS, LAUNCH, WINDOWS_OF_WEIGHTS = (
    f"block_scaled_mm/{name}_sm90.cuh" for name in ("wgmma", "streams", "launch", "windows")
)
EXPANSION, FEW_ROWS = "expanded_mm/expansion.cuh", "expanded_mm/few_rows.cu"
FP8_WEIGHTS, INT8_WEIGHTS = (f"block_scaled_mm/dequantize_{name}.cuh" for name in ("fp8", "int8"))
EXPANDED_WGMMA = "expanded_mm/wgmma_sm90.cu"
WGMMA_OF_BLOCKS, STAGES_OF_BLOCKS, FEW_ROWS_OF_BLOCKS, QUANTIZE_ROWS = (
    f"block_quantized_mm/{name}.cuh" for name in ("wgmma_sm90", "stages_sm90", "few_rows", "quantize_rows")
)
BLOCKS_THAT_STAY, TERMS_OF_BLOCKS, PARTS_OF_BLOCKS = (
    f"block_quantized_mm/{name}_sm90.cuh" for name in ("persistent", "terms", "parts")
)
BLOCK_SCALED, BLOCK_STEP, BLOCK_SOURCES, DEQUANTIZE, DIRECT = (
    f"block_scaled_mm/{name}.cuh" for name in ("kernel", "step", "sources", "dequantize", "direct")
)
MUTANTS = [
    Mutant(
        "block scaled: no barrier before x is read",
        BLOCK_SCALED,
        "    wait_for_copies<C::kStages - 2>();\n    __syncthreads();\n",
        "    wait_for_copies<C::kStages - 2>();\n",
    ),
    Mutant(
        "block scaled: waits one group too few",
        BLOCK_SCALED,
        "    wait_for_copies<C::kStages - 2>();\n    __syncthreads();\n",
        "    wait_for_copies<C::kStages - 1>();\n    __syncthreads();\n",
    ),
    Mutant(
        "block scaled: no barrier before the parts",
        BLOCK_SCALED,
        "  wait_for_copies<0>();\n  __syncthreads();\n",
        "  wait_for_copies<0>();\n",
    ),
    Mutant(
        "block scaled: rows of weights beyond N",
        BLOCK_SOURCES,
        "min(16 * i + 8 * h + row, p.n - 1 - first_n)",
        "16 * i + 8 * h + row",
    ),
    Mutant("block scaled: columns of weights beyond K", BLOCK_SOURCES, "if (more()) {", "if (true) {"),
    Mutant(
        "block scaled: scales beyond K",
        BLOCK_SOURCES,
        "there ? __umulhi(2 * unit, p_.block_inverse) : 0",
        "__umulhi(2 * unit, p_.block_inverse)",
    ),
    Mutant(
        "block scaled: rows of x beyond M",
        BLOCK_SOURCES,
        "if (row >= min(rows_, C::kTileM)) break;\n        auto",
        "if (row >= C::kTileM) break;\n        auto",
    ),
    Mutant("block scaled: rows of x that are not there stay as they are", BLOCK_SCALED, "  x.clear(stages);\n"),
    Mutant(
        "block scaled: terms of the wrong unit",
        BLOCK_STEP,
        "(threadIdx.x & 28) + unit % 4",
        "(threadIdx.x & 28) + (unit + 1) % 4",
    ),
    Mutant(
        "block scaled: zero point one off",
        DEQUANTIZE,
        "zero * 0x10001 + 0xbf00bf00",
        "(zero + 1) * 0x10001 + 0xbf00bf00",
    ),
    Mutant("direct: waits one group too few", DIRECT, "wait_for_copies<1>();", "wait_for_copies<2>();"),
    Mutant(
        "direct: lanes copy over what others still read",
        DIRECT,
        "  __device__ void release() {\n    __syncwarp();\n",
        "  __device__ void release() {\n",
        noticed=False,  # loads before stores, by lanes of a warp
    ),
    Mutant(
        "direct: lanes read what others have yet to wait for",
        DIRECT,
        "make_terms();\n    __syncwarp();\n",
        "make_terms();\n",
    ),
    Mutant(
        "direct: sums are overwritten before they are added", DIRECT, "    if (n > first_n) __syncthreads();", "   "
    ),
    Mutant(
        "direct: the next tile's weights are this one's", DIRECT, "if (first_n_ < end_n_) start();", "column_ = begin_;"
    ),
    Mutant(
        "direct: rows of weights beyond N",
        DIRECT,
        "min(first_n_ + 16 * i + 8 * h + lane / 4, end_n_ - 1)",
        "first_n_ + 16 * i + 8 * h + lane / 4",
    ),
    Mutant(
        "direct: scales beyond K",
        DIRECT,
        "bool const inside = u == 0 || column < end_",
        "bool const inside = true",
        noticed=False,  # those of the next row, which meet zeros of x
    ),
    Mutant("direct: all bytes of a scale's word", DIRECT, "inside ? before + bytes : 0", "4"),
    Mutant("direct: a scale is at the beginning of its word", DIRECT, " >> (where >> bit) % 4 * 8", ""),
    Mutant("direct: x that stays of one step", DIRECT, "(is_first_) {", "(is_first_ && step_ == 0) {"),
    Mutant("direct: x that stays is all in one place", DIRECT, "copy_x(step_ * x_bytes_)", "copy_x(0)"),
    Mutant("direct: rows of x beyond M", DIRECT, "row < p_.m; row", "row < C::kTileM; row"),
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
        "if (i < count) chunks[j].load(x + i",
        "chunks[j].load(x + i",
    ),
    Mutant(
        "quantize: a short row too many is stored",
        QUANTIZE,
        "bool const is_there = i < count,",
        "bool const is_there = true,",
    ),
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
    Mutant(
        "quantize: no barrier in the sums' reduction",
        QUANTIZE,
        "    __syncthreads();\n    sum = sum_of",
        "    sum = sum_of",
    ),
    Mutant("quantize: one sum too many is cleared", QUANTIZE, "if (row < rows) of_rows", "if (row <= rows) of_rows"),
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
    Mutant("8 bits: quickly without a curve", OPERANDS, " && !is_curve", ""),
    Mutant("conv: a line beyond the image", "conv/window.cuh", "unsigned(y) < image[1]", "unsigned(y) <= image[1]"),
    Mutant("conv: one pixel too many", CONV, "row < p.product.m ? row", "row <= p.product.m ? row"),
    Mutant("conv: the zero point of another image", CONV, "zero_point.load(at.l, image)", "zero_point.load(at.l, 0)"),
    Mutant("conv: columns of the next group", CONV, "(group + 1) * p.columns_of_group", "p.product.n"),
    Mutant("conv: whole stores over the ends of groups", CONV, "uintptr_t(columns)", "uintptr_t(problem.n)"),
    Mutant("conv: copies of 16 bytes over the ends of taps", CONV, "in % 16 == 0 ? 16", "true ? 16"),
    Mutant(
        "conv: terms replace stages that are read",
        CONV,
        "  __syncthreads();  // the epilogue's terms take the place of the stages\n",
    ),
    Mutant("conv: whole loads of residuals everywhere", RESIDUAL, "if (loads_whole && there >= N)", "if (true)"),
    Mutant("conv: residuals without their zero point", RESIDUAL, "float(value - zero_point)", "float(value)"),
    Mutant("conv: residuals of the first entry", RESIDUAL, "data) + l * batch_stride", "data) + 0 * batch_stride"),
    Mutant("conv: no barrier before the terms are read", CONV, "  __syncthreads();\n  sm80::write", "  sm80::write"),
    Mutant(
        "short windows: a line beyond the image", SHORT_WINDOWS, "unsigned(y) < unsigned", "unsigned(y) <= unsigned"
    ),
    Mutant(
        "short windows: no barrier",
        SHORT_WINDOWS,
        "    __syncthreads();  // all have copied this part, and are done with the other\n",
    ),
    Mutant("short windows: no wait for copies", SHORT_WINDOWS, "    wait_for_copies<0>();\n"),
    Mutant("short windows: one part of images", SHORT_WINDOWS, "copy_tile(tile, turn ^ 1)", "copy_tile(tile, turn)"),
    Mutant("short windows: weights beyond the last tap", SHORT_WINDOWS, "there && n < p.n ?", "n < p.n ?"),
    Mutant("short windows: weights beyond the last channel", SHORT_WINDOWS, "there && n < p.n ?", "there ?"),
    Mutant("short windows: channels beyond the last", SHORT_WINDOWS, "|| n >= p.n) continue", ") continue"),
    Mutant(
        "short windows: pixels right of the last", SHORT_WINDOWS, "x >= p.pixels_across ||", "x > p.pixels_across ||"
    ),
    Mutant("short windows: lines below the last", SHORT_WINDOWS, " && at.y + y < p.pixels_down", ""),
    Mutant(
        "short windows: pieces begin at the first window",
        SHORT_WINDOWS,
        "words_of_pixel + part.shift",
        "words_of_pixel",
    ),
    Mutant("short windows: whole stores everywhere", SHORT_WINDOWS, "if (p.stores_whole)", "if (true)"),
    Mutant(
        "depthwise: a line beyond the image", "conv/window.cuh", "unsigned(y) < image[1]", "unsigned(y) <= image[1]"
    ),
    Mutant("depthwise: one pixel too many", DEPTHWISE, "if (m >= p.m) return;", "if (m > p.m) return;"),
    Mutant("depthwise: channels beyond the last", DEPTHWISE, " || first_channel >= p.n) return", ") return"),
    Mutant("depthwise: weights beyond the last tap", DEPTHWISE, "tap < p.taps && first", "first"),
    Mutant("depthwise: no barrier before what is shared is read", DEPTHWISE, "  __syncthreads();\n"),
    Mutant("depthwise: 16 channels everywhere", DEPTHWISE, "uintptr_t(p.n)) %", "0) %"),
    Mutant("squares: a thread too many", SQUARES, "if (first_tile >= p.tiles)", "if (first_tile > p.tiles)"),
    Mutant("squares: a tile too many of a thread", SQUARES, " || next >= p.tiles", " || next > p.tiles"),
    Mutant("squares: results where the next tile is", SQUARES, "(present.image *", "(at.image *"),
    Mutant("squares: channels beyond the last", SQUARES, " || first_channel >= p.n) return", ") return"),
    Mutant("squares: no barrier before what is shared is read", SQUARES, "  __syncthreads();\n"),
    Mutant("squares: pixels right of the image", SQUARES, "? has_lines : 0", "? has_lines : has_lines"),
    Mutant(
        "squares: lines below the image",
        SQUARES,
        "min(max(at.top + min(y, C::kLines - 1), 0), p.height - 1)",
        "max(at.top + min(y, C::kLines - 1), 0)",
    ),
    Mutant(
        "squares: results right of the last",
        SQUARES,
        "present.x + x < p.pixels_across",
        "present.x + x <= p.pixels_across",
    ),
    Mutant("squares: weights of the line above", SQUARES, "4 * w + i - q * C::kStride", "4 * w + i"),
    Mutant("conv by wgmma: no wait for borders", WINDOWS, "has_borders ? shared.bordered : shared", "shared"),
    Mutant("conv by wgmma: borders without a fence", WINDOWS, "    cutlass::arch::fence_view_async_shared();\n"),
    Mutant(
        "conv by wgmma: columns of the next group", WINDOWS, "end_n = (group + 1) * p.columns_of_group", "end_n = p.n"
    ),
    Mutant("conv by wgmma: channels of another group", WINDOWS, "group * p.channels + chunk", "chunk"),
    Mutant(
        "conv by wgmma: every part of K has its beginning",
        WINDOWS,
        "begin = steps * parts.own / parts.count",
        "begin = 0",
    ),
    Mutant(
        "conv by wgmma: a stage released while it is multiplied", WINDOWS, "shared.empty[before]", "shared.empty[stage]"
    ),
    Mutant("conv by wgmma: shared weights of the first rows", WINDOWS, "first_n + first_b, entry", "first_n, entry"),
    Mutant("conv by wgmma: sums of one part", WRITE_ROWS, "part < parts.count; ++part", "part < 1; ++part"),
    Mutant(
        "blocks by wgmma: no wait for loads",
        WGMMA_OF_BLOCKS,
        "      if (half == 0) Full::wait(&shared.full[stage.at], stage.turn & 1);\n",
    ),
    Mutant("blocks by wgmma: no wait for products", WGMMA_OF_BLOCKS, "    warpgroup_wait<1>();\n"),
    Mutant(
        "blocks by wgmma: a stage released while it is multiplied",
        WGMMA_OF_BLOCKS,
        "    warpgroup_wait<1>();\n    if (ended) release();\n",
        "    if (ended) release();\n    warpgroup_wait<1>();\n",
    ),
    Mutant(
        "blocks by wgmma: terms are not waited for",
        WGMMA_OF_BLOCKS,
        "        Empty::wait(&shared.terms_full[slot.at], slot.turn & 1);\n",
    ),
    Mutant(
        "blocks by wgmma: terms replace others that are needed",
        WGMMA_OF_BLOCKS,
        "      if (slot.turn > 0) Empty::wait(&shared.terms_empty[slot.at], (slot.turn - 1) & 1);\n",
    ),
    Mutant("blocks by wgmma: terms behind the last block", WGMMA_OF_BLOCKS, "has_data && j < there", "has_data"),
    Mutant(
        "blocks by wgmma: four terms at once everywhere", STAGES_OF_BLOCKS, "p.groups() % kBlocksOfSlot == 0 && ", ""
    ),
    Mutant(
        "blocks by wgmma: terms of rows beyond the last",
        WGMMA_OF_BLOCKS,
        "is_there = row < side.rows;",
        "is_there = true;",
    ),
    Mutant(
        "blocks by wgmma: too few bytes are expected",
        WGMMA_OF_BLOCKS,
        "(kDown + p.box_rows) * kStep",
        "kDown * kStep",
    ),
    Mutant("blocks by wgmma: whole stores everywhere", WGMMA_OF_BLOCKS, "problem.stores_whole()", "true"),
    Mutant("blocks by wgmma: parts are sent to stages in use", WGMMA_OF_BLOCKS, "    sync_cluster();"),
    Mutant("blocks by wgmma: parts are added before they come", WGMMA_OF_BLOCKS, "    Full::wait(&shared.added, 0);\n"),
    Mutant(
        "blocks by wgmma: the last part misses a slot",
        PARTS_OF_BLOCKS,
        "all_slots * (part + 1) / parts",
        "all_slots / parts * (part + 1)",
    ),
    Mutant(
        "blocks by wgmma: a block of 64 in the wrong half",
        WGMMA_OF_BLOCKS,
        "kEndsWithinStage ? 2 * half",
        "kEndsWithinStage ? 0",
    ),
    Mutant(
        "blocks that stay: no wait for loads",
        BLOCKS_THAT_STAY,
        "      if (half == 0) Full::wait(&shared.full[stage.at], stage.turn & 1);\n",
    ),
    Mutant("blocks that stay: no wait for products", BLOCKS_THAT_STAY, "    warpgroup_wait<1>();\n"),
    Mutant(
        "blocks that stay: a stage released while it is multiplied",
        BLOCKS_THAT_STAY,
        "    warpgroup_wait<1>();\n    if (ended) release();\n",
        "    if (ended) release();\n    warpgroup_wait<1>();\n",
    ),
    Mutant(
        "blocks that stay: stages of the last turn are released",
        BLOCKS_THAT_STAY,
        "loaded_again > 0 && lane",
        "lane",
        noticed=False,  # the other block still writes its results
    ),
    Mutant(
        "blocks that stay: a part of K releases another's stages",
        BLOCKS_THAT_STAY,
        "kShare > 1 ? lane : part",
        "kShare > 1 ? lane : 0",
    ),
    Mutant(
        "blocks that stay: parts are sent to stages in use",
        PARTS_OF_BLOCKS,
        "    sync_cluster();  // other blocks may be at their stages\n",
    ),
    Mutant("blocks that stay: parts are added before they come", PARTS_OF_BLOCKS, "    sync_stores_of_cluster();\n"),
    Mutant(
        "blocks that stay: the last part misses a slot",
        PARTS_OF_BLOCKS,
        "all_slots * (part + 1) / parts",
        "all_slots / parts * (part + 1)",
    ),
    Mutant(
        "blocks that stay: a quarter of a tile is another part's",
        PARTS_OF_BLOCKS,
        "return owner(group, half) == part;",
        "return owner(group, 0) == part;",
    ),
    Mutant(
        "blocks that stay: the last stages of a tile are not released",
        BLOCKS_THAT_STAY,
        "    warpgroup_wait<0>();\n    release();\n",
        "    warpgroup_wait<0>();\n",
    ),
    Mutant(
        "blocks that stay: terms are not waited for",
        BLOCKS_THAT_STAY,
        "      Empty::wait(&shared.terms_full[slot.at], slot.turn & 1);\n",
    ),
    Mutant(
        "blocks that stay: terms replace others that are needed",
        BLOCKS_THAT_STAY,
        "        if (slot.turn > 0) Empty::wait(&shared.terms_empty[slot.at], (slot.turn - 1) & 1);\n",
    ),
    Mutant("blocks that stay: terms behind the last block", TERMS_OF_BLOCKS, " || j >= there", ""),
    Mutant("blocks that stay: four terms at once everywhere", BLOCKS_THAT_STAY, "= has_fours(problem)", "= true"),
    Mutant("blocks that stay: terms of rows beyond the last", TERMS_OF_BLOCKS, "of_side < side.rows && ", ""),
    Mutant(
        "blocks that stay: too few bytes are expected",
        BLOCKS_THAT_STAY,
        "expect_tx(full, C::kStageBytes)",
        "expect_tx(full, C::kStageBytes / 2)",
    ),
    Mutant("blocks that stay: a block of 64 in the wrong half", BLOCKS_THAT_STAY, "kHalves ? 2 * half : 0", "0"),
    Mutant("blocks that stay: scales of other rows", BLOCKS_THAT_STAY, "scales[i / 2 % 2]", "scales[i % 2]"),
    Mutant("blocks that stay: sums of b in place of its zero points", BLOCKS_THAT_STAY, "of_b[(3 - v) % 3]", "of_b[v]"),
    Mutant(
        "blocks that stay: a slot that ends early is kept", BLOCKS_THAT_STAY, "    if (of_slot > 0) release_terms();\n"
    ),
    Mutant(
        "blocks that stay: totals of the tile before",
        BLOCKS_THAT_STAY,
        "    for (int i = 0; i < kCount; ++i) total[i] = 0;\n",
        "    for (int i = 0; i < kCount; ++i) total[i] *= 1;\n",
    ),
    Mutant(
        "blocks that stay: results replace others on their way",
        BLOCKS_THAT_STAY,
        "        if (leads) tma_store_wait<0>();\n",
    ),
    Mutant(
        "blocks that stay: results that other warps have yet to write",
        BLOCKS_THAT_STAY,
        "        cutlass::arch::fence_view_async_shared();\n        sync_group();\n",
        "        cutlass::arch::fence_view_async_shared();\n",
    ),
    Mutant("weights by wgmma: no wait for loads", WEIGHTS, "    Full::wait(&shared.full[stage], phase);\n"),
    Mutant(
        "weights by wgmma: a stage released while it is multiplied",
        WEIGHTS,
        "release(C::kHalves ? &shared.second_empty[before] : &shared.empty[before], i - 1);",
        "release(C::kHalves ? &shared.second_empty[stage] : &shared.empty[stage], i - 1);",
    ),
    Mutant(
        "weights by wgmma: the second half of x is not waited for",
        WEIGHTS,
        "      if constexpr (C::kHalves && kAt == 1) Full::wait(&shared.second_full[stage], phase);\n",
    ),
    Mutant("weights by wgmma: no wait for products", WEIGHTS, "    warpgroup_wait<1>();\n"),
    Mutant("weights by wgmma: too few bytes are expected", WEIGHTS, "(C::kHalves ? 1 : C::kBoxesX) * bytes_x", "0"),
    Mutant(
        "weights by wgmma: terms are not waited for",
        WEIGHTS,
        "Full::init(&shared.full[s], 1 + C::kTermsWarps);",
        "Full::init(&shared.full[s], 1);",
    ),
    Mutant(
        "weights of streams: sums are read before they are there",
        STREAMS,
        "    while (flag.load(cuda::memory_order_acquire) != is_left) {\n    }\n",
    ),
    Mutant("weights of streams: no fence behind sums", WEIGHTS, "  __threadfence();\n"),
    Mutant("weights of streams: left before all sums are there", WEIGHTS, "      sync_left<C::kMathThreads>();\n"),
    Mutant(
        "weights of streams: the last part is not added", WEIGHTS, "own.is_left, others);", "own.is_left, others - 1);"
    ),
    Mutant("weights of streams: the next tile's part is added", WEIGHTS, "< end - steps", "<= end - steps"),
    Mutant(
        "weights of streams: the last stage of a tile is kept",
        WEIGHTS,
        "      release(C::kHalves ? &shared.second_empty[before] : &shared.empty[before], 0);\n",
    ),
    Mutant(
        "weights of streams: no room for others' zeros", LAUNCH, "C::kPersistent ? C::kTileM / C::kShare", "false ? 1"
    ),
    Mutant("weights of streams: columns of another row", STREAMS, "(columns ^ row % 8) * 16", "columns * 16"),
    Mutant(
        "weights of streams: results are stored unseen", STREAMS, "      cutlass::arch::fence_view_async_shared();\n"
    ),
    Mutant(
        "weights of streams: a slot is written while it is stored",
        STREAMS,
        "      if (leads) cute::tma_store_wait<C::kSlots - 1>();\n",
    ),
    Mutant(
        "weights of streams: fragments are overwritten while they are multiplied",
        WEIGHTS,
        "(parity + C::kChunks) % 2> kNextParity",
        "0> kNextParity",
    ),
    Mutant("weights of streams: terms of another step", WEIGHTS, "(begin + step) % kStages]", "begin]"),
    Mutant(
        "weights of streams: terms for a stage in use",
        WEIGHTS,
        "              if (turn > 0) Empty::wait(&shared.empty[stage], (turn - 1) & 1);\n",
    ),
    Mutant("weights of streams: one block's sums for several", STREAMS, "(other + j) * kCount", "other * kCount"),
    Mutant("weights of streams: biases beyond the last column", STREAMS, "n < p.n ? p.bias", "true ? p.bias"),
    Mutant(
        "weights in int8: the other half of a word", INT8_WEIGHTS, "lane % 2 == 0 ? 0x5410", "lane % 2 != 0 ? 0x5410"
    ),
    Mutant("weights in int8: the row's own order of words", WEIGHTS, "(j ^ (row / 2 + 4 * h) % 4)", "j"),
    Mutant("weights in int8: the scale of another row", STREAMS, "lane % 4 * 2 + i % 2;", "lane % 4 * 2;"),
    Mutant(
        "weights in fp8: the sums of a block go on in the next",
        WEIGHTS,
        "if (chunk * C::kChunk % C::kUnit == 0 &&",
        "if (chunk == 0 &&",
    ),
    Mutant("weights in fp8: the parts of other lanes", WEIGHTS, "lane % 2 * 2 + i / 4", "lane / 2 % 2 * 2 + i / 4"),
    Mutant("weights in fp8: -n is n - 1", FP8_WEIGHTS, " + (~positive & 0x01010101)"),
    Mutant("weights in fp8: no zero point", FP8_WEIGHTS, "static_cast<int8_t>(zero_bits) + 8", "8"),
    Mutant("weights by wgmma: split-K sums read before they arrive", WEIGHTS, "    Full::wait(&shared.added, 0);\n"),
    Mutant("weights by wgmma: no barrier before sums are read", WEIGHTS, "    sync_math<C::kMathThreads>();\n"),
    Mutant(
        "weights by wgmma: groups beyond K",
        WEIGHTS,
        "min(__umulhi(2 * unit, p.block_inverse), p.groups - 1)",
        "__umulhi(2 * unit, p.block_inverse)",
    ),
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
    Mutant(
        "weights of windows: taps beyond the last",
        WINDOWS_OF_WEIGHTS,
        "    if (column >= k) image = images;\n",
    ),
    Mutant(
        "weights of windows: no dilation",
        WINDOWS_OF_WEIGHTS,
        "find(channel, window.dilation,",
        "find(channel, {1, 1, 1},",
    ),
    Mutant(
        "weights of windows: the same pixels twice in a cluster",
        WEIGHTS,
        "load<kShare, sizeof(Element)>(boxes_x, full, box, column, m);",
        "load<kShare, sizeof(Element)>(boxes_x, full, box, column, piece.first_m);",
    ),
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
    Mutant(
        "blocks of few rows: rows beyond N",
        FEW_ROWS_OF_BLOCKS,
        "min(first_n + 8 * i + group, p.n - 1)",
        "first_n + 8 * i + group",
    ),
    Mutant("blocks of few rows: columns beyond K", FEW_ROWS_OF_BLOCKS, "if (column >= k) {", "if (false) {"),
    Mutant(
        "blocks of few rows: terms are not waited for",
        FEW_ROWS_OF_BLOCKS,
        "    wait_for_copies<0>();\n    __syncthreads();\n",
        "    __syncthreads();\n",
    ),
    Mutant(
        "blocks of few rows: scaled before all sums are there",
        FEW_ROWS_OF_BLOCKS,
        "    wait_for_copies<0>();\n    __syncthreads();\n",
        "    wait_for_copies<0>();\n",
    ),
    Mutant(
        "blocks of few rows: the next sums come before all are scaled",
        FEW_ROWS_OF_BLOCKS,
        "    });\n    __syncthreads();\n",
        "    });\n",
    ),
    Mutant(
        "quantizing few rows: products before all is quantized",
        FEW_ROWS_OF_BLOCKS,
        "      quantize_a<C>(p, shared, l, first_m, first);\n      __syncthreads();\n",
        "      quantize_a<C>(p, shared, l, first_m, first);\n",
    ),
    Mutant(
        "quantizing few rows: rows beyond M", FEW_ROWS_OF_BLOCKS, "min(C::kTileM, p.m - first_m), p.k", "C::kTileM, p.k"
    ),
    Mutant(
        "quantizing few rows: columns beyond K", QUANTIZE_ROWS, "ahead.row < rows && column < end", "ahead.row < rows"
    ),
    Mutant("quantizing few rows: the range of half a block", QUANTIZE_ROWS, "apart < lanes", "2 * apart < lanes"),
    Mutant("quantizing few rows: sums of absent columns", QUANTIZE_ROWS, "if (!is_there) words = {0, 0};", ""),
    Mutant(
        "expanded: rows beyond N", EXPANSION, "min(first_n_ + i * kRowsAtOnce, n_ - 1)", "first_n_ + i * kRowsAtOnce"
    ),
    Mutant("expanded: few rows beyond N", FEW_ROWS, "min(first_n + 8 * i + group, p.n - 1)", "first_n + 8 * i + group"),
    Mutant("expanded: few rows are added before all are there", FEW_ROWS, "  __syncthreads();\n", ""),
    Mutant(
        "expanded: blocks of the step before",
        "expanded_mm/multistage.cu",
        "load_blocks(k_begin + C::kTileK)",
        "load_blocks(k_begin)",
    ),
    Mutant("expanded: blocks of another feeder's step", EXPANDED_WGMMA, "i - kAhead + kFeeders)", "i - kAhead + 1)"),
    Mutant("expanded: every part of K has its beginning", EXPANDED_WGMMA, "all_steps * parts.own / parts.count;", "0;"),
    Mutant("expanded: odd columns first", EXPANSION, "0x5140", "0x1504"),
    Mutant(
        "expanded: copies that become int8 are not waited for",
        MAIN_LOOP,
        "wait_for_copies<C::kStages - 2>();  // of",
        "// of",
    ),
    Mutant("expanded: a copy too few is waited for", EXPANDED_WGMMA, "<C::kAhead>();", "<C::kAhead + 1>();"),
    Mutant("expanded: no fence of int8", EXPANDED_WGMMA, "      cutlass::arch::fence_view_async_shared();\n"),
    Mutant(
        "expanded: stages are filled while they are read",
        EXPANDED_WGMMA,
        "if (turn > 0) Empty::wait",
        "if (false) Empty::wait",
    ),
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


def copy_sources():
    """Brings the copy up to date; what has not changed keeps its time."""
    parts = ["cuda", "jax_qmm", "tests", "build_backend", "*.toml", "CMakeLists.txt"]
    command = ["git", "ls-files", "-co", "--exclude-standard", *parts]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():  # and not deleted
            own = KERNELS.encode() if name == "tests/emulator/kernels.txt" else None
            write(COPY / name, own or (ROOT / name).read_bytes())


def write(path, content):
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def run_tests(family):
    """What notices: the kinds of reports, or "values" or "crash" without one; empty if the tests pass."""
    command = [sys.executable, "-m", "pytest", "--emulator", "-q", "-p", "no:cacheprovider", *TESTS[family]]
    settings = {"EMU_SEED": "0", "EMU_CC": "80" if family == "multistage" else "90"}  # Hopper has other kernels
    done = subprocess.run(command, cwd=COPY, capture_output=True, text=True, env=os.environ | settings)
    kinds = sorted(set(re.findall(r"\[emu\] (\w+)", done.stdout)))
    if not kinds and done.returncode < 0:
        kinds = ["crash"]
    if not kinds and done.returncode == 1 and "AssertionError" in done.stdout:
        kinds = ["values"]
    if bool(kinds) != bool(done.returncode):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return kinds


def main(words):
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    folder = COPY / "build" / "emulator"
    copy_sources()
    build(COPY, folder)
    unexpected = 0
    for family in dict.fromkeys(mutant.family for mutant in chosen):
        kinds = run_tests(family)
        unexpected += bool(kinds)
        print(f"{family}: unchanged | {', '.join(kinds) or 'passes'}", flush=True)
        for mutant in chosen:
            if mutant.family != family:
                continue
            path = COPY / "cuda" / mutant.file
            text = path.read_text()
            if text.count(mutant.old) != 1:
                raise SystemExit(f"{mutant.file} has {text.count(mutant.old)} times, not once: {mutant.old!r}")
            path.write_text(text.replace(mutant.old, mutant.new))
            try:
                build(COPY, folder)
                kinds = run_tests(family)
            finally:
                path.write_text(text)
            unexpected += mutant.noticed != bool(kinds)
            print(f"{mutant.name} | {', '.join(kinds) or 'not noticed'}", flush=True)
        build(COPY, folder)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
