"""conv_general_dilated on the reference, against integers and float64 in numpy."""

import dataclasses
import math
import re

import conv_oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conv_oracle import case, int8
from hypothesis import assume, given, settings, strategies as st

import jax_qmm
from jax_qmm import W4A16, W8A8, W8A16, QArray

ONE = np.ones((1, 1, 1, 1), np.float32)


def assert_same(got, want):
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@st.composite
def cases(draw):
    """A case, its operands and all that follows the sums, and orders of the axes."""
    rank = draw(st.integers(0, 3))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))
    c = case(
        each(1, 6),
        each(1, 3),
        each(1, 3),
        tuple(zip(each(-1, 3), each(-1, 3))),
        each(1, 2),
        each(1, 2) if draw(st.booleans()) else None,
        images=draw(st.sampled_from([0, 1, 2, 3])),
        channels=draw(st.integers(0, 5)),
        out=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 3)),
    )
    assume(all(size + sum(pair) >= 0 for size, pair in zip(c.spatial, c.padding)))  # lax crops no more
    orders = [draw(st.permutations(letters)) for letters in c.numbers()]
    in_order = iter("XYZ")  # lax reads strides and paddings in the order of the spatial axes of rhs
    orders[1] = [next(in_order) if letter in "XYZ" else letter for letter in orders[1]]
    pick = lambda *choices: draw(st.sampled_from(choices))
    return c, orders, pick, draw(st.integers(0, 2**32 - 1))


def by_batch_groups(groups, function, *vectors):
    """The result of a function of the images and output channels of each group of the batch; None stays None."""
    split = lambda x: [x] * groups if x is None or len(x) == 1 != groups else np.split(x, groups)
    return np.concatenate([function(*each) for each in zip(*map(split, vectors))], -1)


@settings(max_examples=60)
@given(cases())
def test_every_parameter(oracle, drawn):
    c, orders, pick, seed = drawn
    rng = np.random.default_rng(seed)
    groups = pick(1, 2, 3) if c.groups == 1 else 1  # of the batch; lax has one kind at once
    many = lambda shape: (groups * shape[0], *shape[1:])
    lhs, rhs = int8(rng, *many(c.lhs_shape())), int8(rng, *many(c.rhs_shape()))
    many_l, many_r = pick(1, lhs.shape[0]), pick(1, rhs.shape[0])
    scale_l, scale_r = rng.normal(size=many_l).astype(np.float32), rng.normal(size=many_r).astype(np.float32)
    zero_l = pick(None, rng.integers(-128, 128, many_l).astype(np.int32))
    zero_r = pick(None, rng.integers(-128, 128, many_r).astype(np.int32))
    bias = pick(None, rng.normal(size=rhs.shape[0]).astype(np.float32))
    activation = pick(None, "relu", "relu6", (-1.5, 2.0))
    out_dtype = pick(jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn, jnp.int32)
    kind = pick(None, "float", "int8", "int8 with a zero point")
    output = dict(out_scale=np.float32(0.7)) if out_dtype in (jnp.int8, jnp.float8_e4m3fn) else {}
    output |= dict(out_zero_point=-3) if out_dtype == jnp.int8 else {}
    if out_dtype == jnp.int32:
        bias, activation, kind = None, None, None
    of_result = conv_oracle.sums(c, np.zeros(c.lhs_shape(), int), np.zeros(c.rhs_shape(), int)).shape
    of_result = groups * of_result[-1], *of_result[:-1]  # as the oracle has it, channels first
    residual = None
    if kind:
        residual = rng.normal(size=of_result).astype(np.float32) if kind == "float" else int8(rng, *of_result)
    scale, zero_point = np.float32(rng.normal()), np.int32(-5) if kind == "int8 with a zero point" else None

    def of_group(lhs, zero_l, scale_l, rhs, zero_r, scale_r, bias, residual):
        difference = lambda q, zero: q.astype(np.int64) - (0 if zero is None else along_first(zero, q.ndim))
        acc = conv_oracle.sums(c, difference(lhs, zero_l), difference(rhs, zero_r)).astype(np.int32)
        if out_dtype == jnp.int32:
            return acc
        per_image = np.broadcast_to(along_first(scale_l, acc.ndim - 1), acc.shape[:-1])
        options = dict(activation=activation, out_dtype=np.dtype(out_dtype), **output)
        if residual is not None:
            residual = np.moveaxis(residual, 0, -1)
            options["residual"] = residual if kind == "float" else (scale, residual - np.int32(zero_point or 0))
        return oracle.epilogue(acc, per_image, scale_r, bias, **options)

    want = by_batch_groups(groups, of_group, lhs, zero_l, scale_l, rhs, zero_r, scale_r, bias, residual)

    def quantized(q, scale, zero, letters, order):
        leaves = (q, *(None if v is None else along_first(v, q.ndim) for v in (scale, zero)))
        return QArray(*(None if v is None else jnp.asarray(conv_oracle.transposed(v, letters, order)) for v in leaves))

    letters = c.numbers()
    if kind:
        in_order = jnp.asarray(conv_oracle.transposed(np.moveaxis(residual, 0, -1), letters[2], orders[2]))
        as_given = lambda x: None if x is None else jnp.full((1,) * in_order.ndim, x)
        residual = in_order if kind == "float" else QArray(in_order, as_given(scale), as_given(zero_point))
    got = jax_qmm.conv_general_dilated(
        quantized(lhs, scale_l, zero_l, letters[0], orders[0]),
        quantized(rhs, scale_r, zero_r, letters[1], orders[1]),
        **c.keywords() | dict(dimension_numbers=tuple(map("".join, orders)), batch_group_count=groups),
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=out_dtype,
        **output,
    )
    assert_same(got, conv_oracle.transposed(want, letters[2], orders[2]))


def along_first(vector, ndim):
    return vector.reshape(-1, *(1,) * (ndim - 1))


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("numbers", [None, ("NHWC", "HWIO", "NHWC"), ("HWNC", "IHOW", "NHCW")])
def test_agrees_with_lax_where_floats_are_exact(padding, groups, numbers):
    lhs_letters, rhs_letters, _ = numbers or ("NCHW", "OIHW", None)
    rng, sizes = np.random.default_rng(0), dict(N=4, C=6, H=9, W=7)
    of_rhs = dict(O=4, I=6 // groups[0], H=3, W=2)
    lhs, rhs = (
        jnp.asarray(int8(rng, *(sizes[x] for x in letters)))
        for letters, sizes in ((lhs_letters, sizes), (rhs_letters, of_rhs))
    )
    args = ((2, 1), padding, None, (1, 2), numbers, *groups)
    want = jax.lax.conv_general_dilated(lhs.astype(jnp.float32), rhs.astype(jnp.float32), *args)
    got = jax_qmm.conv_general_dilated(QArray(lhs, ONE), QArray(rhs, ONE), *args, preferred_element_type=jnp.int32)
    assert_same(got, np.asarray(want).astype(np.int32))


def test_sums_wrap_at_the_extremes():
    c = case((3, 3), (3, 3), padding=((1, 1), (1, 1)), images=1, channels=20000, out=1)
    lhs, rhs = np.full(c.lhs_shape(), -128, np.int8), np.full(c.rhs_shape(), -128, np.int8)
    zero = np.full((1, 1, 1, 1), 127, np.int32)
    got = jax_qmm.conv_general_dilated(
        QArray(jnp.asarray(lhs), ONE, zero), QArray(jnp.asarray(rhs), ONE, zero), **c.keywords(), out_dtype=jnp.int32
    )
    want = conv_oracle.sums(c, lhs.astype(np.int64) - 127, rhs.astype(np.int64) - 127)
    assert np.abs(want).max() > 2**31
    assert_same(got, want.astype(np.int32))


def test_without_qarrays_it_is_the_function_of_lax():
    lhs, rhs = jnp.ones((2, 3, 8)), jnp.ones((4, 3, 3))
    assert_same(
        jax_qmm.conv_general_dilated(lhs, rhs, (1,), "SAME"),
        np.asarray(jax.lax.conv_general_dilated(lhs, rhs, (1,), "SAME")),
    )


def test_no_images_in_groups_of_the_batch():
    c = case((3,), (2,), images=0, channels=2, out=4)
    lhs, rhs = (QArray(jnp.zeros(shape, jnp.int8), ONE[0]) for shape in (c.lhs_shape(), c.rhs_shape()))
    assert jax_qmm.conv_general_dilated(lhs, rhs, **c.keywords(), batch_group_count=2).shape == (0, 2, 4)


# A float lhs


def image(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


NHWC = dict(window_strides=(2, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
SCHEMES = {
    "default": None,
    "of each image": W8A8(symmetric=False),
    "of all": W8A8(activation="per_tensor"),
    "static": W8A8(activation_scale=0.02),
    "static, asymmetric": W8A8(symmetric=False, weight_symmetric=False, activation_scale=0.02, activation_zero_point=9),
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_float_lhs_is_quantized_as_the_scheme_says(kind):
    scheme = SCHEMES[kind]
    x = image(3, 6, 5, 4, dtype=ml_dtypes.bfloat16)
    w = (scheme or W8A8()).quantize_weight(image(3, 3, 4, 8, seed=1), (0, 1, 2))
    quantized = (scheme or W8A8()).quantize_activation(x, 3)
    assert quantized.scale.shape[0] == (3 if kind in ("default", "of each image") else 1)
    got = jax_qmm.conv_general_dilated(x, w, **NHWC, scheme=scheme)
    want = jax_qmm.conv_general_dilated(quantized, w, **NHWC, out_dtype=jnp.float32)
    assert_same(got, np.asarray(want))
    order = ("HWCN", "HWIO", "HWCN")  # images last
    turned = jax_qmm.conv_general_dilated(
        x.transpose(1, 2, 3, 0), w, (2, 1), "SAME", dimension_numbers=order, scheme=scheme
    )
    assert_same(turned.transpose(3, 0, 1, 2), np.asarray(got))


@pytest.mark.parametrize("zero_points", ["none", "lhs", "rhs", "both"])
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.int32])
def test_a_window_of_one_value_is_a_product(oracle, zero_points, out_dtype):
    rng = np.random.default_rng(0)
    c = case((5, 3), (1, 1), images=3, channels=7, out=4)
    lhs, rhs = int8(rng, *c.lhs_shape()), int8(rng, *c.rhs_shape())
    scale_l, scale_r = rng.random((3, 1, 1, 1), np.float32), rng.random((4, 1, 1, 1), np.float32)
    zero_l = rng.integers(-128, 128, (3, 1, 1, 1)).astype(np.int32) * (zero_points in ("lhs", "both"))
    zero_r = rng.integers(-128, 128, (4, 1, 1, 1)).astype(np.int32) * (zero_points in ("rhs", "both"))
    f = lambda left, zl, right, zr: jax_qmm.conv_general_dilated(
        QArray(left, scale_l, zl if zero_points in ("lhs", "both") else None),
        QArray(right, scale_r, zr if zero_points in ("rhs", "both") else None),
        **c.keywords(),
        out_dtype=out_dtype,
    )
    args = list(map(jnp.asarray, (lhs, zero_l, rhs, zero_r)))
    want = conv_oracle.sums(c, lhs.astype(np.int64) - zero_l, rhs.astype(np.int64) - zero_r).astype(np.int32)
    if out_dtype == jnp.float32:
        want = oracle.epilogue(want, np.broadcast_to(scale_l[..., 0], want.shape[:-1]), scale_r[:, 0, 0, 0])
    assert_same(f(*args), want)
    (row,) = jax_qmm.explain(f, *args).rows
    raw_sums = out_dtype == jnp.int32 and zero_points != "none"
    assert row.op.startswith("conv (1x1" if raw_sums else "scaled_mm")


def test_a_chain_stays_in_int8():
    rng = np.random.default_rng(0)
    x = QArray(jnp.asarray(int8(rng, 1, 6, 6, 8)), 0.05 * ONE, np.full((1, 1, 1, 1), -5, np.int32))
    w = W8A8(symmetric=False).quantize_weight(image(3, 3, 8, 8), (0, 1, 2))
    to_int8 = dict(out_dtype=jnp.int8, out_scale=0.1, out_zero_point=-128, activation="relu6")
    f = lambda x, w: jax_qmm.conv_general_dilated(x, w, **NHWC, **to_int8)
    y = jax_qmm.conv_general_dilated(x, w, **NHWC, activation="relu6", out_dtype=jnp.float32)
    want = jax_qmm.quantize(y, axis=None, scale=0.1, zero_point=-128, symmetric=False).qvalue
    assert_same(f(x, w), np.asarray(want))
    assert [row.out for row in jax_qmm.explain(f, x, w).rows] == ["int8[1,3,6,8]"]


# Weights of 4 and 8 bits with blocks


WEIGHTS = {
    "int4, of each tap": lambda kernel: W4A16(4).quantize_weight(kernel, (0, 1, 2)),
    "int4, shared by the taps": lambda kernel: jax_qmm.quantize(
        kernel.transpose(3, 0, 1, 2), jnp.int4, axis=(1, 2, 3)
    ).transpose(1, 2, 3, 0),
    "int8 blocks, shared by the taps": lambda kernel: QArray(
        jnp.asarray(int8(np.random.default_rng(2), 6, *kernel.shape[:3])), image(6, 1, 1, 4), image(6, 1, 1, 4, seed=3)
    ).transpose(1, 2, 3, 0),
    "int8, asymmetric": lambda kernel: W8A16(8, symmetric=False).quantize_weight(kernel, (0, 1, 2)),
    "int8, of each channel": lambda kernel: W8A16(None).quantize_weight(kernel, (0, 1, 2)),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("taps", [(3, 3), (1, 1)])
def test_weight_only_is_the_convolution_of_dequantized_weights(kind, taps):
    c = case((5, 4), taps, padding=tuple((t // 2, t // 2) for t in taps), images=2, channels=16, out=6)
    w = WEIGHTS[kind](image(*taps, 16, 6, seed=1))
    x, bias = image(*c.lhs_shape()), image(6, seed=4)
    numbers = ("NHWC", "HWIO", "NHWC")
    options = c.keywords() | dict(dimension_numbers=numbers, scheme=None if w.qtype == jnp.int4 else W8A16())
    f = lambda x, w: jax_qmm.conv_general_dilated(x, w, **options, bias=bias, activation="relu", precision="highest")
    dense = np.float64(w.dequantize()).transpose(3, 0, 1, 2)
    want = conv_oracle.sums(c, np.float64(x), dense) + np.float64(bias)
    most = conv_oracle.sums(c, np.abs(np.float64(x)), np.abs(dense)) + np.abs(np.float64(bias))
    # Sums of K + 1 values in any order, each of which a float32 weight has rounded once.
    bound = (16 * taps[0] * taps[1] + 2) * 2.0**-24 * most
    assert (np.abs(np.float64(f(x, w)) - np.maximum(want, 0)) <= bound).all()
    (row,) = jax_qmm.explain(f, x, w).rows
    assert row.op.startswith("weight-only conv" if taps == (3, 3) else "block_scaled_mm")


WEIGHT_ONLY = (W4A16(4), W4A16(4, symmetric=False), W4A16(None), W8A16(8), W8A16(None, symmetric=False))


@pytest.mark.parametrize("scales", [(4, 1, 1, 1), (4, 1, 1, 2), (4, 3, 3, 1), (1, 3, 1, 2)])
def test_scales_of_several_outputs_and_taps(scales):
    rng = np.random.default_rng(0)
    values, x = rng.integers(-8, 8, (16, 3, 3, 8)), image(2, 6, 5, 8, seed=1)
    w = QArray(jnp.asarray(values, jnp.int4), jnp.asarray(rng.uniform(0.5, 2, scales), jnp.float32))
    options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
    got = jax_qmm.conv_general_dilated(jnp.asarray(x), w, **options)
    want = jax.lax.conv_general_dilated(jnp.asarray(x), w.dequantize(), **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=75 * 2.0**-24 * 72 * 16 * np.abs(x).max())


@given(cases())
def test_weight_only_of_every_parameter(drawn):
    c, orders, pick, seed = drawn
    c = dataclasses.replace(c, channels=4 * c.channels)
    rng = np.random.default_rng(seed)
    groups = pick(1, 2, 3) if c.groups == 1 else 1  # of the batch
    many = lambda shape: (groups * shape[0], *shape[1:])
    x, kernel = image(*many(c.lhs_shape()), seed=rng), image(*many(c.rhs_shape()), seed=rng)
    bias, activation = pick(None, image(kernel.shape[0], seed=rng)), pick(None, "relu", (-1.5, 2.0))
    letters, low, high = c.numbers(), *{None: (-np.inf, np.inf), "relu": (0, np.inf)}.get(activation, activation)
    axes = [axis for axis, letter in enumerate(orders[1]) if letter != "O"]
    scheme = pick(*WEIGHT_ONLY)
    w = scheme.quantize_weight(conv_oracle.transposed(kernel, letters[1], orders[1]), axes)
    got = jax_qmm.conv_general_dilated(
        jnp.asarray(conv_oracle.transposed(x, letters[0], orders[0])),
        w,
        **c.keywords() | dict(dimension_numbers=tuple(map("".join, orders)), batch_group_count=groups),
        scheme=scheme,
        bias=bias,
        activation=activation,
        precision="highest",
    )
    dense = np.float64(conv_oracle.transposed(w.dequantize(), orders[1], letters[1]))
    of_group = lambda x, w, b: conv_oracle.sums(c, x, w) + (0 if b is None else b)
    exact, most = (
        by_batch_groups(groups, of_group, *(None if v is None else of(np.float64(v)) for v in (x, dense, bias)))
        for of in (np.asarray, np.abs)
    )
    exact, most = (conv_oracle.transposed(v, letters[2], orders[2]) for v in (exact, most))
    # Sums in any order of values that are rounded at most twice, their product and the weight; and the bias.
    bound = (c.channels * math.prod(c.taps) + 3) * 2.0**-24 * most
    assert got.shape == exact.shape
    assert (np.abs(np.float64(got) - np.clip(exact, low, high)) <= bound).all()


@pytest.mark.parametrize("taps", [3, 1])
@pytest.mark.parametrize("quantized", [False, True])
def test_weight_only_with_a_residual(taps, quantized):
    x, w = image(2, 6, 6, 8), W4A16(4).quantize_weight(image(taps, taps, 8, 4, seed=1), (0, 1, 2))
    residual = image(2, 3, 6, 4, seed=2)
    if quantized:
        residual = jax_qmm.quantize(residual, jnp.int8, axis=None)
    options = NHWC | dict(bias=image(4, seed=3), precision="highest")
    got = jax_qmm.conv_general_dilated(x, w, **options, residual=residual, activation="relu")
    y = jax_qmm.conv_general_dilated(x, w, **options)
    added = np.asarray(residual.dequantize() if quantized else residual)
    assert_same(got, np.maximum(np.asarray(y) + added, 0))


def test_a_scheme_keeps_lhs_float_beside_plain_int8():
    w = W8A8().quantize_weight(image(3, 3, 4, 8), (0, 1, 2))
    x = image(1, 5, 5, 4)
    got = jax_qmm.conv_general_dilated(x, w, **NHWC, scheme=W8A16())
    want = jax.lax.conv_general_dilated(x, w.dequantize(), **NHWC)
    assert_same(got, np.asarray(want))


@pytest.mark.parametrize("scheme", [W8A8(), W4A16(2)], ids=str)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_explain_names_transposes_of_images(scheme, layout):
    w = scheme.quantize_weight(jnp.ones((4, 3, 3, 6)), (1, 2, 3))
    f = lambda x: jax_qmm.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=(layout, "OHWI", layout))
    x = jnp.ones((2, 8, 8, 6) if layout == "NHWC" else (2, 6, 8, 8), jnp.bfloat16)
    rows = [row for row in jax_qmm.explain(f, x).rows if row.op == "transpose"]
    assert [row.out[row.out.index("[") :] for row in rows] == ([] if layout == "NHWC" else ["[2,8,8,6]", "[2,4,8,8]"])


# Bad input

X, Q = np.ones((2, 8, 8, 6), np.float32), W8A8().quantize_weight(jnp.ones((3, 3, 6, 4)), (0, 1, 2))
QX = QArray(jnp.ones((2, 8, 8, 6), jnp.int8), ONE)
Q4 = W4A16(2).quantize_weight(jnp.ones((3, 3, 6, 4)), (0, 1, 2))
RESIDUAL = np.ones((2, 4, 8, 4), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(feature_group_count=4), ValueError, "feature_group_count is 4; lhs of shape (2, 8, 8, 6) has 6 channels"),
        (dict(feature_group_count=2), ValueError, "takes 6 channels in axis 2; with lhs of shape (2, 8, 8, 6) and"),
        (dict(feature_group_count=0), ValueError, "feature_group_count is 0; it needs to be a positive int"),
        (dict(batch_group_count=4), ValueError, "batch_group_count is 4; lhs of shape (2, 8, 8, 6) has 2 in its batch"),
        (dict(batch_group_count=3), ValueError, "batch_group_count is 3; rhs of shape (3, 3, 6, 4) has 4 output"),
        (dict(feature_group_count=2, batch_group_count=2), ValueError, "one of them needs to be 1"),
        (dict(lhs=X[..., :5]), ValueError, "takes 6 channels in axis 2; with lhs of shape (2, 8, 8, 5)"),
        (dict(lhs=X[0]), ValueError, "lhs has shape (8, 8, 6) and rhs (3, 3, 6, 4); they need as many axes"),
        (dict(lhs=X.astype(np.int32)), TypeError, "lhs has dtype int32"),
        (dict(rhs=np.ones((3, 3, 6, 4), np.float32), lhs=QX), TypeError, "rhs is a ndarray; it needs to be a QArray"),
        (
            dict(rhs=jax_qmm.quantize(jnp.ones((3, 3, 6, 4)), jnp.float8_e4m3fn)),
            TypeError,
            "rhs has values of float8_e4m3fn; it needs int8 or int4",
        ),
        (dict(lhs=QX, rhs=Q4), ValueError, "beside a QArray as lhs it needs int8 values"),
        (dict(rhs=Q4, scheme=W8A8()), ValueError, "beside scheme W8A8(int8, per_token) it needs int8 values"),
        (dict(scheme=W4A16()), ValueError, "scheme has dtype int4, needs that of the QArray, int8"),
        (dict(lhs=QX, scheme=W8A8()), ValueError, "both operands are QArrays already"),
        (
            dict(lhs=QArray(jnp.ones((2, 8, 8, 6), jnp.int8), np.ones((2, 8, 1, 1), np.float32))),
            ValueError,
            "needs one scale, or one for each image",
        ),
        (dict(window_strides=(1,)), ValueError, "window_strides is (1,); it needs 2 positive ints"),
        (dict(rhs_dilation=(0, 1)), ValueError, "rhs_dilation is (0, 1); it needs 2 positive ints"),
        (dict(padding=((1, 1),)), ValueError, "padding is ((1, 1),); it needs 2 pairs of ints"),
        (dict(lhs_dilation=(2, 1)), ValueError, "padding is 'SAME'; with lhs_dilation (2, 1) it needs to be pairs"),
        (dict(bias=np.ones(3, np.float32)), ValueError, "bias has shape (3,); it needs (4,)"),
        (dict(bias=np.ones(4, np.int32)), TypeError, "bias has dtype int32"),
        (dict(out_dtype=jnp.int8), ValueError, "out_dtype is int8; it needs out_scale"),
        (dict(out_scale=1.0), ValueError, "out_scale was given with out_dtype float32"),
        (dict(out_dtype=jnp.int32, activation="relu"), ValueError, "out_dtype int32 gives the sums"),
        (dict(out_dtype=jnp.int32, residual=RESIDUAL), ValueError, "out_dtype int32 gives the sums"),
        (dict(residual=RESIDUAL[..., :3]), ValueError, "residual has shape (2, 4, 8, 3); it needs that of the result"),
        (dict(residual=RESIDUAL.astype(np.int8)), TypeError, "residual has dtype int8"),
        (dict(residual=W8A8().quantize_activation(RESIDUAL, 3)), TypeError, "with one scale and an int32 zero point"),
        (dict(residual=jax_qmm.quantize(RESIDUAL, jnp.int4, axis=None)), TypeError, "it needs values of int8"),
        (dict(out_dtype=jnp.float32, preferred_element_type=jnp.bfloat16), ValueError, "they need to be the same"),
        (dict(rhs=Q4, out_dtype=jnp.int8, out_scale=1.0), TypeError, "it needs to be float32, bfloat16 or float16"),
        (
            dict(rhs=np.ones((3, 3, 6, 4), np.float32), bias=np.ones(4)),
            TypeError,
            "needs to be a QArray for the keywords",
        ),
    ],
    ids=str,
)
def test_bad_input_is_named(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        jax_qmm.conv_general_dilated(**dict(lhs=X, rhs=Q) | NHWC | change)
