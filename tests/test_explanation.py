import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_qmm import _extension, explain
from jax_qmm.ops.dot_general import dot_general, matmul
from jax_qmm.ops.quantize import quantize
from jax_qmm.ops.scaled_mm import scaled_mm
from jax_qmm.schemes import W8A8

X = jax.ShapeDtypeStruct((8, 32), jnp.float32)
W = jax.ShapeDtypeStruct((16, 32), jnp.int8)
ZERO = np.zeros((8, 16), jnp.bfloat16)


def product(x, w):
    q = quantize(x)
    return scaled_mm(q.qvalue, w, q.scale, 0.5)


def looped(x, w):
    return jax.lax.scan(lambda c, _: (c + product(x, w), None), ZERO, None, length=5)[0]


def test_rows():
    table = explain(product, X, W)
    rows = [(row.op, row.inputs, row.out, row.count, row.inside) for row in table.rows]
    assert rows == [
        ("quantize (dynamic, per row)", "float32[8,32]", "int8[8,32]", 1, ""),
        ("scaled_mm (scale_a, scale_b)", "int8[8,32] x int8[16,32]", "bfloat16[8,16]", 1, ""),
    ]
    assert {row.runs_on for row in table.rows} == {"reference: platform cpu has no kernels"}
    lines = str(table).splitlines()
    assert lines[0].split() == ["op", "inputs", "out", "count", "runs", "on"]
    assert len(lines) == 3 and lines[2].endswith("reference: platform cpu has no kernels")


def while_loop(x, w):
    return jax.lax.while_loop(lambda c: c.sum() > 0, lambda c: c + product(x, w), ZERO)


def cond(x, w):
    return jax.lax.cond(x.sum() > 0, product, lambda x, w: product(x, w) + product(2 * x, w), x, w)


def nested(x, w):
    return jax.lax.scan(lambda c, _: (c + looped(x, w), None), ZERO, None, length=3)[0]


def sharded(x, w):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("x")
    return jax.shard_map(product, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)(x, w)


@jax.custom_jvp
def custom_jvp(x, w):
    return product(x, w)


custom_jvp.defjvp(lambda primals, tangents: (product(*primals), product(*primals)))


@jax.custom_vjp
def custom_vjp(x, w):
    return product(x, w)


custom_vjp.defvjp(lambda x, w: (product(x, w), ()), lambda residuals, g: (None, None))


@pytest.mark.parametrize(
    "fn, count, inside, m",
    [
        (jax.jit(product), 1, "", 8),
        (jax.checkpoint(product), 1, "", 8),
        (custom_jvp, 1, "", 8),
        (custom_vjp, 1, "", 8),
        (looped, 5, "scan", 8),
        (nested, 15, "scan > scan", 8),
        (while_loop, 1, "while", 8),
        (cond, 3, "cond", 8),
        (sharded, 1, "shard_map", 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_control_flow(fn, count, inside, m):
    row = explain(fn, X, W).rows[-1]
    assert (row.count, row.inside) == (count, inside)
    assert row.inputs == f"int8[{m},32] x int8[16,32]"


def test_vmap_and_grad():
    stacked = jax.ShapeDtypeStruct((3, 8, 32), jnp.float32)
    assert explain(jax.vmap(product, (0, None)), stacked, W).rows[-1].out == "bfloat16[3,8,16]"
    q = quantize(jnp.ones((16, 32))).T
    table = explain(jax.grad(lambda x: matmul(x, q).sum()), X)
    assert [row.op for row in table.rows] == ["quantize (dynamic, per row)", "scaled_mm (scale_a, scale_b)"]


def test_static_quantizers_and_those_without_a_kernel():
    table = explain(lambda x: (quantize(x, axis=0), quantize(x, scale=0.5), quantize(x, axis=None)), X)
    assert [(row.op, row.runs_on.split(":")[1]) for row in table.rows] == [
        ("quantize (dynamic, per column)", " its scales are not one per row"),
        ("quantize (static, per row)", " platform cpu has no kernels"),
        ("quantize (dynamic, per tensor)", " platform cpu has no kernels"),
    ]


def test_one_row_is_quantized_per_row():
    row = jax.ShapeDtypeStruct((1, 32), jnp.float32)
    for axis, words in ((-1, "per row"), (None, "per tensor"), (0, "per column")):
        assert explain(lambda x, axis=axis: quantize(x, axis=axis), row).rows[0].op == f"quantize (dynamic, {words})"


def test_dequantized_products_are_named_with_the_reason():
    q = quantize(jnp.ones((16, 32)), axis=0)  # scales along what is contracted
    table = explain(lambda x, q: dot_general(x, q, (((1,), (1,)), ((), ()))), X, q)
    (row,) = table.rows
    assert row.op == "dequantized dot"
    assert row.runs_on == "reference: each value along a contracted axis has a scale"


def test_weights_in_another_order_are_named():
    kernel = jnp.ones((32, 16))
    rows = explain(matmul, X, quantize(kernel, axis=0)).rows
    assert [row.op.split()[0] for row in rows] == ["quantize", "transpose", "scaled_mm"]
    assert (rows[1].inputs, rows[1].out) == ("int8[32,16]", "int8[16,32]")
    assert len(explain(matmul, X, quantize(kernel.T).T).rows) == 2


def test_kernels_are_named_where_there_are_some(monkeypatch):
    asked, q = [], quantize(jnp.ones((16, 32)), "float8_e4m3fn").T
    monkeypatch.setattr(_extension, "fallback_reason", lambda *where: None)
    monkeypatch.setattr(_extension, "describe_scaled_mm", lambda *args: asked.append(args) or "tile 128x128x128")
    wide = jax.ShapeDtypeStruct((3, 8, 32), jnp.float32)
    table = explain(jax.vmap(product, (None, 0)), X, jax.ShapeDtypeStruct((2, 16, 32), jnp.int8))
    assert [row.runs_on for row in table.rows] == ["kernel", "tile 128x128x128"]
    fp8 = {"scheme": W8A8("float8_e4m3fn"), "precision": jax.lax.Precision.HIGHEST}
    explain(lambda x, q: matmul(x, q, **fp8), wide, q)
    explain(lambda a: scaled_mm(a, a, 1.0, 1.0, activation="silu"), W)
    assert asked == [
        (8, 16, 32, 2, jnp.int8, jnp.bfloat16, False, False),
        (24, 16, 32, 1, jnp.float8_e4m3fn, jnp.float32, False, False),
        (16, 16, 32, 1, jnp.int8, jnp.bfloat16, False, True),
    ]


@pytest.mark.parametrize("fn", [3, np.ones(3)])
def test_what_is_no_function_is_named(fn):
    with pytest.raises(TypeError, match=rf"fn is a {type(fn).__name__}; explain needs a function, and then"):
        explain(fn, X)


def test_it_is_said_how_kernels_are_launched(monkeypatch):
    asked = []
    monkeypatch.setattr(_extension, "launches", lambda: "outside of CUDA graphs: a test")
    monkeypatch.setattr(_extension, "described_gpu", lambda: "a GPU")
    assert "graphs" not in str(explain(product, X, W))  # on the reference
    monkeypatch.setattr(_extension, "fallback_reason", lambda *where: asked.append(where))
    with jax.default_device(jax.devices("cpu")[5]):
        table = explain(product, X, W)
    assert (table.gpu, table.launches) == ("a GPU", "outside of CUDA graphs: a test")
    assert str(table).endswith("\nGPU: a GPU\nlaunches: outside of CUDA graphs: a test")
    assert set(asked) == {("cpu", frozenset(jax.devices("cpu")[5:6]))}


def test_symbolic_shapes_have_their_kernel_chosen_later(monkeypatch):
    monkeypatch.setattr(_extension, "fallback_reason", lambda *where: None)
    b, n = jax.export.symbolic_shape("b, n")
    for m, rows in ((b, 16), (8, n)):
        x, w = jax.ShapeDtypeStruct((m, 32), jnp.float32), jax.ShapeDtypeStruct((rows, 32), jnp.int8)
        [*_, row] = explain(product, x, w).rows
        assert row.runs_on == "kernel, chosen at run time: the shapes are symbolic"


def test_what_is_no_array_stays_as_it_is():
    def fn(x, w, *, train, name, config):
        assert train is True and name == "a" and config == {"n": 3}
        return functools.reduce(lambda y, _: y + product(x, w), range(config["n"]), 0)

    x = np.ones((8, 32), np.float32)
    (quantized, multiplied) = explain(fn, x, W, train=True, name="a", config={"n": 3}).rows
    assert quantized.count == multiplied.count == 3


def test_nothing_quantized():
    table = explain(lambda x: jnp.sum(x), X)
    assert table.rows == table.float_rows == () and str(table) == "no quantized operation"


def test_products_that_stayed_float_are_listed_apart():
    def attention(x, w):
        y = product(x, w).astype(jnp.float32)
        for _ in range(2):
            y = jax.nn.softmax(y @ y.T) @ y
        image = jnp.broadcast_to(y[None, None], (1, 1, 8, 16))
        looped = jax.lax.scan(lambda c, _: (c + y @ y.T, None), jnp.zeros((8, 8)), None, length=3)
        return looped, jax.lax.conv(image, image[:, :, :2, :2], (1, 1), "SAME")

    table = explain(attention, X, W)
    assert [row.op.split()[0] for row in table.rows] == ["quantize", "scaled_mm"]
    assert [(row.op, row.inputs, row.out, row.count, row.inside) for row in table.float_rows] == [
        ("dot_general", "float32[8,16] x float32[16,8]", "float32[8,8]", 2, ""),
        ("dot_general", "float32[8,8] x float32[8,16]", "float32[8,16]", 2, ""),
        ("dot_general", "float32[8,16] x float32[16,8]", "float32[8,8]", 3, "scan"),
        ("conv_general_dilated", "float32[1,1,8,16] x float32[1,1,2,2]", "float32[1,1,8,16]", 1, ""),
    ]
    lines = str(table).splitlines()
    assert lines[3:5] == ["", "products that stayed float:"] and lines[5].split()[0] == "op" and len(lines) == 10
    assert {row.is_float for row in table.float_rows} == {True} and {row.is_float for row in table.rows} == {False}
    dequantized = explain(lambda x: matmul(x, quantize(jnp.ones((32, 4)), axis=1)), X)
    assert [row.op for row in dequantized.rows if row.op == "dequantized dot"] and not dequantized.float_rows
