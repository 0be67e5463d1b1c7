"""The kernels of block_scaled_mm, within the errors that `weights_oracle` allows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights_oracle import BF16, BITS, F16, F32, allowed, call, operands, pack, quantized

import jax_qmm
from jax_qmm import _extension

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def has_kernels():
    if reason := _extension.fallback_reason(_extension.platform(), (), 80):
        pytest.skip(reason)


def check(x, q, scale, zero_point, *, bits, block, out_dtype=F32):
    out = call(x, pack(q, bits), scale, zero_point, bits=bits, block=block, out_dtype=out_dtype)
    y, error = allowed(x, q, scale, zero_point, block, out_dtype)
    assert np.all(np.abs(out.astype(np.float64) - y) <= error)
    return out


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_rows_around_the_tiles(m, bits):
    check(*operands(m, m, 37, 328, BF16, bits, 128, "int8"), bits=bits, block=128)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("zero_point", ["none", "int8", F32])
@pytest.mark.parametrize("block", [16, 32, 48, 64, 128, 256, 416, 4096])
def test_blocks_and_zero_points(block, zero_point, dtype, bits):
    check(*operands(block, 3, 33, 416, dtype, bits, min(block, 416), zero_point), bits=bits, block=block)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (16, 15), (31, 127), (33, 129), (130, 1000), (5, 1031), (257, 64), (8, 2080)]
)
def test_ragged_n_and_k(n, k, bits):
    """Odd K, too, whose rows start anywhere."""
    check(*operands(n, 5, n, k, F16, bits, 32, "int8"), bits=bits, block=32)


@pytest.mark.parametrize("scale_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("zero_point", ["none", "int8", BF16, F16, F32])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_dtypes_of_scales_and_zero_points(dtype, zero_point, scale_dtype):
    check(*operands(1, 9, 40, 200, dtype, 4, 64, zero_point, scale_dtype), bits=4, block=64)


@pytest.mark.parametrize("out_dtype", [BF16, F16, F32])
def test_dtypes_of_the_result(out_dtype):
    for dtype in (BF16, F16):
        check(*operands(2, 4, 50, 256, dtype, 4, 128), bits=4, block=128, out_dtype=out_dtype)


@pytest.mark.parametrize("batch", [(3, 3), (3, 1), (1, 3)])
def test_batches(batch):
    check(*operands(3, 4, 35, 136, BF16, 8, 64, "int8", batch=batch), bits=8, block=64)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero_point", ["none", "int8", F32, F16])
@pytest.mark.parametrize(
    ("m", "k", "block"), [(1, 328, 16), (3, 1031, 64), (4, 128, 128), (7, 300, 300), (16, 416, 48)]
)
def test_float32_x(m, k, block, zero_point, bits):
    check(*operands(m, m, 37, k, F32, bits, block, zero_point), bits=bits, block=block)


def test_every_weight_and_integer_zero_point():
    """One column at a time: a result is x (q - zero_point) scale, and exact."""
    for bits in BITS:
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        q = np.tile(np.arange(low, high), (16, 1)).T.reshape(1, -1, 16)  # of a row all the same
        zeros = np.unique(np.array([low, low + 1, -1, 0, 1, high - 2, high - 1]))
        for zero in zeros:
            scale = np.full((1, q.shape[1], 1), 0.5, F32)
            zero_point = np.full(scale.shape, zero, np.int8)
            for dtype in (BF16, F16):
                x = np.eye(1, 16, zero % 16).astype(dtype)[None]
                out = call(x, pack(q, bits), scale, zero_point, bits=bits, block=16)
                np.testing.assert_array_equal(out[0, 0], 0.5 * (q[0, :, 0] - zero))


def test_each_column_is_multiplied_by_its_own_scale():
    for bits in BITS:
        k, block = 300, 16
        q = np.ones((1, 4, k), int)
        scale = 2.0 ** (np.arange(4 * 19).reshape(1, 4, 19) % 23 - 11).astype(F32)
        for dtype in (BF16, F16):
            x = np.eye(k).astype(dtype)[None]
            out = call(x, pack(q, bits), scale, bits=bits, block=block)
            np.testing.assert_array_equal(out[0].T, np.repeat(scale[0], block, -1)[:, :k])


@pytest.mark.parametrize("bits", BITS)
def test_huge_x_and_scales(bits):
    """Nothing overflows inside that is finite outside."""
    for dtype, huge in ((F16, 65504), (BF16, 3.0e38)):
        x, q, scale, _ = operands(5, 3, 20, 192, dtype, bits, 64)
        x[0, 1, 7] = huge
        for factor in (0.1, 1e-3, 2.0**-120):
            check(x, q, (scale * factor).astype(F32), None, bits=bits, block=64)
        zero_point = np.random.default_rng(6).uniform(-20, 20, scale.shape).astype(F32)
        check(x, q, (scale * 2.0**-10).astype(F32), zero_point, bits=bits, block=64)
    x, q, scale, _ = operands(6, 3, 20, 192, F16, bits, 64)
    check(x, q, scale * F32(1e8), None, bits=bits, block=64)  # weights that float16 doesn't reach


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_float_zero_points_of_any_size(dtype):
    """Offsets much larger than the range of q times the scale."""
    for factor in (1e3, 1e5, 1e9):
        x, q, scale, _ = operands(7, 3, 20, 192, dtype, 4, 64)
        zero_point = (factor * np.random.default_rng(7).uniform(-1, 1, scale.shape)).astype(F32)
        check(x, q, scale, zero_point, bits=4, block=64)


def test_subnormal_scales():
    for dtype, scale_dtype, factor in ((BF16, F32, 2.0**-125), (F16, F16, 2.0**-12)):
        x, q, scale, _ = operands(8, 3, 20, 192, dtype, 4, 64)
        scale = (np.sign(scale) * factor * 0.01).astype(scale_dtype)
        y, error = allowed(x, q, scale, None, 64)
        out = call(x, pack(q, 4), scale, bits=4, block=64)
        assert np.all(np.abs(out - y) <= error - np.finfo(np.float32).tiny + 64 * 2.0**-149)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_specials_stay_in_their_row(special):
    for dtype, zero_point in ((BF16, "int8"), (F16, F32)):
        x, q, scale, zero_point = operands(9, 19, 40, 136, dtype, 4, 32, zero_point)
        clean = call(x, pack(q, 4), scale, zero_point, bits=4, block=32)
        x[0, 4, 60] = special
        out = call(x, pack(q, 4), scale, zero_point, bits=4, block=32)
        assert not np.isfinite(out[0, 4]).any()
        np.testing.assert_array_equal(np.delete(out, 4, 1), np.delete(clean, 4, 1))


@pytest.mark.parametrize("bias_dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("activation", "low", "high"),
    [("none", 0, 0), ("clamp", -0.25, 0.5), ("clamp", 0, np.inf), ("gelu", 0, 0), ("silu", 0, 0)],
)
def test_bias_and_activation(activation, low, high, bias_dtype, oracle, all_kernels):
    all_kernels.restrict_block_scaled_mm("sums scaled")
    x, q, scale, zero_point = operands(10, 17, 40, 136, BF16, 4, 64, "int8")
    bias = np.random.default_rng(10).standard_normal((1, 40)).astype(bias_dtype)
    y, error = allowed(x, q, scale, zero_point, 64)
    y = y + bias[:, None].astype(np.float64)
    error = error + 2.0**-23 * np.abs(y)
    name = {"none": None, "clamp": (low, high)}.get(activation, activation)
    expected = oracle.activated(y, name).astype(np.float64)
    kwargs = dict(activation=activation, low=low, high=high)
    out = call(x, pack(q, 4), scale, zero_point, bias, bits=4, block=64, **kwargs)
    # The activations' slopes are at most 1.13, and output.cuh has their errors.
    assert np.all(np.abs(out - expected) <= 1.13 * error + 2.0**-20 * np.abs(y))


def test_results_do_not_change_from_run_to_run():
    x, q, scale, zero_point = operands(11, 5, 70, 1100, BF16, 4, 32, "int8")
    first, second = (call(x, pack(q, 4), scale, zero_point, bits=4, block=32) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_a_row_does_not_depend_on_its_neighbours():
    x, q, scale, zero_point = operands(12, 8, 70, 1100, BF16, 8, 128, "int8")
    whole = call(x, pack(q, 8), scale, zero_point, bits=8, block=128)
    one = call(x[:, 3:4], pack(q, 8), scale, zero_point, bits=8, block=128)
    np.testing.assert_array_equal(whole[:, 3:4], one)


def test_empty():
    for m, n, k in ((0, 5, 64), (3, 0, 64), (3, 5, 0)):
        x, q, scale, _ = operands(13, m, n, k, BF16, 4, 32)
        bias = np.arange(n, dtype=F32)[None]
        out = call(x, pack(q, 4), scale, None, bias, bits=4, block=32)
        np.testing.assert_array_equal(out, np.broadcast_to(bias if k == 0 else out, (1, m, n)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(bits=3), "bits is 3; it needs to be 4 or 8"),
        (dict(block=24), "block is 24; it needs to be a multiple of 16, or at least K, 64"),
        (dict(block=16), "scale has shape"),
        (dict(bits=8), "w has shape"),
        (dict(activation="tanh"), "activation is"),
        (dict(bias=np.zeros((1, 7), F32)), "bias has shape"),
        (dict(zero_point=np.zeros((1, 8, 2), np.int32)), "zero_point has XLA's dtype"),
    ],
)
def test_bad_operands(wrong, message):
    x, q, scale, _ = operands(14, 2, 8, 64, BF16, 4, 32)
    kwargs = dict(bits=4, block=32) | wrong
    with pytest.raises(Exception, match=message):
        call(x, pack(q, 4), scale, kwargs.pop("zero_point", None), kwargs.pop("bias", None), **kwargs)


# The public function


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero_point", ["none", "int8", F32])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_public_function_runs_on_the_kernel(dtype, zero_point, bits):
    x, q, scale, zero_point = operands(20, 6, 45, 200, dtype, bits, 32, zero_point)
    w = quantized(q, scale, zero_point, 32, bits)
    y, error = allowed(x, q, scale, zero_point, 32)
    for weight in (w, w.pack()):
        f = lambda x: jax_qmm.block_scaled_mm(x, weight, out_dtype=jnp.float32)
        (row,) = jax_qmm.explain(f, x.reshape(2, 3, 200)).rows
        assert f" int{bits} weights" in row.runs_on
        out = np.asarray(jax.jit(f)(x.reshape(2, 3, 200))).reshape(y.shape)
        assert np.all(np.abs(out - y) <= error)


def test_public_function_with_batched_operands():
    x, q, scale, zero_point = operands(21, 4, 20, 96, BF16, 4, 32, "int8", batch=(3, 3))
    ws = [quantized(q[i:], scale[i:], zero_point[i:], 32, 4).pack() for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws)
    f = lambda x, w: jax_qmm.block_scaled_mm(x, w, out_dtype=jnp.float32)
    y, error = allowed(x, q, scale, zero_point, 32)
    assert np.all(np.abs(jax.vmap(f)(x, stacked) - y) <= error)
    shared, shared_error = allowed(x, q[:1], scale[:1], zero_point[:1], 32)
    assert np.all(np.abs(jax.vmap(f, (0, None))(x, ws[0]) - shared) <= shared_error)


@pytest.mark.parametrize(
    ("m", "k", "block", "why"),
    [
        (2, 64, 24, "blocks have 24 columns; kernels serve multiples of 16"),
        (2, 2**19, 2**19, "K is 524288; kernels serve up to 524287"),
    ],
)
def test_what_the_kernels_do_not_serve(m, k, block, why):
    w = jax_qmm.QArray(jnp.zeros((1, k), jnp.int4), jnp.ones((1, -(-k // block))), tile_size=block)
    (row,) = jax_qmm.explain(jax_qmm.block_scaled_mm, jax.ShapeDtypeStruct((m, k), jnp.float32), w).rows
    assert why in row.runs_on


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [BF16, F16])
class TestDirect:
    """The kernels for up to 8 or 16 rows, whose warps copy for themselves, and whose blocks stay for several tiles."""

    @pytest.fixture(autouse=True)
    def direct_alone(self, all_kernels):
        all_kernels.restrict_block_scaled_mm("direct")

    @pytest.mark.parametrize("zero_point", ["none", "int8", F32])
    @pytest.mark.parametrize("block", [16, 32, 128])
    @pytest.mark.parametrize(
        ("m", "n", "k"),
        [
            (1, 33, 129),
            (3, 5, 1032),  # one column more than a step of all warps
            (8, 35, 5200),  # more steps than are on their way
            (7, 20, 5129),  # rows of x that do not start at multiples of 16 bytes
        ],
    )
    def test_steps(self, m, n, k, block, zero_point, dtype, bits):
        check(*operands(m, m, n, k, dtype, bits, block, zero_point), bits=bits, block=block)

    @pytest.mark.parametrize("zero_point", ["none", "int8"])
    @pytest.mark.parametrize(("m", "n", "k"), [(9, 33, 129), (16, 35, 5200), (13, 20, 5129)])
    def test_steps_of_more_rows(self, m, n, k, zero_point, dtype, bits):
        check(*operands(m, m, n, k, dtype, bits, 128, zero_point), bits=bits, block=128)

    @pytest.mark.parametrize(("m", "k"), [(1, 1100), (2, 2056), (5, 777), (8, 4640), (15, 1320), (16, 9300)])
    def test_blocks_stay_for_several_tiles(self, m, k, dtype, bits):
        """With x that stays, and more of it than there is room for."""
        n = 2 * 32 * 2 * _extension.gpu().sm_count + 40
        x, q, scale, zero_point = operands(m, m, n, k, dtype, bits, 128, "int8")
        out = check(x, q, scale, zero_point, bits=bits, block=128, out_dtype=BF16)
        np.testing.assert_array_equal(out, check(x, q, scale, zero_point, bits=bits, block=128, out_dtype=BF16))

    @pytest.mark.parametrize("batch", [(3, 3), (3, 1), (1, 3)])
    def test_batches(self, batch, dtype, bits):
        check(*operands(3, 4, 67, 136, dtype, bits, 64, "int8", batch=batch), bits=bits, block=64)
        n = 32 * 2 * _extension.gpu().sm_count + 40  # several tiles for each block
        check(*operands(3, 2, n, 136, dtype, bits, 64, "int8", batch=batch), bits=bits, block=64)

    def test_rows_that_are_not_there(self, dtype, bits):
        """They repeat the last one, and nothing of it is seen."""
        x, q, scale, zero_point = operands(4, 3, 40, 1032, dtype, bits, 128, "int8")
        clean = check(x, q, scale, zero_point, bits=bits, block=128)
        x[0, 2, 1031] = np.nan
        out = call(x, pack(q, bits), scale, zero_point, bits=bits, block=128)
        assert np.isnan(out[0, 2]).all()
        np.testing.assert_array_equal(out[0, :2], clean[0, :2])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("m", [1, 9, 17, 33])
@pytest.mark.parametrize("zero_point", ["int8", F32])
def test_k_is_split_where_blocks_are_few(zero_point, m, dtype, bits, monkeypatch):
    monkeypatch.setattr(_extension, "dequantizes_once", lambda devices, product: False)
    k = 9008
    x, q, scale, zero_point = operands(23, m, 35, k, dtype, bits, 48, zero_point, batch=(2, 1))
    w, bias = quantized(q, scale, zero_point, 48, bits).pack(), np.linspace(-1, 1, 35, dtype=F32)
    y, error = allowed(x, q, scale, zero_point, 48)
    f = jax.jit(lambda x: jax_qmm.block_scaled_mm(x, w, bias, activation="relu", out_dtype=jnp.float32))
    (row,) = jax_qmm.explain(f, x[0]).rows
    assert " split-K " in row.runs_on
    out = np.asarray(f(x[0]))
    assert np.all(np.abs(out - np.maximum(y[0] + bias, 0)) <= error[0] + 2.0**-23 * np.abs(bias))
    np.testing.assert_array_equal(out, f(x[0]))
    both = jax.jit(jax.vmap(lambda x: f(x)))(x)  # their rows are one matrix's
    assert np.all(np.abs(both - np.maximum(y + bias, 0)) <= error + 2.0**-23 * np.abs(bias))


def test_when_x_stays_float8(gpu, extension):
    def stays(m, k=8192):
        devices = jax.devices(_extension.platform())
        return _extension.multiplies_float8(devices, (m, 28672, k, 1, "float8_e4m3fn", "bfloat16", 4, 128, None))

    assert not any(stays(m) for m in (1, 8, 16))  # weights take the time, by kernels made for few rows
    assert stays(4096) == (gpu.arch == 90 and "90a" in extension.architectures())
    assert not stays(4096, 8200)  # TMA has no such rows
