"""The public functions with the whole epilogue on the GPU: int8 bit for bit as in numpy, and as the reference."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm

pytestmark = pytest.mark.gpu

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
SHAPES = [(1, 64, 128), (7, 65, 33), (33, 72, 144), (130, 257, 515), (64, 8, 272)]
FUNCTIONS = {
    "none": jax_qmm.scaled_mm,
    "tensor": jax_qmm.scaled_mm_azp,
    "token": jax_qmm.scaled_mm_azp_per_token,
    "both": jax_qmm.scaled_mm_zero_points,
}
OUTPUTS = [
    {"out_dtype": BF16, "activation": "relu"},
    {"out_dtype": np.float32, "activation": (-3, 2.5)},
    {"out_dtype": np.int8, "out_scale": np.float32(0.11)},
    {"out_dtype": np.int8, "out_scale": np.float32(0.11), "out_zero_point": -128, "activation": "relu6"},
    {"out_dtype": E4M3, "out_scale": np.float32(0.02), "activation": "relu"},
]


def operands(m, n, k, zero_points, seed=0):
    """The arguments of the function, and what the oracle takes for its zero points; the results are about 5."""
    rng = np.random.default_rng([seed, m, n, k])
    a, b = (rng.integers(-128, 128, shape, dtype=np.int8) for shape in ((m, k), (n, k)))
    scales = rng.random(m, np.float32), rng.random(n, np.float32) * np.float32(1e-3 / np.sqrt(k) * 4)
    bias, sums = rng.standard_normal(n, np.float32), b.sum(1, dtype=np.int32)
    azp, azp_b = (rng.integers(-128, 128, size, dtype=np.int32) for size in (m, n))
    extra, known = {
        "none": ((), {}),
        "tensor": ((-9 * sums,), {"azp_adj": -9 * sums}),
        "token": ((sums, azp), {"azp_adj": sums, "azp": azp}),
        "both": (
            (azp, azp_b),
            {"azp": azp, "azp_adj": sums, "sums_a": a.sum(1, dtype=np.int32) - k * azp, "azp_b": azp_b},
        ),
    }[zero_points]
    return (a, b, *scales, *extra, bias), known


def assert_same(got, want):
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
@pytest.mark.parametrize("zero_points", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_is_exact(oracle, shape, zero_points, output):
    args, known = operands(*shape, zero_points)
    got = jax.jit(functools.partial(FUNCTIONS[zero_points], **output))(*args)
    a, b, scale_a, scale_b, *_, bias = args
    assert_same(got, oracle.scaled_mm(a, b, scale_a, scale_b, bias, **known, **output))


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("zero_points", FUNCTIONS)
def test_smooth_activations_stay_within_the_documented_bound(oracle, on_reference, zero_points, activation):
    args, known = operands(33, 72, 144, zero_points)
    f = functools.partial(FUNCTIONS[zero_points], activation=activation, out_dtype=jnp.float32)
    a, b, scale_a, scale_b, *_, bias = args
    y = oracle.scaled_mm(a, b, scale_a, scale_b, bias, **known).astype(np.float64)
    exact, bound = oracle.activated(y, activation), 2.0**-20 * np.abs(y)
    for got in (jax.jit(f)(*args), on_reference(f, *args)):
        assert np.all(np.abs(np.asarray(got, np.float64) - exact) <= bound + 2.0**-24 * np.abs(y))
    assert np.abs(exact - y).max() > 0.1


@pytest.mark.parametrize("mapped", ["a", "b", "o", "z", "abo", "abzo"])
def test_vmap(oracle, mapped):
    """o: out_scale, z: the zero points of a."""
    a, b, s, t, z, w, c = (np.stack(x) for x in zip(*(operands(33, 72, 144, "both", seed)[0] for seed in range(3))))
    args = {"a": a, "b": b, "z": z, "o": np.float32([0.1, 0.2, 0.3])}
    args = {name: x if name in mapped else x[0] for name, x in args.items()}
    f = lambda a, b, z, o: jax_qmm.scaled_mm_zero_points(
        a, b, s[0], t[0], z, w[0], c[0], activation="relu", out_scale=o, out_zero_point=-5, out_dtype=jnp.int8
    )
    got = jax.jit(jax.vmap(f, [0 if name in mapped else None for name in args]))(*args.values())
    for i in range(3):
        a, b, z, o = (x[i] if name in mapped else x for name, x in args.items())
        rows = a.sum(1, dtype=np.int32) - 144 * z
        terms = dict(azp=z, azp_adj=b.sum(1, dtype=np.int32), sums_a=rows, azp_b=w[0])
        output = dict(activation="relu", out_scale=o, out_zero_point=-5, out_dtype=np.int8)
        assert_same(got[i], oracle.scaled_mm(a, b, s[0], t[0], c[0], **terms, **output))


def test_a_chain_of_int8_products(on_reference):
    """scaled_mm -> int8 -> scaled_mm -> float8, with nothing between: kernel and reference, bit for bit."""
    (a, b, s, t, *_, c), _ = operands(40, 64, 96, "none")
    last = operands(8, 48, 64, "none", 1)[0][1]

    def chain(a):
        options = {"activation": "relu6", "out_scale": 6 / 255, "out_zero_point": -128, "out_dtype": jnp.int8}
        hidden = jax_qmm.scaled_mm(a, b, s, t, c, **options)
        adj = -128 * jax_qmm.azp_adjustment(last)
        return jax_qmm.scaled_mm_azp(hidden, last, 6 / 255, 1e-3, adj, out_scale=0.01, out_dtype=E4M3)

    assert_same(jax.jit(chain)(a), np.asarray(on_reference(chain, a)))


@pytest.mark.parametrize("shape", [(0, 8, 16), (8, 0, 16), (8, 16, 0)], ids=str)
def test_empty_dimensions(oracle, shape):
    (a, b, s, t, z, w, c), known = operands(*shape, "both") if shape[2] else operands(8, 16, 1, "both")
    a, b = a[:, : shape[2]], b[:, : shape[2]]
    got = jax.jit(lambda *args: jax_qmm.scaled_mm_zero_points(*args, out_scale=0.1, out_dtype=jnp.int8))(
        a, b, s, t, z, w, c
    )
    known |= {"azp_adj": b.sum(1, dtype=np.int32), "sums_a": a.sum(1, dtype=np.int32) - shape[2] * z}
    assert_same(got, oracle.scaled_mm(a, b, s, t, c, **known, out_scale=0.1, out_dtype=np.int8))


def test_fp8_operands(oracle):
    rng = np.random.default_rng(0)
    a, b = (rng.choice([-1, 0, 0, 1, 2], shape).astype(E4M3) for shape in ((33, 200), (72, 200)))  # exact sums
    scales = rng.random(33, np.float32), rng.random(72, np.float32)
    for output in OUTPUTS:
        assert_same(
            jax.jit(functools.partial(jax_qmm.scaled_mm, **output))(a, b, *scales),
            oracle.scaled_mm(a, b, *scales, **output),
        )


def test_the_kernel_is_named():
    (a, b, s, t, z, w, c), _ = operands(33, 72, 144, "both")
    f = lambda *args: jax_qmm.scaled_mm_zero_points(*args, activation="silu")
    (row,) = jax_qmm.explain(f, a, b, s, t, z, w, c).rows
    assert "sums_a, azp_b" in row.op and "silu" in row.op and "reference" not in row.runs_on
    text = jax.jit(f).lower(a, b, s, t, z, w, c).compile().as_text()
    assert text.count('custom_call_target="jax_qmm_scaled_mm"') == 1
