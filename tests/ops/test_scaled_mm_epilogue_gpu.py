"""The full epilogue (zero points of b, activations, 8-bit outputs) in every kernel that has it, each forced in turn."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.gpu

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
# M, N, K: ragged in whatever a kernel tiles; the last is aligned for the general kernel alone.
SHAPES = [(1, 144, 16), (7, 208, 2064), (33, 272, 1040), (33, 75, 67)]
SEVERAL_TILES = (130, 1552, 272)  # for each persistent block
EXACT = {"none": (-np.inf, np.inf), "relu": (0, np.inf), "relu6": (0, 6), "clamp": (-1.5, 0.75)}
OUT_SCALE, OUT_ZERO_POINT = np.float32(0.37), -9
WORKSPACE = 4 << 20  # bytes, enough for each kernel that splits K


def call(a, b, vectors, out_dtype, activation="none", low=-np.inf, high=np.inf, fast_accum=True):
    """The kernel's result for a `(batch, M, K)`, b `(batch, N, K)` and vectors `(1 | batch, 1 | M or N)`."""
    batch, m, n = max(a.shape[0], b.shape[0]), a.shape[1], b.shape[1]
    results = jax.ShapeDtypeStruct((batch, m, n), out_dtype), jax.ShapeDtypeStruct((WORKSPACE,), jnp.uint8)
    f = jax.ffi.ffi_call("jax_qmm_scaled_mm", results)
    attributes = dict(activation=activation, low=np.float32(low), high=np.float32(high), fast_accum=fast_accum)
    run = jax.jit(lambda *operands: f(*operands, names=" ".join(vectors), **attributes)[0])
    return np.asarray(run(a, b, *vectors.values()))


def operands(m, n, k, dtype, out_dtype, seed=0):
    """a, b and all vectors that such operands and outputs can have; results of size 10 or so."""
    rng = np.random.default_rng([seed, m, n, k])
    if dtype == np.int8:
        a, b = (rng.integers(-128, 128, (1, rows, k), np.int8) for rows in (m, n))
    else:  # sums that are exact in the tensor cores' 13 bits
        a, b = (rng.choice([-1, 0, 0, 0, 0, 1, 2], (1, rows, k)).astype(dtype) for rows in (m, n))
    size = np.sqrt(max(k, 1)) * (5000 if dtype == np.int8 else 1)
    vectors = {"scale_a": rng.uniform(0, 20, m) / size, "scale_b": rng.uniform(-1, 1, n), "bias": rng.uniform(-2, 2, n)}
    vectors = {name: vector.astype(np.float32) for name, vector in vectors.items()}
    if dtype == np.int8:
        vectors |= {
            "azp": rng.integers(-128, 128, m, np.int32),
            "azp_adj": b[0].sum(1, dtype=np.int32),
            "azp_b": rng.integers(-128, 128, n, np.int32),
        }
        vectors["sums_a"] = a[0].sum(1, dtype=np.int32) - k * vectors["azp"]
    if np.dtype(out_dtype).itemsize == 1:
        vectors["out_scale"] = np.full(1, OUT_SCALE)
    if out_dtype == np.int8:
        vectors["out_zero_point"] = np.full(1, OUT_ZERO_POINT, np.int32)
    return a, b, {name: vector[None] for name, vector in vectors.items()}


def float32_result(oracle, a, b, vectors):
    """What the activation is applied to, of one entry of the batch."""
    v = {name: vector[0] for name, vector in vectors.items()}
    acc = oracle.sums(a, b)
    if "sums_a" in v:  # with wrap-around
        acc = (acc - v["sums_a"].astype(np.int64)[:, None] * v["azp_b"]).astype(np.int32)
    zero_points = {name: v[name] for name in ("azp", "azp_adj") if name in v}
    return oracle.epilogue(acc, v["scale_a"], v["scale_b"], v.get("bias"), **zero_points, out_dtype=np.float32)


def clamp(y, low, high):
    return np.where(y <= np.float32(low), np.float32(low), np.where(y > np.float32(high), np.float32(high), y))


def rounded(y, vectors, out_dtype):
    """float32 results as the outputs that the vectors make of them; all arithmetic is numpy's."""
    if np.dtype(out_dtype).itemsize != 1:
        return y.astype(out_dtype)
    with np.errstate(all="ignore"):
        y = y / vectors["out_scale"][0].astype(np.float32)
        if out_dtype == E4M3:
            return np.clip(y, -448, 448).astype(E4M3)
        y = np.rint(y) + vectors.get("out_zero_point", np.zeros((1, 1)))[0].astype(np.float32)
        return np.where(np.isnan(y), 0, np.clip(y, -128, 127)).astype(np.int8)


def choices(extension, gpu, m, n, k, dtype, out_dtype, batch=1, fast_accum=True):
    """Forces each kernel in turn; gives its words."""
    fast_accum = fast_accum and dtype != np.int8
    problem = extension.ScaledMmProblem(
        m, n, k, batch, np.dtype(dtype).name, np.dtype(out_dtype).name, fast_accum, full_epilogue=True
    )
    for choice in problem.choices(gpu):
        problem.tune(choice, gpu)
        yield extension.describe_scaled_mm(choice)


def assert_same(got, want, message=""):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"), message)


@pytest.mark.parametrize("out_dtype", [BF16, np.float32, np.int8, E4M3])
@pytest.mark.parametrize(
    ("shape", "activation"),
    [(SHAPES[0], activation) for activation in EXACT]
    + [(shape, activation) for shape in SHAPES[1:] for activation in ("none", "clamp")]
    + [(SEVERAL_TILES, "clamp")],
    ids=str,
)
def test_int8_is_exact(extension, gpu, oracle, shape, activation, out_dtype):
    a, b, vectors = operands(*shape, np.int8, out_dtype)
    y = clamp(float32_result(oracle, a[0], b[0], vectors), *EXACT[activation])
    want = rounded(y, vectors, out_dtype)
    kind = "none" if activation == "none" else "clamp"
    for words in choices(extension, gpu, *shape, np.int8, out_dtype):
        assert_same(call(a, b, vectors, out_dtype, kind, *EXACT[activation])[0], want, words)


@pytest.mark.parametrize("scale_a", ["of rows", "of all"])
@pytest.mark.parametrize("tile_k", [64, 128])
@pytest.mark.parametrize(
    "n, k, turns",
    [(272, 48, 17), (272, 1040, 2), (144, 24, 3), (16, 52, 2), (48, 80, 2), (16, 16, 2)],
    ids=["one step", "many steps", "two rows as one", "four rows as one", "four rows in tiles", "narrow rows as one"],
)
def test_rows_that_stream_past_resident_columns(extension, gpu, oracle, n, k, turns, tile_k, scale_a):
    m = 64 * 4 * max(1, gpu.sm_count // 5) * turns + 24  # more steps than are loaded at first
    a, b, vectors = operands(m, n, k, np.int8, np.int8)
    if scale_a == "of all":
        vectors["scale_a"] = vectors["scale_a"][:, :1]
    want = rounded(clamp(float32_result(oracle, a[0], b[0], vectors), *EXACT["clamp"]), vectors, np.int8)
    for words in choices(extension, gpu, m, n, k, np.int8, np.int8):
        if words.startswith(f"sm90 64x64x{tile_k} resident"):
            break
    else:
        pytest.skip("a kernel of Hopper alone")
    assert_same(call(a, b, vectors, np.int8, "clamp", *EXACT["clamp"])[0], want, words)


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("out_dtype", [BF16, np.float32, np.int8, E4M3])
@pytest.mark.parametrize("shape", [*SHAPES, SEVERAL_TILES], ids=str)
def test_fp8_on_exact_sums(extension, gpu, oracle, shape, out_dtype, fast_accum):
    a, b, vectors = operands(*shape, E4M3, out_dtype)
    want = rounded(clamp(float32_result(oracle, a[0], b[0], vectors), 0, 6), vectors, out_dtype)
    for words in choices(extension, gpu, *shape, E4M3, out_dtype, fast_accum=fast_accum):
        assert_same(call(a, b, vectors, out_dtype, "clamp", 0, 6, fast_accum)[0], want, words)


@np.errstate(over="ignore")
def silu(y):
    return y / (1 + np.exp(-y))


@np.errstate(over="ignore", invalid="ignore")
def gelu(y):
    return y / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))


def assert_within(got, y, exactly, words):
    """cuda/scaled_mm/output.cuh derives the bound of the float32 result, which is then rounded to the output."""
    y = y.astype(np.float64)
    close = 2.0**-20 * np.abs(y)
    half_ulp = 0 if got.dtype == np.float32 else float(jnp.finfo(got.dtype).eps) / 2
    bound = close + half_ulp * (np.abs(exactly(y)) + close)
    assert (np.abs(got.astype(np.float64) - exactly(y)) <= bound).all(), words


@pytest.mark.parametrize("out_dtype", [BF16, np.float32])
@pytest.mark.parametrize("activation, exactly", [("silu", silu), ("gelu", gelu)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_and_gelu_stay_within_their_bound(extension, gpu, oracle, shape, out_dtype, activation, exactly):
    a, b, vectors = operands(*shape, np.int8, out_dtype)
    y = float32_result(oracle, a[0], b[0], vectors)
    for words in choices(extension, gpu, *shape, np.int8, out_dtype):
        assert_within(call(a, b, vectors, out_dtype, activation)[0], y, exactly, words)


@pytest.mark.parametrize("activation, exactly", [("silu", silu), ("gelu", gelu)])
def test_activations_of_every_size_of_float(activation, exactly):
    y = np.concatenate([np.float32(sign) * np.geomspace(1e-38, 3e38, 1000, dtype=np.float32) for sign in (1, -1)])
    y = np.concatenate([y, np.linspace(-100, 20, 1200, dtype=np.float32), np.float32([0, np.inf, np.nan])])
    a, b = np.zeros((1, 1, 4), np.int8), np.zeros((1, len(y), 4), np.int8)
    got = call(a, b, {"bias": y[None]}, np.float32, activation)[0, 0]
    np.testing.assert_array_equal(got[-2:], y[-2:])
    assert_within(got[:-2], y[:-2], exactly, activation)


@pytest.mark.parametrize("out_zero_point", [0, OUT_ZERO_POINT])
@pytest.mark.parametrize("activation, exactly", [("silu", silu), ("gelu", gelu)])
def test_8_bit_outputs_of_activations_are_off_by_one_step_at_most(
    extension, gpu, oracle, activation, exactly, out_zero_point
):
    shape = (33, 272, 1040)
    a, b, vectors = operands(*shape, np.int8, np.int8)
    vectors["out_zero_point"] = np.int32([[out_zero_point]])
    exact = exactly(float32_result(oracle, a[0], b[0], vectors).astype(np.float64))
    steps = exact / OUT_SCALE + out_zero_point
    for words in choices(extension, gpu, *shape, np.int8, np.int8):
        got = call(a, b, vectors, np.int8, activation)[0]
        # Of the float result's error nothing is left but where it is next to the middle of two steps.
        assert (np.abs(np.clip(steps, -128, 127) - got) <= 0.5 + 1e-4).all(), words


def test_zero_points_of_both_sides_are_all_four_terms(extension, gpu):
    m, n, k = 33, 272, 1040
    a, b, vectors = operands(m, n, k, np.int8, np.float32)
    of_a, of_b = (a[0] - vectors["azp"].T.astype(np.int64)), (b[0] - vectors["azp_b"].T.astype(np.int64))
    vectors = {name: vectors[name] for name in ("azp", "azp_adj", "sums_a", "azp_b")}
    for words in choices(extension, gpu, m, n, k, np.int8, np.float32):
        np.testing.assert_array_equal(call(a, b, vectors, np.float32)[0], (of_a @ of_b.T).astype(np.float32), words)


@pytest.mark.parametrize("out_dtype", [np.float32, np.int8])
def test_zero_points_wrap(extension, gpu, oracle, out_dtype):
    a, b, vectors = operands(17, 80, 144, np.int8, out_dtype)
    vectors["sums_a"], vectors["azp_b"] = vectors["sums_a"] * 2**16 + 7, vectors["azp_b"] * 2**18 + 3
    vectors["scale_a"] = np.float32([[2.0**-28]])
    want = rounded(float32_result(oracle, a[0], b[0], vectors), vectors, out_dtype)
    for words in choices(extension, gpu, 17, 80, 144, np.int8, out_dtype):
        assert_same(call(a, b, vectors, out_dtype)[0], want, words)


@pytest.mark.parametrize("out_dtype", [BF16, np.int8])
@pytest.mark.parametrize("m", [5, 150])
@pytest.mark.parametrize("shared", ["", "a sums_a out_scale", "b azp_b out_zero_point"])
def test_batches(extension, gpu, oracle, shared, m, out_dtype):
    n, k, batch = 208, 272, 3
    entries = [operands(m, n, k, np.int8, out_dtype, seed) for seed in range(batch)]
    for i, (_, _, vectors) in enumerate(entries):
        vectors |= (
            {"out_scale": np.float32([[0.3 + i]]), "out_zero_point": np.int32([[i]])} if out_dtype == np.int8 else {}
        )

    def stacked(name, values):
        return values[0] if name in shared.split() else np.concatenate(values)

    a, b = (stacked(name, [entry[i] for entry in entries]) for i, name in enumerate("ab"))
    vectors = {name: stacked(name, [entry[2][name] for entry in entries]) for name in entries[0][2]}

    def entry(x, i):
        return x[i % len(x)][None]

    each = [{name: entry(vector, i) for name, vector in vectors.items()} for i in range(batch)]
    y = [float32_result(oracle, entry(a, i)[0], entry(b, i)[0], each[i]) for i in range(batch)]
    want = np.stack([rounded(clamp(y[i], -1, 3), each[i], out_dtype) for i in range(batch)])
    for words in choices(extension, gpu, m, n, k, np.int8, out_dtype, batch):
        assert_same(call(a, b, vectors, out_dtype, "clamp", -1, 3), want, words)


@pytest.mark.parametrize("out_dtype", [np.float32, np.int8, E4M3])
@pytest.mark.parametrize("shape", [(0, 16, 16), (8, 0, 16), (8, 16, 0), (1, 9, 0)], ids=str)
def test_empty_dimensions(oracle, shape, out_dtype):
    a, b, vectors = operands(*shape, np.int8, out_dtype)
    want = rounded(clamp(float32_result(oracle, a[0], b[0], vectors), 0, 6), vectors, out_dtype)
    assert_same(call(a, b, vectors, out_dtype, "clamp", 0, 6)[0], want)


@pytest.mark.parametrize("out_dtype, out_zero_point", [(np.int8, 0), (np.int8, 3), (E4M3, None)])
@pytest.mark.parametrize(
    "dtype, out_scale, bounds",
    [(np.float32, scale, ()) for scale in (0.37, -2.0, 1e-30, 1e30, 1e-40, np.inf, np.nan, 0.0)]
    + [(np.float32, scale, bounds) for scale in (0.37, -2.0, 1e-40, 0.0) for bounds in ((-3, 5), (1e20, 1e30))]
    + [(dtype, scale, ()) for dtype in (BF16, np.float16) for scale in (0.37, 1e-7)],
)
def test_8_bit_outputs_of_odd_values(extension, gpu, out_dtype, out_zero_point, out_scale, dtype, bounds):
    """Every step, ties between two, and what is no number, as quantizing the float result has them."""
    steps = np.concatenate([np.arange(-300, 300, 0.5), np.geomspace(1e-6, 1e8, 200), -np.geomspace(1e-6, 1e8, 200)])
    with np.errstate(all="ignore"):
        out_scale = np.float64(out_scale).astype(dtype)
        y = np.concatenate([steps * np.float64(out_scale), [np.inf, -np.inf, np.nan, 3e38, 1e-42], np.zeros(11)])
        y = y.astype(np.float32) + 0  # a bias of -0 does not show beside sums of +0
    shape = (2, len(y), 16)
    a, b = np.zeros((1, 2, 16), np.int8), np.zeros((1, len(y), 16), np.int8)
    vectors = {"bias": y[None], "out_scale": np.full((1, 1), out_scale)}
    if out_zero_point is not None:
        vectors["out_zero_point"] = np.int32([[out_zero_point]])
    want = np.broadcast_to(rounded(clamp(y, *bounds) if bounds else y, vectors, out_dtype), (2, len(y)))
    for words in choices(extension, gpu, *shape, np.int8, out_dtype):
        got = call(a, b, vectors, out_dtype, *(["clamp", *bounds] if bounds else []))[0]
        nan = np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan, words)
        assert_same(got[~nan], want[~nan], words)


@pytest.mark.parametrize("out_dtype", [np.float32, BF16, E4M3])
def test_clamps_of_zeros(extension, gpu, out_dtype):
    """The lower bound is +0, also for -0, and at the upper one zeros keep their sign."""
    a, b = np.zeros((1, 2, 16), np.int8), np.zeros((1, 16, 16), np.int8)
    vectors = {"scale_a": np.full((1, 2), -1, np.float32), "out_scale": np.ones((1, 1), np.float32)}
    if np.dtype(out_dtype).itemsize > 1:
        del vectors["out_scale"]
    for words in choices(extension, gpu, 2, 16, 16, np.int8, out_dtype):
        for bounds, zero in (((0, 6), 0.0), ((-6, 0), -0.0)):
            got = call(a, b, vectors, out_dtype, "clamp", *bounds)[0]
            assert_same(got, np.full((2, 16), zero, out_dtype), f"{words}, {bounds}")


@pytest.mark.parametrize("zero_point", [2**21, -(2**21), 2**21 + 1, -(2**21) - 1, -(2**30)])
def test_large_zero_points_of_int8_outputs(extension, gpu, zero_point):
    """Up to 2^21 quotients are rounded by adding to them, which is wrong from 2^22 on."""
    steps = np.concatenate([np.arange(-300, 300, 0.5) - zero_point, [2**22 + 1, -(2**22) - 1, 3e9, -3e9, *[0] * 12]])
    y = (steps * OUT_SCALE).astype(np.float32) + 0  # a bias of -0 does not show beside sums of +0
    a, b = np.zeros((1, 2, 16), np.int8), np.zeros((1, len(y), 16), np.int8)
    vectors = {"bias": y[None], "out_scale": np.full((1, 1), OUT_SCALE), "out_zero_point": np.int32([[zero_point]])}
    want = np.broadcast_to(rounded(y, vectors, np.int8), (2, len(y)))
    for words in choices(extension, gpu, 2, len(y), 16, np.int8, np.int8):
        assert_same(call(a, b, vectors, np.int8)[0], want, words)


def test_plain_products_keep_their_kernels(extension, gpu):
    """And those with the full epilogue take no others."""
    for out_dtype in ("bfloat16", "float32"):
        plain, full = (
            {
                extension.describe_scaled_mm(choice)
                for choice in extension.ScaledMmProblem(8, 144, 256, 1, "int8", out_dtype, False, full).choices(gpu)
            }
            for full in (False, True)
        )
        assert not any("full epilogue" in words for words in plain)
        any_epilogue = ("generic", "sm80")
        assert all("full epilogue" in words or words.startswith(any_epilogue) for words in full)
