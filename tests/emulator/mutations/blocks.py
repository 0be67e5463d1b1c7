"""Mutants of products with blocks on both sides (cuda/block_quantized_mm), and the tests that must notice them."""

from mutations.mutant import Mutant

BOTH_SIDES = "tests/ops/test_block_quantized_mm_gpu.py::{}"
TESTS = {
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
}

WGMMA_OF_BLOCKS = "block_quantized_mm/wgmma_sm90.cuh"
STAGES_OF_BLOCKS = "block_quantized_mm/stages_sm90.cuh"
FEW_ROWS_OF_BLOCKS = "block_quantized_mm/few_rows.cuh"
BLOCKS_THAT_STAY = "block_quantized_mm/persistent_sm90.cuh"
TERMS_OF_BLOCKS = "block_quantized_mm/terms_sm90.cuh"
PARTS_OF_BLOCKS = "block_quantized_mm/parts_sm90.cuh"
MUTANTS = [
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
        "(rows + kTile) * kStep",
        "kTile * kStep",
    ),
    Mutant(
        "blocks that stay: a box of rows is left out",
        BLOCKS_THAT_STAY,
        "+ C::kBoxRows - 1) / C::kBoxRows",
        ") / C::kBoxRows",
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
]
