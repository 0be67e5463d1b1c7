import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm.ops import dispatch

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
INT8, INT4 = np.dtype(np.int8), np.dtype(ml_dtypes.int4)
FLOATS = (np.float32, ml_dtypes.bfloat16, np.float16)
TINY = np.float32(1.17549435e-38)


def oracle(x, qtype, axes, symmetric=True):
    """The definition in numpy: float32, each step rounded once."""
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        if symmetric:
            largest = np.float32(448 if qtype == E4M3 else ml_dtypes.iinfo(qtype).max)
            absmax = np.max(np.abs(x), axis=axes, keepdims=True, initial=0)
            scale, zero_point = np.maximum(absmax / largest, TINY), None
        else:
            lo, hi = (f(x, axis=axes, keepdims=True, initial=0) for f in (np.min, np.max))
            bounds = ml_dtypes.iinfo(qtype)
            scale = np.maximum((hi - lo) / np.float32(bounds.max - bounds.min), TINY)
            zero_point = np.clip(np.rint(np.float32(bounds.min) - lo / scale), bounds.min, bounds.max)
            zero_point = np.where(np.isnan(zero_point), 0, zero_point).astype(np.int32)
        return static_oracle(x, scale, zero_point, qtype), scale, zero_point


def static_oracle(x, scale, zero_point, qtype):
    with np.errstate(all="ignore"):
        q = x.astype(np.float32) / scale
        if qtype == E4M3:
            return np.clip(q, -448, 448).astype(E4M3)
        q = np.rint(q) if zero_point is None else np.rint(q) + zero_point.astype(np.float32)
        bounds = ml_dtypes.iinfo(qtype)
        return np.where(np.isnan(q), 0, np.clip(q, bounds.min, bounds.max)).astype(qtype)


def assert_equal(q, want):
    for name, got, leaf in zip(("qvalue", "scale", "zero_point"), (q.qvalue, q.scale, q.zero_point), want, strict=True):
        assert (got is None) == (leaf is None), name
        if leaf is not None:
            assert (got.dtype, got.shape) == (leaf.dtype, leaf.shape), name
            np.testing.assert_array_equal(np.asarray(got, np.float64), leaf.astype(np.float64), name)


@st.composite
def arrays(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 17]), min_size=1, max_size=4)))
    x = rng.normal(size=shape) * 10 ** draw(st.integers(-3, 4))
    if draw(st.booleans()) and x.size:
        special = draw(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 65504.0]))
        x[rng.random(shape) < 0.1] = special
    if draw(st.booleans()):
        x[:1] = draw(st.sampled_from([0.0, 1.0, -2.5]))  # a constant row
    return x.astype(draw(st.sampled_from(FLOATS)))


@st.composite
def axes_of(draw, x):
    axes = draw(st.sets(st.integers(0, x.ndim - 1), min_size=1))
    return tuple(sorted(axes))


kinds = st.sampled_from([(INT8, True), (INT8, False), (INT4, True), (INT4, False), (E4M3, True)])


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.data(), arrays(), kinds)
def test_dynamic_is_the_definition_bit_for_bit(data, x, kind):
    qtype, symmetric = kind
    axes = data.draw(axes_of(x))
    q = jax_qmm.quantize(x, qtype, axis=axes, symmetric=symmetric)
    assert_equal(q, oracle(x, qtype, axes, symmetric))


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.data(), arrays(), kinds)
def test_static_is_the_definition_bit_for_bit(data, x, kind):
    qtype, symmetric = kind
    axes = data.draw(axes_of(x))
    rng = np.random.default_rng(0)
    natural = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    given = data.draw(st.sampled_from([(), natural, (1,) * x.ndim, natural[-1:]]))
    scale = rng.normal(size=given).astype(data.draw(st.sampled_from(FLOATS)))
    zero_point = None if symmetric else rng.integers(-128, 128, given, np.int32)
    q = jax_qmm.quantize(x, qtype, axis=axes, scale=scale, zero_point=zero_point, symmetric=symmetric)
    spread = lambda leaf, dtype: None if leaf is None else np.broadcast_to(leaf.astype(dtype), natural)
    scale, zero_point = spread(scale, np.float32), spread(zero_point, np.int32)
    assert_equal(q, (static_oracle(x, scale, zero_point, qtype), scale, zero_point))


@hypothesis.settings(max_examples=12)
@hypothesis.given(st.integers(0, 3), st.integers(1, 5), st.integers(0, 1), kinds, st.booleans())
def test_tiles_are_blocks_with_a_scale_each(count, tile_size, axis, kind, static):
    qtype, symmetric = kind
    shape = (3, count * tile_size) if axis else (count * tile_size, 3)
    x = np.random.default_rng(count).normal(size=shape).astype(np.float32)
    blocked = x.reshape((3, count, tile_size) if axis else (count, tile_size, 3))
    qvalue, *parameters = oracle(blocked, qtype, axis + 1, symmetric)
    parameters = [None if leaf is None else leaf.squeeze(axis + 1) for leaf in parameters]
    given = dict(zip(("scale", "zero_point"), parameters)) if static else {}
    q = jax_qmm.quantize(x, qtype, axis=axis, tile_size=tile_size, symmetric=symmetric, **given)
    assert_equal(q, (qvalue.reshape(shape), *parameters))
    step = np.repeat(parameters[0], tile_size, axis)
    zero_point = 0 if symmetric else np.repeat(parameters[1], tile_size, axis)
    error = np.abs((np.asarray(q.qvalue, np.float32) - zero_point) * step - x)
    # integers: half a step, and half a step more for a rounded zero point; float8: half an ulp of 3 bits
    bound = np.abs(x) / 16 + step * 2.0**-10 if qtype == E4M3 else step * (0.5 if symmetric else 1)
    assert (error <= bound * 1.0001).all()


@hypothesis.settings(max_examples=12)
@hypothesis.given(st.integers(1, 20), st.integers(1, 24), kinds, st.booleans())
def test_the_last_block_may_be_short(columns, tile_size, kind, static):
    """As if zeros filled it up, which change no scale."""
    qtype, symmetric = kind
    x = np.random.default_rng(columns).normal(size=(3, columns)).astype(np.float32)
    filled = np.pad(x, ((0, 0), (0, -columns % tile_size))).reshape(3, -1, tile_size)
    qvalue, *parameters = oracle(filled, qtype, 2, symmetric)
    parameters = [None if leaf is None else leaf.squeeze(2) for leaf in parameters]
    given = dict(zip(("scale", "zero_point"), parameters)) if static else {}
    q = jax_qmm.quantize(x, qtype, tile_size=tile_size, symmetric=symmetric, **given)
    assert_equal(q, (qvalue.reshape(3, -1)[:, :columns], *parameters))
    assert q.tile_size == min(tile_size, columns)
    whole = jax_qmm.quantize(filled.reshape(3, -1), qtype, tile_size=tile_size, symmetric=symmetric, **given)
    np.testing.assert_array_equal(q.dequantize(), whole.dequantize()[:, :columns])


def test_axis_none_is_one_scale_and_strings_name_types():
    x = np.float32([[1, -2], [254, 0]])
    q = jax_qmm.quantize(x, "int8", axis=None)
    assert q.scale.tolist() == [[2.0]] and q.qvalue.tolist() == [[0, -1], [127, 0]]
    assert jax_qmm.quantize(x, axis=(-1, 0)).scale.shape == (1, 1)


def test_the_corners():
    q = jax_qmm.quantize(np.float32([[0, 0], [3, 3], [-3, -3], [np.nan, 1], [np.inf, 1], [0.5, 127]]))
    assert q.qvalue.tolist() == [[0, 0], [127, 127], [-127, -127], [0, 0], [0, 0], [0, 127]]
    dequantized = np.asarray(q.dequantize())
    np.testing.assert_array_equal(dequantized[:3], np.float32([[0, 0], [3, 3], [-3, -3]]))
    assert np.isnan(dequantized[3:5]).all()

    q = jax_qmm.quantize(np.float32([[0, 0], [255, 255], [-255, -255], [-1, 254], [np.nan, 1]]), symmetric=False)
    assert q.qvalue[:4].tolist() == [[-128, -128], [127, 127], [-128, -128], [-128, 127]]
    np.testing.assert_array_equal(q.dequantize()[:4], np.float32([[0, 0], [255, 255], [-255, -255], [-1, 254]]))
    assert np.isnan(q.dequantize()[4]).all() and q.zero_point[4] == 0

    q = jax_qmm.quantize(np.float32([-200, 0.5, 1.5, np.inf]), scale=1.0)
    assert q.qvalue.tolist() == [-128, 0, 2, 127]
    q = jax_qmm.quantize(np.float32([-1000, np.inf, np.nan]), jnp.float8_e4m3fn, scale=1.0)
    np.testing.assert_array_equal(q.qvalue.astype(np.float32), [-448, 448, np.nan])


@pytest.mark.parametrize("options", [{}, {"symmetric": False}, {"axis": 0}, {"tile_size": 4}, {"scale": 0.1}])
def test_a_derivative_is_refused(options):
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    loss = lambda x: jax_qmm.quantize(x, **options).dequantize().sum()
    for differentiate in (jax.grad(loss), jax.jit(jax.grad(loss)), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(TypeError, match="quantize has no derivative.* jax_qmm.fake_quantize"):
            differentiate(x)
    with pytest.raises(TypeError, match="quantize has no derivative"):
        jax.grad(lambda scale: jax_qmm.quantize(x, scale=scale).dequantize().sum())(0.1)
    # What carries no tangent is quantized as ever.
    constant = lambda y: y * loss(jax.lax.stop_gradient(x * y))
    np.testing.assert_allclose(jax.grad(constant)(2.0), loss(2 * x), rtol=1e-6)


def test_vmap():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4, 5, 6)).astype(np.float32)
    for axis, dim in ((2, 0), ((0, 2), 1), (None, 3)):
        each = functools.partial(jax_qmm.quantize, axis=axis, symmetric=False)
        got = jax.jit(jax.vmap(each, in_axes=dim))(x)
        axes = (0, 1, 2) if axis is None else axis
        want = [oracle(part, INT8, axes, symmetric=False) for part in np.moveaxis(x, dim, 0)]
        assert_equal(got, [np.stack(leaves) for leaves in zip(*want)])
    nested = jax.vmap(jax.vmap(functools.partial(jax_qmm.quantize, axis=None)))(x)
    assert_equal(nested, oracle(x, INT8, (2, 3)))
    scale = rng.random(3).astype(np.float32)
    zero_point = np.int32(5)
    static = lambda x, scale, zero_point: jax_qmm.quantize(x, scale=scale, zero_point=zero_point)
    for dims in ((0, 0, None), (None, 0, None), (0, None, None)):
        operands = x if dims[0] == 0 else x[0], scale if dims[1] == 0 else scale[0], zero_point
        each = [[v[i] if dim == 0 else v for v, dim in zip(operands, dims)] for i in range(3)]
        want = [static_oracle(*args, INT8) for args in each]
        got = jax.jit(jax.vmap(static, in_axes=dims))(*operands)
        np.testing.assert_array_equal(got.qvalue, np.stack(want))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec, options, all_reduces",
    [
        (P("x", "y", None), {}, 0),
        (P("x", None, "y"), {}, 1),
        (P("x", None, "y"), {"symmetric": False}, 1),
        (P(None, None, ("x", "y")), {"qtype": E4M3}, 1),
        (P("x", "y", None), {"axis": None, "symmetric": False}, 1),
        (P("x", "y", None), {"axis": 0}, 1),
        (P("x", None, "y"), {"axis": 1}, 0),
        (P("x", None, "y"), {"scale": 0.02}, 0),
    ],
)
def test_sharded_quantizers_exchange_extrema_at_most(kind, spec, options, all_reduces):
    x = np.random.default_rng(0).normal(size=(8, 4, 16)).astype(np.float32)
    x[0, 0, 3] = np.nan
    want = jax_qmm.quantize(x, **options)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(lambda x: jax_qmm.quantize(x, **options))
            .lower(jax.device_put(x, NamedSharding(mesh, spec)))
            .compile()
        )
        got = compiled(jax.device_put(x, NamedSharding(mesh, spec)))
    found = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", compiled.as_text())
    assert found == ["all-reduce"] * all_reduces
    assert got.qvalue.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert_equal(
        got,
        [leaf if leaf is None else np.asarray(leaf) for leaf in (want.qvalue, want.scale, want.zero_point)],
    )


@pytest.mark.parametrize("shape, spec", [((8, 10), P("x", "y")), ((6, 10), P(None, "y"))])
def test_sharded_by_a_constraint_alone(shape, spec):
    """jit sees no mesh in its arguments; the mesh does not divide an axis of 6, which is then not split."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        q = jax.jit(lambda x: jax_qmm.quantize(jax.lax.with_sharding_constraint(x, P("x", "y"))))(x)
    assert q.qvalue.sharding.spec == spec
    assert_equal(q, oracle(x, INT8, 1))


@pytest.mark.parametrize("spec", [P(None, "x"), P(None, ("x", "y")), P("y", "x")])
def test_sharded_within_blocks(spec):
    """Six blocks over four devices: the compiler may split them over two of the four."""
    x = np.random.default_rng(0).normal(size=(2, 48)).astype(np.float32)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    f = functools.partial(jax_qmm.quantize, tile_size=8, symmetric=False, sums=True)
    q = jax.jit(f)(jax.device_put(x, NamedSharding(mesh, spec)))
    want = f(x)
    assert_equal(q, [np.asarray(leaf) for leaf in (want.qvalue, want.scale, want.zero_point)])
    np.testing.assert_array_equal(q.azp_adj, want.azp_adj)


@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}])
def test_shard_map(manual):
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        for options in ({"symmetric": False}, {"scale": 0.1}):
            f = jax.shard_map(
                functools.partial(jax_qmm.quantize, **options), in_specs=P("x"), out_specs=P("x"), axis_names=manual
            )
            assert_equal(
                jax.jit(f)(x),
                [
                    leaf if leaf is None else np.asarray(leaf)
                    for leaf in (lambda q: (q.qvalue, q.scale, q.zero_point))(jax_qmm.quantize(x, **options))
                ],
            )


def test_shard_map_with_a_scale_for_each_device():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    f = lambda x, scale: jax_qmm.quantize(x, scale=scale[0]).qvalue
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(f, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())(jnp.ones((2, 3)), jnp.ones(4))


def lowered_for_cuda(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_cuda_lowering_calls_the_kernel_on_rows():
    x = jax.ShapeDtypeStruct((2, 3, 4), jnp.bfloat16)
    text = lowered_for_cuda(jax_qmm.quantize, x)
    assert "@jax_qmm_quantize_dynamic" in text and re.search(
        r"\(tensor<6x4xbf16>\) -> \(tensor<6x4xi8>, tensor<6x1xf32>, tensor<2xui32>\)", text
    )
    text = lowered_for_cuda(functools.partial(jax_qmm.quantize, axis=None, symmetric=False), x)
    assert re.search(
        r"\(tensor<6x4xbf16>\) -> \(tensor<6x4xi8>, tensor<1x1xf32>, tensor<2xui32>, tensor<1x1xi32>", text
    )
    text = lowered_for_cuda(functools.partial(jax_qmm.quantize, tile_size=2, qtype=E4M3), x)
    assert re.search(r"\(tensor<12x2xbf16>\) -> \(tensor<12x2xf8E4M3FN>, tensor<12x1xf32>", text)
    text = lowered_for_cuda(functools.partial(jax_qmm.quantize, scale=0.1, axis=None), x)
    assert "@jax_qmm_quantize_static" in text and re.search(
        r"\(tensor<6x4xbf16>, tensor<1x1xf32>\) -> tensor<6x4xi8>", text
    )
    per_token = np.ones((3, 1), np.float32)
    text = lowered_for_cuda(
        functools.partial(jax_qmm.quantize, scale=per_token, zero_point=per_token.astype(np.int32)), x
    )
    assert re.search(r"\(tensor<6x4xbf16>, tensor<6x1xf32>, tensor<6x1xi32>\) -> tensor<6x4xi8>", text)


def test_scales_that_are_not_per_row_say_that_they_have_no_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "_noted", set())
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with pytest.warns(UserWarning, match=r"jax_qmm.quantize runs on .* its scales are not one per row"):
        assert "custom_call" not in lowered_for_cuda(functools.partial(jax_qmm.quantize, axis=0), x)
    monkeypatch.setenv("JAX_QMM_STRICT", "1")
    with pytest.raises(RuntimeError, match="its scales are not one per row"):
        lowered_for_cuda(lambda x: jax_qmm.quantize(x, axis=0), x)
    with pytest.raises(RuntimeError, match="its scales are not one per row"):
        lowered_for_cuda(lambda x: jax_qmm.quantize(x, axis=0, scale=np.ones((1, 4), np.float32)), x)


@pytest.mark.parametrize("axis", [1, None])
def test_exports_with_a_symbolic_dimension(axis):
    (m,) = jax.export.symbolic_shape("m")
    f = jax.jit(functools.partial(jax_qmm.quantize, axis=axis, symmetric=False))
    exported = jax.export.export(f, platforms=["cpu", "cuda"], disabled_checks=jax_qmm.export_disabled_checks())(
        jax.ShapeDtypeStruct((m, 16), jnp.float32)
    )
    assert "jax_qmm_quantize_dynamic" in exported.mlir_module()
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    assert_equal(jax.export.deserialize(exported.serialize()).call(x), oracle(x, INT8, axis, False))


def test_exports_with_blocks_of_a_symbolic_dimension():
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda x: jax_qmm.quantize(x, tile_size=8).dequantize())
    exported = jax.export.export(f, platforms=["cpu"])(jax.ShapeDtypeStruct((3, 8 * n), jnp.float32))
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x), f(x))


X = np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    "x, options, error, message",
    [
        (np.ones((4, 6), np.int32), {}, TypeError, "x has dtype int32, needs float32, bfloat16, float16"),
        (np.float32(1), {}, ValueError, "x has rank 0"),
        (X, {"qtype": jnp.int2}, TypeError, "qtype is .*, needs int8 or float8_e4m3fn or int4"),
        (X, {"axis": 2}, ValueError, "axis is 2, needs at least one axis, each from -2 to 1"),
        (X, {"axis": ()}, ValueError, r"axis is \(\), needs at least one axis"),
        (X, {"axis": (1, -1)}, ValueError, r"axis is \(1, -1\), which names an axis twice"),
        (X, {"axis": "k"}, TypeError, "axis is 'k', needs an int"),
        (X, {"tile_size": 3, "axis": 0}, ValueError, "tile_size is 3, needs a divisor of 4, the size of axis 0"),
        (X, {"tile_size": 0}, ValueError, "tile_size is 0"),
        (X, {"tile_size": True}, ValueError, "tile_size is True"),
        (X, {"scale": 1.0, "zero_point": 128}, ValueError, "zero_point has values from 128 to 128, needs -128 to 127"),
        (X, {"tile_size": 2, "axis": None}, ValueError, "tile_size needs a single axis"),
        (X, {"qtype": E4M3, "symmetric": False}, ValueError, "symmetric=False was given with qtype float8_e4m3fn"),
        (
            X,
            {"qtype": E4M3, "scale": 1.0, "zero_point": 1},
            ValueError,
            "zero_point was given with qtype float8_e4m3fn",
        ),
        (X, {"zero_point": 3}, ValueError, "zero_point was given without scale"),
        (X, {"scale": 1.0, "clip_search": True}, ValueError, "clip_search=True was given with scale"),
        (X, {"clip_search": 1}, TypeError, "clip_search is 1, needs True or False"),
        (X, {"scale_dtype": np.float64}, TypeError, "scale_dtype is .*, needs float32 or bfloat16 or float16"),
        (X, {"scale": 1.0, "symmetric": False}, ValueError, "symmetric=False and scale were given without zero_point"),
        (X, {"scale": np.ones(4, np.float32)}, ValueError, r"scale has shape \(4,\), needs \(\) or .* to \(4, 1\)"),
        (X, {"scale": np.ones((1, 4, 1), np.float32)}, ValueError, r"scale has shape \(1, 4, 1\)"),
        (X, {"scale": np.ones((4, 1), np.int32)}, TypeError, "scale has dtype int32"),
        (X, {"scale": 1.0, "zero_point": 0.5}, TypeError, "zero_point has dtype float32, needs an integer dtype"),
        (X, {"scale": 1.0, "zero_point": np.ones(3, np.int32)}, ValueError, r"zero_point has shape \(3,\)"),
    ],
)
def test_bad_input_is_refused(x, options, error, message):
    with pytest.raises(error, match=message):
        jax_qmm.quantize(x, **options)


def test_a_quantized_array_is_not_quantized_again():
    with pytest.raises(TypeError, match="x is a QArray already"):
        jax_qmm.quantize(jax_qmm.quantize(X))


def test_whole_rows_of_a_batch_of_one_lower_to_the_kernel():
    x = jax.ShapeDtypeStruct((1, 8, 4), jnp.float32)
    assert "@jax_qmm_quantize_dynamic" in lowered_for_cuda(lambda x: jax_qmm.quantize(x, axis=(1, 2)), x)


def test_a_scale_of_8_bits_is_refused():
    with pytest.raises(TypeError, match="scale has dtype float8_e4m3fn"):
        jax_qmm.quantize(jnp.ones((2, 4)), scale=jnp.ones((), jnp.float8_e4m3fn))
