"""Mutants of convolutions of int8 (cuda/conv), and the tests that must notice them."""

from mutations.mutant import Mutant

CONVS = "tests/ops/test_conv_gpu.py::{}"
DEPTHWISE_CONVS = "tests/ops/test_depthwise_conv_gpu.py::{}"
CONVS_OF_SHORT_WINDOWS = "tests/ops/test_short_window_conv_gpu.py::{}"
TESTS = {
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
            CONVS_OF_SHORT_WINDOWS.format(f"test_sums_of_short_windows[windows of {size} bytes-(127, None)-{name}]")
            for name, size in (
                *(("7x7 stride 2", 224), ("asymmetric padding", 64), ("cut", 64), ("one axis", 64)),
                *(("several turns", 64), ("pieces of 4 bytes", 64)),
            )
        ),
        CONVS_OF_SHORT_WINDOWS.format("test_outputs_of_short_windows[windows of 64 bytes-35-relu-int8]"),
    ],
    "depthwise": [
        DEPTHWISE_CONVS.format(f"test_sums_of_each_channel[(127, None)-{count} channels]") for count in (20, 48, 148)
    ],
    "squares": [
        DEPTHWISE_CONVS.format(f"test_sums_of_squares[(127, None)-{name}]")
        for name in (
            "3x3, 148 channels",
            "3x3, several tiles of a thread",
            "3x3 stride 2, uneven",
            "5x5",
            "7x7, small image",
        )
    ],
}

CONV = "conv/implicit_gemm.cu"
WINDOWS = "conv/wgmma_sm90.cu"
DEPTHWISE = "conv/depthwise.cu"
SQUARES = "conv/depthwise_square.cu"
SHORT_WINDOWS = "conv/short_window.cu"
RESIDUAL = "conv/residual.cuh"
WRITE_ROWS = "scaled_mm/write_rows.cuh"
MUTANTS = [
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
    Mutant("squares: results where the next tile is", SQUARES, "(present.image *", "(place.image *"),
    Mutant("squares: channels beyond the last", SQUARES, " || first_channel >= p.n) return", ") return"),
    Mutant("squares: no barrier before what is shared is read", SQUARES, "  __syncthreads();\n"),
    Mutant("squares: pixels right of the image", SQUARES, "? has_lines : 0", "? has_lines : has_lines"),
    Mutant(
        "squares: lines below the image",
        SQUARES,
        "min(max(of.top + min(y, C::kLines - 1), 0), p.height - 1)",
        "max(of.top + min(y, C::kLines - 1), 0)",
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
    Mutant("conv by wgmma: parts are added before they come", WRITE_ROWS, "  sync_stores_of_cluster();"),
    Mutant("conv by wgmma: a lane sends its own sums", WRITE_ROWS, "first = is_odd ? got : own", "first = own"),
]
