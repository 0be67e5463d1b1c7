"""conv_general_dilated of sharded operands: what it gives, what devices exchange, and what `explain` says of that."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_oracle import int8, operands
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from random_arrays import data

import jax_qmm
from jax_qmm import W4A16, W8A8, QArray

NHWC = dict(window_strides=(2, 1), padding="SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
MESHES = [AxisType.Auto, AxisType.Explicit]


def make_mesh(kind):
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("x", "y"), axis_types=(kind,) * 2)


def collectives(compiled):
    return sorted(
        re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", compiled.as_text())
    )


def place(mesh, x, *spec):
    """x with its axes sharded as the spec says, but for those of one value."""
    spec = (axis if size > 1 else None for axis, size in zip(spec, x.shape))
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def padded(spec):
    return tuple(spec) + (None,) * (4 - len(spec))


# int8


def conv(lhs, scale_l, zero_l, rhs, scale_r, zero_r, bias, residual=None, **options):
    residual = residual if residual is None else QArray(residual, jnp.full((1,) * 4, 3.0))
    options = NHWC | dict(activation="relu", residual=residual) | options
    return jax_qmm.conv_general_dilated(
        QArray(lhs, scale_l, zero_l), QArray(rhs, scale_r, zero_r), bias=bias, **options
    )


def run_sharded(axes, kind=AxisType.Auto, groups=1, **residual):
    """The sharding of a result that is as it should be, and the program's collectives, given the axes' mesh axes."""
    args = operands(8, 8, 8, groups) | residual
    i, o, c, columns = (axes.get(name) for name in ("images", "out", "channels", "columns"))
    specs = dict(lhs=(i, None, columns, c), rhs=(o, None, None, c))
    specs |= dict.fromkeys(("scale_l", "zero_l"), (i,)) | dict.fromkeys(("scale_r", "zero_r", "bias"), (o,))
    specs |= dict(residual=(i, None, None, o))
    f = lambda args: conv(**args, feature_group_count=groups)
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        placed = {name: place(mesh, x, *specs[name]) for name, x in args.items()}
        compiled = jax.jit(f).lower(placed).compile()
        got = compiled(placed)
    np.testing.assert_array_equal(got, f({name: jnp.asarray(x) for name, x in args.items()}))
    return got.sharding.spec, collectives(compiled)


SHARDED = [
    (dict(images="x"), P("x"), []),
    (dict(images=("x", "y")), P(("x", "y")), []),
    (dict(out="y"), P(None, None, None, "y"), []),
    (dict(images="x", out="y"), P("x", None, None, "y"), []),
    (dict(channels="y"), P(), ["all-reduce"]),
    (dict(images="x", channels="y"), P("x"), ["all-reduce"]),
]


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(("axes", "spec", "want"), SHARDED, ids=str)
def test_int8(axes, spec, want, kind):
    got_spec, got = run_sharded(axes, kind)
    assert got == want
    assert padded(got_spec) == padded(spec)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(("axes", "spec", "want"), SHARDED[3::2], ids=str)
def test_int8_with_a_residual(axes, spec, want, kind):
    got_spec, got = run_sharded(axes, kind, residual=int8(np.random.default_rng(1), 8, 3, 4, 8))
    assert got == want
    assert padded(got_spec) == padded(spec)


@pytest.mark.parametrize("kind", MESHES)
def test_int8_gathers_columns_of_pixels(kind):
    run_sharded(dict(columns="y"), kind)


@pytest.mark.parametrize("axes", [dict(images="x"), dict(out="y"), dict(images="x", channels="y")], ids=str)
def test_int8_in_groups(axes):
    _, got = run_sharded(axes, groups=2)
    assert got == [] if axes == dict(images="x") else "all-reduce" not in got


@pytest.mark.parametrize("manual", [{"x", "y"}, {"x"}], ids=["all axes", "one axis"])
@pytest.mark.parametrize("auto", [P(), P(None, None, None, "y"), P("y")], ids=str)
def test_in_a_shard_map(manual, auto):
    """Also of one axis of two; channels or output channels of rhs may be sharded over the other one."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    args = {name: jnp.asarray(x) for name, x in operands(8).items()}
    specs = {name: P("x") if name in ("lhs", "scale_l", "zero_l") else P() for name in args}
    f = lambda args: conv(**args)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(specs,), out_specs=P("x"), axis_names=manual)
    got = jax.jit(mapped)(args | {"rhs": jax.device_put(args["rhs"], NamedSharding(mesh, auto))})
    np.testing.assert_array_equal(got, f(args))


# Weights in blocks


def weight(kind, channels, taps=(3, 2), out=8):
    values = data(out, *taps, channels, seed=1)
    if kind == "merged":
        return W4A16(64).quantize_weight(values, (1, 2, 3))
    if kind == "packed":
        return jax_qmm.quantize(values, jnp.int4, tile_size=64).pack()
    if kind == "asymmetric":
        return jax_qmm.quantize(values, jnp.int4, tile_size=2, symmetric=False)
    if kind == "shared over taps":
        one = jax_qmm.quantize(values[:, :1, :1], tile_size=2)
        return QArray(jnp.asarray(int8(np.random.default_rng(2), *values.shape)), one.scale, tile_size=2)
    return jax_qmm.quantize(values, jnp.int4, axis=(3,) if kind == "per tap" else (1, 2, 3))


CHANNELS = {"asymmetric": 8, "shared over taps": 8, "per tap": 8, "per channel": 8, "packed": 512, "merged": 512}


def place_weight(mesh, w, out, channels):
    channels = None if w.merged_axes else channels  # there is no axis of these alone
    return jax.tree.map(lambda leaf: place(mesh, leaf, out, None, None, channels), w)


def assert_close(got, want, dense, x, options):
    """As far as float32 sums of the window and the bias in another order allow."""
    total = jax.lax.conv_general_dilated(jnp.abs(x), jnp.abs(dense), **NHWC | options, precision="highest")
    assert np.all(np.abs(got - want) <= 2 * (dense[0].size + 2) * 2.0**-24 * (total + 4))


def run_weight_only(axes, w, kind=AxisType.Auto, **options):
    """As `run_sharded`, of float32 images and a QArray of another kind; and what `explain` says is exchanged."""
    options = NHWC | options
    channels = w.shape[-1] * options.get("feature_group_count", 1)
    x, bias = data(8, 8, 4, channels), data(8, seed=3)
    i, o, c, columns = (axes.get(name) for name in ("images", "out", "channels", "columns"))
    f = lambda x, w, bias: jax_qmm.conv_general_dilated(
        x, w, **options, bias=bias, activation="relu", precision="highest"
    )
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        placed = place(mesh, x, i, None, columns, c), place_weight(mesh, w, o, c), place(mesh, bias, o)
        compiled = jax.jit(f).lower(*placed).compile()
        got = compiled(*placed)
        (row,) = jax_qmm.explain(f, *placed).rows
    assert_close(got, f(x, w, bias), w.dequantize(), x, options)
    return got.sharding.spec, compiled, row.exchanged


@pytest.mark.parametrize("weights", CHANNELS)
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(("axes", "spec", "want"), SHARDED, ids=str)
def test_weight_only(axes, spec, want, kind, weights):
    got_spec, compiled, exchanged = run_weight_only(axes, weight(weights, CHANNELS[weights]), kind)
    assert collectives(compiled) == want
    assert padded(got_spec) == padded(spec)
    if kind == AxisType.Auto and weights == "merged":  # what is computed from arguments, as a reshape
        assert exchanged == "the compiler decides"
    else:
        assert exchanged == ("all-reduce over y" if want else "")


def test_the_all_reduce_is_of_float32_before_the_bias():
    x, w, bias = data(4, 5, 4, 8).astype(jnp.bfloat16), weight("asymmetric", 8), jnp.full(8, 2.0**20)
    f = lambda x, w, bias: jax_qmm.conv_general_dilated(x, w, **NHWC, bias=bias)
    mesh = make_mesh(AxisType.Auto)
    placed = place(mesh, x, None, None, None, "y"), place_weight(mesh, w, None, "y"), bias
    compiled = jax.jit(f).lower(*placed).compile()
    assert re.search(r"f32\[\S+ all-reduce\(", compiled.as_text())
    np.testing.assert_array_equal(compiled(*placed), f(x, w, bias))  # a bias for each device would make it four times


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(
    ("w", "parts"),
    [
        (weight("packed", 256), 2),
        (weight("merged", 64), 1),  # taps and channels are one axis
        (jax_qmm.quantize(data(8, 3, 2, 8, seed=1), jnp.int4, tile_size=4), 2),
    ],
    ids=["packed", "merged", "plain"],
)
def test_what_no_boundary_of_blocks_divides_is_gathered(kind, w, parts):
    x = data(2, 5, 4, w.shape[-1])
    f = lambda x, w: jax_qmm.conv_general_dilated(x, w, **NHWC, precision="highest")
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        placed = place(mesh, x, None, None, None, "y"), w
        compiled = jax.jit(f).lower(*placed).compile()
        (row,) = jax_qmm.explain(f, *placed).rows
    assert collectives(compiled) == ["all-gather"]
    assert row.exchanged == f"gathers lhs along input channels over y (whole parts: {parts}, devices: 4)"
    assert_close(compiled(*placed), f(x, w), w.dequantize(), x, {})


# Explicit axes: windows, groups and dilations for which JAX's own convolution has no type

SCHEMES = {"int8": W8A8(), "weight-only": W4A16(4)}
FORMS = {
    "window": {},
    "groups": dict(feature_group_count=2),
    "depthwise": dict(feature_group_count=8),
    "batch groups": dict(batch_group_count=2),
    "lhs dilation": dict(window_strides=(1, 1), lhs_dilation=(2, 2), padding=((1, 1), (1, 0))),
    "product": dict(window_strides=(1, 1)),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "axes",
    [
        dict(images="x", out="x"),
        dict(images=("x", "y"), out="y"),
        dict(out="y"),
        dict(channels="x"),
        dict(channels="x", lhs="y"),
        dict(rows="x"),
    ],
    ids=str,
)
def test_explicit_axes(axes, form, scheme):
    """The result and its derivative, whatever is sharded; bias too, as the output channels are."""
    options, scheme = NHWC | FORMS[form], SCHEMES[scheme]
    taps, groups = (1, 1) if form == "product" else (3, 2), options.get("feature_group_count", 1)
    x, bias = data(8, 6, 4, 8), data(8, seed=3)
    values = data(8, *taps, 8 // groups, seed=1)
    w = scheme.quantize_weight(values, (1, 2, 3))
    if scheme == SCHEMES["weight-only"]:
        w = jax_qmm.quantize(values, jnp.int4, tile_size=min(4, 8 // groups))
    f = lambda x, bias: jax_qmm.conv_general_dilated(
        x, w, **options, bias=bias, activation="silu", scheme=scheme, precision="highest"
    )
    both = lambda x, bias: (f(x, bias), *jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1))(x, bias))
    want = both(x, bias)
    i, o, c = (axes.get(name) for name in ("images", "out", "channels"))
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        w = place_weight(mesh, w, o, c if w.shape[-1] > 1 else None)
        placed = place(mesh, x, i, axes.get("rows"), None, axes.get("lhs", c)), place(mesh, bias, o)
        got = jax.jit(both)(*placed)
        kept = form == "product"
        assert jax.typeof(got[0]).sharding.spec[1:3] == (axes.get("rows") if kept else None, None)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mapped", [0, 2])
@pytest.mark.parametrize("axes", [(None, "x"), ("x", None), ("x", "y")], ids=str)
def test_vmap_on_explicit_axes(axes, mapped, scheme):
    """Of images of which Explicit axes share the mapped axis, the others, or both: nothing is gathered."""
    w = SCHEMES[scheme].quantize_weight(data(6, 3, 2, 8, seed=1), (1, 2, 3))
    f = lambda x: jax_qmm.conv_general_dilated(x, w, **NHWC, scheme=SCHEMES[scheme], precision="highest")
    x = data(2, 8, 5, 4, 8)
    want = jax.vmap(f)(x)
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = place(mesh, jnp.moveaxis(x, 0, mapped), *((*axes,) if mapped == 0 else (axes[1], None, axes[0])))
        compiled = jax.jit(jax.vmap(f, mapped)).lower(placed).compile()
        got = compiled(placed)
    assert collectives(compiled) == [] and tuple(got.sharding.spec)[:2] == axes
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * 48 * 2.0**-24 * 48)


# explain


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MESHES)
def test_explain_names_sharded_spatial_axes(kind, scheme):
    w = SCHEMES[scheme].quantize_weight(data(6, 3, 2, 8), (1, 2, 3))
    f = lambda x: jax_qmm.conv_general_dilated(x, w, **NHWC)
    g = lambda q: f(QArray(q, jnp.ones((1, 1, 1, 1))))
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x = place(mesh, jnp.ones((2, 4, 4, 8), jnp.int8 if scheme == "int8" else jnp.float32), None, "x", "y")
        rows = jax_qmm.explain(g if scheme == "int8" else f, x).rows
    (row,) = (row for row in rows if "conv" in row.op)
    parts = [f"gathers lhs along spatial axes over {axis} (whole parts: 1, devices: {n})" for axis, n in ("x2", "y4")]
    assert row.exchanged.startswith("; ".join(parts)) and "over" not in row.exchanged.removeprefix("; ".join(parts))


def test_explain_leaves_dequantized_convolutions_to_the_compiler():
    w = W4A16(4).quantize_weight(data(6, 3, 2, 4), (1, 2, 3))
    f = lambda x: jax_qmm.conv_general_dilated(x, w, **NHWC, feature_group_count=2)
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        exchanged = [
            jax_qmm.explain(f, place(mesh, data(2, 4, 4, 8), *spec)).rows[0].exchanged for spec in ((), ("x",))
        ]
    assert exchanged == ["", "the compiler decides"]
