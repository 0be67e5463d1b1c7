"""Mutants of products of weights in blocks (cuda/block_scaled_mm, expanded_mm), and the tests that must notice them."""

from mutations.mutant import Mutant

BLOCKS = "tests/ops/test_block_scaled_mm_gpu.py::{}"
BLOCKS_SM90 = "tests/ops/test_block_scaled_mm_sm90_gpu.py::{}"
EXPANDED = "tests/ops/test_expanded_mm_gpu.py::{}"
WEIGHTS_OF_WINDOWS = "tests/ops/test_weight_only_conv_gpu.py::{}"
STREAM_K = "sm90 wgmma 32x128x128 stream-K int4 in blocks of 128"
TESTS = {
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
    "bounds of streams": [BLOCKS_SM90.format("test_bounds_of_persistent_blocks[bfloat16-bfloat16]")],
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
    ]
    + [EXPANDED.format(f"test_persistent_blocks[1-40-200-5280-128-True-bfloat16-{STREAM_K}]")],
    "weights in fp8": [
        BLOCKS_SM90.format("test_shapes_and_blocks[1-129-520-256-int8-float8_e4m3fn-4]"),
        BLOCKS_SM90.format("test_shapes_and_blocks[130-140-1416-320-none-float8_e4m3fn-4]"),
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
}

MAIN_LOOP = "scaled_mm/multistage.cuh"
WEIGHTS = "block_scaled_mm/wgmma_sm90.cuh"
STREAMS = "block_scaled_mm/streams_sm90.cuh"
BOXES = "core/boxes.cuh"
WINDOWS_OF_WEIGHTS = "block_scaled_mm/windows_sm90.cuh"
EXPANSION = "expanded_mm/expansion.cuh"
FEW_ROWS = "expanded_mm/few_rows.cu"
FP8_WEIGHTS = "block_scaled_mm/dequantize_fp8.cuh"
INT8_WEIGHTS = "block_scaled_mm/dequantize_int8.cuh"
EXPANDED_WGMMA = "expanded_mm/wgmma_sm90.cu"
BLOCK_SCALED = "block_scaled_mm/kernel.cuh"
BLOCK_STEP = "block_scaled_mm/step.cuh"
BLOCK_SOURCES = "block_scaled_mm/sources.cuh"
DEQUANTIZE = "block_scaled_mm/dequantize.cuh"
DIRECT = "block_scaled_mm/direct.cuh"
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
    Mutant("direct: warps share what is asked for", DIRECT, "(warp - p.static_warps) * p.warp_bytes", "0"),
    Mutant("direct: rows of x beyond M", DIRECT, "row < p_.m; row", "row < C::kTileM; row"),
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
    Mutant("weights of streams: no zeros for rows beyond the last", BOXES, "stale_ = kBoxes", "stale_ = 0"),
    Mutant(
        "weights of streams: a box of rows is left out", WEIGHTS, "+ kRowsAtOnce - 1) / kRowsAtOnce", ") / kRowsAtOnce"
    ),
    Mutant("weights of streams: columns of another row", STREAMS, "(eight ^ row % 8) * 16", "eight * 16"),
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
    Mutant(
        "weights of streams: biases beyond the last column",
        STREAMS,
        "min(piece.first_n + row + 8 * h, p.n - 1)",
        "piece.first_n + row + 8 * h",
    ),
    Mutant("weights of streams: the bias of the first column for both", STREAMS, "row + 8 * h, p.n", "row, p.n"),
    Mutant(
        "bounds of streams: none above",
        STREAMS,
        "quantize::min_nan(rounded(values[i], values[i + 1]), high)",
        "rounded(values[i], values[i + 1])",
    ),
    Mutant(
        "bounds of streams: none below",
        STREAMS,
        "quantize::max_nan(quantize::min_nan(rounded(values[i], values[i + 1]), high), low)",
        "quantize::min_nan(rounded(values[i], values[i + 1]), high)",
    ),
    Mutant(
        "bounds of streams: one result for two",
        STREAMS,
        "rounded(values[i], values[i + 1])",
        "rounded(values[i], values[i])",
    ),
    Mutant(
        "weights in int8: the other half of a word", INT8_WEIGHTS, "lane % 2 == 0 ? 0x5410", "lane % 2 != 0 ? 0x5410"
    ),
    Mutant("weights in int8: no other part is added", WEIGHTS, "own.is_left, others);", "own.is_left, 0);"),
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
]
