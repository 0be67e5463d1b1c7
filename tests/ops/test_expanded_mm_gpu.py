"""expanded_mm's kernels against numpy, bit for bit, and the products that they serve."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm
from jax_qmm import W4A8, _extension
from jax_qmm.ops.expanded_mm import expanded_mm

pytestmark = pytest.mark.gpu
TILES = ("128x64x128", "128x128x128", "256x128x128")
FEW_ROWS = (
    *("8x16x1024", "8x16x2048", "8x32x2048", "16x16x1024", "16x16x2048", "16x32x1024"),
    *("32x16x1024", "32x16x2048", "32x32x1024", "32x32x512"),
)
KERNELS = (
    *(f"sm80 few rows {tile} int4" for tile in FEW_ROWS),
    *("sm80 multistage 64x64x64 int4", "sm80 multistage 64x64x128 int4", "sm80 multistage 128x128x64 int4"),
    *(f"sm90 wgmma {tile}{parts} int4" for tile in TILES for parts in ("", " split-K 2")),
)
PERSISTENT = (
    *(
        f"sm90 wgmma {tile} {way} int4"
        for tile in ("128x128x128", "256x128x128 cluster 2")
        for way in ("persistent", "stream-K")
    ),
    *(
        f"sm90 wgmma {tile} stream-K int4 in blocks of {unit}"
        for tile in ("16x192x128", "32x128x128", "64x128x128")
        for unit in (32, 128)
    ),
)


def operands(batch, m, n, k, block, zero_points, seed=0):
    """Random ones; multiples and zero points, of either sign, as large as int8 allows."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-128, 128, (batch, m, k)).astype(np.int8)
    w = rng.integers(-8, 8, (batch, n, k)).astype(np.int8)
    zero_point = rng.integers(-8, 8, (batch, n, -(-k // block))).astype(np.int8) if zero_points else None
    reach = 8 if zero_point is None else np.maximum(7 - zero_point, zero_point + 8)
    multiple = rng.integers(-(127 // reach), 127 // reach + 1, (batch, n, -(-k // block))).astype(np.int8)
    return x, w, multiple, zero_point


def expected(x, w, multiple, zero_point, block):
    along = lambda leaf: 0 if leaf is None else np.repeat(leaf.astype(np.int64), block, -1)[..., : w.shape[-1]]
    values = (w - along(zero_point)) * along(multiple)
    assert abs(values).max(initial=0) <= 127
    return x.astype(np.int64) @ values.swapaxes(-1, -2)


def run(x, w, multiple, zero_point, block, **options):
    f = jax.jit(
        lambda *leaves, **options: expanded_mm(*leaves, num_batch=1, block=block, **options),
        static_argnames="out_dtype",
    )
    leaves = jnp.asarray(x), jnp.asarray(w, jnp.int4), jnp.asarray(multiple)
    return np.asarray(f(*leaves, None if zero_point is None else jnp.asarray(zero_point), **options))


@pytest.fixture(params=KERNELS)
def kernel(request, extension):
    """Has every product take this kernel, where the GPU has it."""
    if request.param not in dict(extension.ExpandedMmProblem(1, 1, 32, 1, "int32", 32).choices(_extension.gpu())):
        pytest.skip("not a kernel of this GPU")
    extension.restrict_expanded_mm(request.param)
    yield request.param
    extension.restrict_expanded_mm("")


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(
    "batch, m, n, k, block",
    [
        (1, 1, 1, 32, 32),
        (1, 5, 17, 96, 32),  # a warp of few rows has three of its four threads' columns
        (1, 8, 16, 2048, 128),  # a turn of all warps, and so many steps that every stage is filled again
        (1, 9, 33, 2080, 64),  # and a short one
        (2, 16, 31, 320, 256),  # the last block is short
        (1, 17, 40, 224, 96),
        (3, 33, 16, 128, 128),  # two tiles of x
    ],
)
def test_shapes(kernel, batch, m, n, k, block, zero_points):
    values = operands(batch, m, n, k, block, zero_points)
    np.testing.assert_array_equal(run(*values, block), expected(*values, block))


@pytest.mark.parametrize("m, n", [(130, 70), (67, 261), (257, 33)])
def test_many_rows(kernel, m, n):
    if "few rows" in kernel:
        pytest.skip("serves up to 64 rows")
    values = operands(1, m, n, 416, 64, True)
    np.testing.assert_array_equal(run(*values, 64), expected(*values, 64))


def check_epilogue(oracle, values, block, dtype, given=("scale_a", "scale_b", "bias")):
    (batch, m, _), n, rng = values[0].shape, values[1].shape[1], np.random.default_rng(1)
    vectors = {
        "scale_a": rng.uniform(0.001, 0.02, (batch, m)).astype(np.float32),
        "scale_b": rng.uniform(-0.02, 0.02, (batch, n)).astype(ml_dtypes.bfloat16),
        "bias": rng.normal(size=(1, n)).astype(np.float32),
    }
    vectors = {name: vectors[name] for name in given}
    got = run(*values, block, out_dtype=np.dtype(dtype).name, **{name: jnp.asarray(v) for name, v in vectors.items()})
    sums = expected(*values, block).astype(np.int32)
    for i in range(batch):
        of = {"scale_a": np.float32(1), "scale_b": np.float32(1)}
        of |= {name: vector[min(i, len(vector) - 1)] for name, vector in vectors.items()}
        want = oracle.epilogue(sums[i], **of, out_dtype=dtype)
        np.testing.assert_array_equal(got[i].view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("n", [9, 48])  # rows of the result that begin at whole stores, or don't
@pytest.mark.parametrize("given", [("scale_a", "scale_b", "bias"), ("scale_b",), ()])
def test_epilogue(kernel, oracle, given, n, dtype):
    check_epilogue(oracle, operands(2, 5, n, 64, 32, True), 32, dtype, given)


@pytest.mark.parametrize("words", PERSISTENT)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(
    "batch, m, n, k, block",
    [
        (1, 1, 8, 32, 32),
        (1, 40, 200, 5280, 128),  # tiles, the last of which is not full, are parts of several blocks
        (1, 300, 136, 1440, 96),
        (2, 257, 264, 416, 64),
        (1, 70, None, 160, 128),  # each block has several tiles
    ],
)
def test_persistent_blocks(words, batch, m, n, k, block, zero_points, dtype, extension, oracle):
    n = n or 256 * _extension.gpu().sm_count + 72
    problem = extension.ExpandedMmProblem(m, n, k, batch, np.dtype(dtype).name, block)
    if words not in dict(problem.choices(_extension.gpu())):
        pytest.skip("no kernel for such blocks, or of this GPU")
    extension.restrict_expanded_mm(words)
    try:
        check_epilogue(oracle, operands(batch, m, n, k, block, zero_points), block, dtype)
    finally:
        extension.restrict_expanded_mm("")


def test_every_value_of_every_block(kernel):
    """All that (w - zero_point) * multiple can be, in neighbours of either extreme: no byte borrows from another."""
    zero_point, multiple = (leaf.ravel() for leaf in np.mgrid[-8:8, -15:16])
    fits = np.maximum(7 - zero_point, zero_point + 8) * abs(multiple) <= 127
    zero_point, multiple = (leaf[fits].astype(np.int8)[None, :, None] for leaf in (zero_point, multiple))
    w = np.random.default_rng(0).permuted(np.resize(np.arange(-8, 8), (1, fits.sum(), 64)), axis=-1).astype(np.int8)
    x = np.eye(64, dtype=np.int8)[None]
    np.testing.assert_array_equal(run(x, w, multiple, zero_point, 64), expected(x, w, multiple, zero_point, 64))


def test_one_weight_of_several_batches(kernel):
    x, *_ = operands(3, 4, 16, 64, 32, True)
    _, *of_w = operands(1, 4, 16, 64, 32, True)
    np.testing.assert_array_equal(run(x, *of_w, 32), expected(x, *of_w, 32))


@pytest.mark.parametrize("scheme", [W4A8(32), W4A8(64, symmetric=False)], ids=str)
@pytest.mark.parametrize(
    "equation, shape, kernel, contracted",
    [
        ("bk,kn->bn", (3, 96), (96, 24), (0,)),
        ("abk,hdk->hbda", (2, 3, 96), (4, 8, 96), (2,)),
        ("gbk,gkn->gbn", (2, 3, 96), (2, 96, 8), (1,)),
        ("bhd,hdn->bn", (3, 2, 64), (2, 64, 8), (0, 1)),
        ("bk,kn->bn", (40, 96), (96, 24), (0,)),
        ("bk,kn->bn", (65, 96), (96, 24), (0,)),
        ("bk,kn->bn", (300, 160), (160, 136), (0,)),
        ("bk,kn->bn", (3, 100), (100, 24), (0,)),
    ],
)
def test_products_are_those_of_the_expanded_weight(on_reference, scheme, equation, shape, kernel, contracted):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    w = scheme.quantize_weight(jnp.asarray(rng.normal(0.5, 1, kernel), jnp.float32), contracted)
    f = lambda x, w: jax_qmm.einsum(equation, x, w, scheme=scheme)
    got = jax.jit(f)(*jax.device_put((x, w), jax.devices(_extension.platform())[0]))
    np.testing.assert_array_equal(jax.device_get(got), jax.device_get(on_reference(f, x, w)))
