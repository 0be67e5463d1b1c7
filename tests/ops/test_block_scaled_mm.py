"""Forward against numpy in float64, bad input, explain."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm
from jax_qmm import QArray, _extension

INT4, INT8 = np.dtype(ml_dtypes.int4), np.dtype(np.int8)
BF16, F16, F32 = (np.dtype(d) for d in (ml_dtypes.bfloat16, np.float16, np.float32))


def weight(n, k, qtype=INT4, tile_size=None, zero_point=None, scale_dtype=F32, seed=0):
    """A QArray, and what it stands for in float64."""
    rng, bounds, tile = np.random.default_rng(seed), ml_dtypes.iinfo(qtype), tile_size or max(k, 1)
    q = rng.integers(bounds.min, bounds.max + 1, (n, k)).astype(np.int8)
    blocks = (n, -(-k // tile) if k else int(tile_size is None))
    scale = (rng.uniform(0.5, 2, blocks) * rng.choice([-1, 1], blocks)).astype(scale_dtype)
    z = None
    if zero_point == "int":
        z = rng.integers(bounds.min, bounds.max + 1, blocks).astype(np.int32)
    elif zero_point is not None:
        z = rng.normal(size=blocks).astype(zero_point)
    along = lambda leaf: np.repeat(leaf.astype(np.float64), tile, -1)[:, :k]
    dense = (q - (0 if z is None else along(z))) * along(scale)
    leaves = (jnp.asarray(q.astype(qtype)), jnp.asarray(scale), None if z is None else jnp.asarray(z))
    return QArray(*leaves, tile_size=tile_size), dense


def normal(shape, dtype=F32, seed=9):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def activated(y, activation):
    if isinstance(activation, tuple):
        return np.clip(y, *activation)
    gelu = lambda y: 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return {
        None: lambda y: y,
        "relu": lambda y: np.maximum(y, 0),
        "relu6": lambda y: np.clip(y, 0, 6),
        "gelu": gelu,
        "silu": lambda y: y / (1 + np.exp(-y)),
    }[activation](y)


def assert_near(got, x, dense, bias=0.0, activation=None):
    """Within the rounding of the sums in float32, and of the result to its dtype."""
    x, k = np.asarray(x, np.float64), dense.shape[1]
    y = activated(x @ dense.T + bias, activation)
    # Each product, weight (3 roundings), sum and the bias is rounded once; an activation is within 2**-20 and has a
    # slope below 1.13.
    sums = (k + 8) * 2.0**-24 * (np.abs(x) @ np.abs(dense).T + np.abs(bias) + 128 * 4 * 2.0**-24)
    rounding = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-23}[np.dtype(got.dtype)]
    bound = 1.13 * sums + (rounding + 2.0**-20) * np.abs(y) + 2.0**-24
    assert got.shape == y.shape and (np.abs(np.asarray(got, np.float64) - y) <= bound).all()


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 300)),
    st.sampled_from([INT4, INT8]),
    st.sampled_from([None, 16, 32, 64, 100, 128, 256]),
    st.sampled_from([None, "int", F32, BF16, F16]),
    st.sampled_from([F32, BF16, F16]),
    st.sampled_from([F32, BF16, F16]),
    st.booleans(),
)
def test_is_the_product_with_the_dequantized_weight(shape, qtype, tile_size, zero_point, scale_dtype, dtype, packed):
    m, n, k = shape
    w, dense = weight(n, k, qtype, tile_size, zero_point, scale_dtype)
    x, bias = normal((m, k), dtype), normal(n)
    got = jax_qmm.block_scaled_mm(x, w.pack() if packed else w, bias)
    assert got.dtype == dtype
    assert_near(got, x, dense, bias)


@pytest.mark.parametrize("activation", [None, "relu", "relu6", "gelu", "silu", (-1, 2.5)])
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
def test_epilogues(activation, out_dtype):
    w, dense = weight(12, 200, tile_size=64, zero_point="int")
    x, bias = normal((2, 3, 200), BF16) / BF16.type(20), normal(12, out_dtype)
    got = jax_qmm.block_scaled_mm(x, w.pack(), bias, activation=activation, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    assert_near(got, x, dense, bias.astype(np.float64), activation)


def test_any_storage_and_granularity_of_a_plain_weight():
    w, dense = weight(12, 64, tile_size=16, zero_point="int")
    x = normal((3, 64))
    stored = QArray(w.qvalue.T, w.scale.T, w.zero_point.T).T  # (K, N) in memory
    assert stored.storage_axes() == (1, 0) and stored.shape == (12, 64)
    assert_near(jax_qmm.block_scaled_mm(x, stored), x, dense)
    tensor = QArray(w.qvalue, w.scale[:1, :1])
    assert_near(jax_qmm.block_scaled_mm(x, tensor.pack()), x, np.asarray(tensor.dequantize(), np.float64))
    squares = QArray(w.qvalue, w.scale[:3], w.zero_point[:3])  # a block is 4 rows of 16 columns
    assert_near(jax_qmm.block_scaled_mm(x, squares.pack()), x, np.asarray(squares.dequantize(), np.float64))
    ragged = QArray(w.qvalue.T, jnp.ones((4, 3)), tile_size=5).T  # blocks of 5, 5 and 2 rows
    assert_near(jax_qmm.block_scaled_mm(x, ragged), x, np.asarray(ragged.dequantize(), np.float64))


def test_an_offset_of_any_size():
    q = QArray.from_offset(jnp.int8([[1, 2], [3, -4]]), jnp.float32([[0.5], [0]]), jnp.float32([[1e4], [0.1]]))
    got = jax_qmm.block_scaled_mm(jnp.float32([[1, 1]]), q.pack())
    np.testing.assert_array_equal(got, np.float32([[20001.5, 0.2]]))


def test_nan_and_infinity_stay_in_their_row():
    w, dense = weight(5, 40, tile_size=16)
    x = normal((4, 40))
    x[1, 3], x[2, 0] = np.nan, np.inf
    got = np.asarray(jax_qmm.block_scaled_mm(x, w.pack()))
    assert np.isnan(got[1]).all() and not np.isfinite(got[2]).all()
    assert_near(got[[0, 3]], x[[0, 3]], dense)


def test_float16_does_not_overflow_inside():
    w = QArray(jnp.full((1, 256), 7, jnp.int4), jnp.full((1, 2), 60000, jnp.float16))
    x = np.zeros((1, 256), np.float16)
    x[0, 0], x[0, 1], x[0, 2] = 4, -4, 0.125
    assert jax_qmm.block_scaled_mm(x, w.pack()).tolist() == [[52512.0]]  # 52500 in float16


@pytest.mark.parametrize("qtype", [INT4, INT8])
@pytest.mark.parametrize("tile_size", [16, 128, None])
def test_quantize_makes_such_weights(qtype, tile_size):
    """The error of the product is that of the rounding of the weight: half a step, a whole one asymmetrically."""
    weights, x = normal((8, 300)), normal((4, 300), seed=1)
    for symmetric in (True, False):
        q = jax_qmm.quantize(weights, qtype, tile_size=tile_size, symmetric=symmetric).pack()
        error = np.abs(np.asarray(jax_qmm.block_scaled_mm(x, q)) - x.astype(np.float64) @ weights.T)
        steps = np.repeat(np.asarray(q.scale, np.float64), tile_size or 300, 1)[:, :300] * (0.5 if symmetric else 1)
        assert (error <= np.abs(x) @ steps.T * 1.001).all()


def test_explain_names_the_order_and_the_blocks():
    w, _ = weight(12, 200, tile_size=64, zero_point="int")
    x = normal((3, 200), BF16)
    f = lambda w: jax_qmm.block_scaled_mm(x, w, normal(12), activation="silu")
    (packed,), (plain,) = (jax_qmm.explain(f, q).rows for q in (w.pack(), w))
    assert packed.op == "block_scaled_mm (blocks of 64, packed, zero_point, bias, silu)"
    assert plain.op == "block_scaled_mm (blocks of 64, plain, zero_point, bias, silu)"
    assert packed.inputs == plain.inputs == "bfloat16[3,200] x int4[12,200]" and packed.out == "bfloat16[3,12]"
    (row,) = jax_qmm.explain(f, weight(12, 200, INT8)[0].pack()).rows
    assert row.op == "block_scaled_mm (per channel, packed, bias, silu)" and row.inputs.endswith("int8[12,200]")
    stored = QArray(w.qvalue.T, w.scale[:, :1].T).T
    assert [row.op for row in jax_qmm.explain(f, stored).rows][0] == "transpose"


def test_explain_says_that_a_plain_weight_is_packed_where_a_kernel_runs(monkeypatch):
    w, x = weight(12, 256, tile_size=64)[0], normal((3, 256), BF16)
    ways = lambda: [jax_qmm.explain(jax_qmm.block_scaled_mm, x, q).rows[0].runs_on for q in (w.pack(), w)]
    assert ways() == ["reference: platform cpu has no kernels"] * 2
    monkeypatch.setattr(_extension, "fallback_reason", lambda *where: None)
    monkeypatch.setattr(_extension, "describe_block_scaled_mm", lambda product: "a tile")
    assert ways() == ["a tile", "a tile, w packed at each call"]
    monkeypatch.setattr(_extension, "dequantizes_once", lambda devices, product: True)
    assert all(way.startswith("XLA: dequantized once") for way in ways())


@pytest.mark.parametrize(
    "epilogue, apart",
    [
        ({}, False),
        ({"bias": np.ones(12, np.float32)}, True),
        ({"bias": np.ones(12, BF16)}, False),
        ({"activation": "relu", "out_dtype": jnp.float32}, True),
        ({"activation": "relu"}, False),
        ({"activation": "relu6"}, True),
        ({"bias": np.ones(12, BF16), "activation": "relu"}, False),
    ],
)
def test_choices_know_what_takes_xla_a_pass_of_its_own(monkeypatch, epilogue, apart):
    w, x, known = weight(12, 256, tile_size=64)[0].pack(), normal((3, 256), BF16), []
    images, windows = x.reshape(3, 1, 1, 256), w.reshape(12, 1, 1, 256)
    epilogue = {"out_dtype": BF16} | epilogue
    moves = dict(window_strides=(2, 2), padding="SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
    monkeypatch.setattr(_extension, "fallback_reason", lambda *where: None)
    monkeypatch.setattr(_extension, "dequantizes_once", lambda devices, problem: known.append(problem[-1]) or True)
    jax_qmm.explain(lambda: jax_qmm.block_scaled_mm(x, w, **epilogue))
    jax_qmm.explain(lambda: jax_qmm.conv_general_dilated(images, windows, **moves, **epilogue))
    assert len(known) >= 2 and set(known) == {apart}


X, W = np.ones((2, 8), np.float32), QArray(np.ones((3, 8), ml_dtypes.int4), np.ones((3, 2), np.float32))


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        ((np.ones((2, 8), np.int8), W), {}, TypeError, "x has dtype int8; it needs an array of float32 or bfloat16"),
        (([[1.0]], W), {}, TypeError, "x is a list; it needs an array"),
        ((W, W), {}, TypeError, "x has values of int4; beside a QArray it needs int8 or float8_e4m3fn"),
        ((X[0], W), {}, ValueError, r"x has shape \(8,\); it needs two dimensions or more"),
        ((X, X), {}, TypeError, "w is a .*; it needs to be a QArray"),
        (
            (X, jax_qmm.quantize(X, "fp8")),
            {},
            TypeError,
            "w has values of float8_e4m3fn; beside floats it needs int4 or int8",
        ),
        ((X, QArray(W.qvalue[None], W.scale[None])), {}, ValueError, r"w has shape \(1, 3, 8\); it needs two"),
        ((X[:, :7], W), {}, ValueError, r"x has shape \(2, 7\) and w \(3, 8\); their last dimensions, K, need"),
        ((X, W.T), {}, ValueError, r"x has shape \(2, 8\) and w \(8, 3\)"),
        ((X[:, :3], W.pack().T), {}, ValueError, "w is QArray.*, which is packed along N"),
        ((X, W, np.ones(4, np.float32)), {}, ValueError, r"bias has shape \(4,\)"),
        ((X, W, np.ones(3, np.float16)), {}, TypeError, "bias has dtype float16"),
        ((X, W), {"out_dtype": jnp.int8}, TypeError, "out_dtype is int8; it needs to be bfloat16, float16 or float32"),
        ((X, W), {"activation": "tanh"}, ValueError, "activation is 'tanh'"),
    ],
)
def test_bad_input_is_refused(args, options, error, message):
    with pytest.raises(error, match=message):
        jax_qmm.block_scaled_mm(*args, **options)
