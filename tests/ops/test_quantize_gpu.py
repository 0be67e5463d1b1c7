"""The quantizer kernels against numpy, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm

pytestmark = pytest.mark.gpu

KINDS = ((jnp.int8, True), (jnp.int8, False), (jnp.float8_e4m3fn, True))  # qtype, symmetric
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
TINY = np.finfo(np.float32).tiny
# Around the lengths at which the kernels change: vectors and single elements, threads per row, elements per
# thread, rows in pieces, tensors over many blocks.
LENGTHS = (
    0,
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    64,
    100,
    127,
    128,
    248,
    255,
    256,
    264,
    512,
    1000,
    1024,
    1032,
    4095,
    4096,
    4097,
    8191,
    8192,
    8200,
    16384,
    16392,
    28672,
    65536,
    65537,
    65544,
    131072 + 3,
)
SCALES = (0.0078125, 0.013, -0.5, 0.0, -0.0, 1e-42, TINY, 2.0**-80, 2.0**-81, 2.0**80, 3e38, np.inf, -np.inf, np.nan)
ZERO_POINTS = (-128, 127, 0, 1, -1, 1000, 2**24 + 1, 2**31 - 1, -(2**31), 5, -5, 3, 2, 9)


LONG = pytest.mark.gpu(not_emulated="a minute; test_every_row_length has rows as long")


def dynamic_oracle(x, qtype, symmetric, axis):
    """x.astype(float32) quantized over `axis`: qvalue, scale, zero_point (None when symmetric)."""
    x = x.astype(np.float32)
    extremum = functools.partial(np.max, axis=axis, keepdims=True, initial=np.float32(0))
    with np.errstate(all="ignore"):
        if symmetric:
            steps = np.float32(127 if qtype == jnp.int8 else 448)
            scale, zero_point = np.maximum(extremum(np.abs(x)) / steps, TINY), None
        else:
            high, low = extremum(x), -extremum(-x)
            unit = np.where(np.isinf(high - low), np.float32(0.5), np.float32(1))  # a range that overflows: by halves
            scale = np.maximum((unit * high - unit * low) / (unit * np.float32(255)), TINY)
            zero_point = np.clip(np.rint(np.float32(-128) - low / scale), -128, 127)
            zero_point = np.where(np.isnan(zero_point), 0, zero_point).astype(np.int32)
    return static_oracle(x, qtype, scale, zero_point), scale, zero_point


def static_oracle(x, qtype, scale, zero_point):
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / scale
        if qtype != jnp.int8:
            return np.clip(quotient, -448, 448).astype(qtype)
        quotient = np.rint(quotient)
        if zero_point is not None:
            quotient = quotient + zero_point.astype(np.float32)
        return np.where(np.isnan(quotient), 0, np.clip(quotient, -128, 127)).astype(np.int8)


def assert_same(actual, expected, what):
    """Equal bits, the sign of zero included; any NaN equals any other."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    bits = [np.ascontiguousarray(v).view(f"u{v.dtype.itemsize}") for v in (actual, expected)]
    wrong = bits[0] != bits[1]
    if actual.dtype.kind not in "iu":
        wrong &= ~(np.isnan(actual.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    where = np.argwhere(wrong)
    assert not len(where), (
        f"{what}: {len(where)} of {wrong.size} differ, first at {where[0]}: "
        f"{actual[tuple(where[0])]} for {expected[tuple(where[0])]}"
    )


def check(xs, scales=(), prepare=lambda xs: xs):
    """All kinds of quantization of each 2-D array, in one program, against the oracle.

    Args:
      xs: arrays (R, C).
      scales: for each x a list of pairs (scale, zero_point), of shapes () or (R, 1), for static quantizers.
      prepare: makes what is quantized out of xs, inside the program.
    """

    def quantized(xs):
        out = []
        xs = prepare(xs)
        for x, pairs in zip(xs, scales or [()] * len(xs)):
            for qtype, symmetric in KINDS:
                out += [jax_qmm.quantize(x, qtype, axis=axis, symmetric=symmetric) for axis in (-1, None)]
                for scale, zero_point in pairs:
                    given = {} if symmetric else {"zero_point": zero_point}
                    out.append(jax_qmm.quantize(x, qtype, symmetric=symmetric, scale=scale, **given))
        return [(q.qvalue, q.scale, q.zero_point) for q in out]

    actual = iter(jax.device_get(jax.jit(quantized)([jnp.asarray(x) for x in xs])))
    xs = prepare(xs)
    for x, pairs in zip(xs, scales or [()] * len(xs)):
        for qtype, symmetric in KINDS:
            name = f"{x.dtype}{list(x.shape)} {np.dtype(qtype)} {'symmetric' if symmetric else 'asymmetric'}"
            for axis in (-1, None):
                for part, a, e in zip("qsz", next(actual), dynamic_oracle(x, qtype, symmetric, axis)):
                    assert (a is None) == (e is None)
                    if e is not None:
                        assert_same(a, e, f"{name} axis {axis} {part}")
            for scale, zero_point in pairs:
                expected = static_oracle(x, qtype, scale, None if symmetric else zero_point)
                assert_same(next(actual)[0], expected, f"{name} scale {scale.ravel()[:3]}")


def random(rng, dtype, *shape):
    """Values with outliers, so that most are a few steps in size and some rows have a wide range."""
    x = rng.standard_normal(shape, np.float32) * np.exp(rng.standard_normal((*shape[:1], 1), np.float32))
    return (x + (rng.random(shape, np.float32) < 0.01) * np.float32(7)).astype(dtype)


@pytest.mark.parametrize("cols", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_row_length(dtype, cols, emulated):
    rng = np.random.default_rng(cols)
    if cols < (200 if emulated else 5000):
        counts = (0, 1, 2, 3, 129)
    else:
        counts = (1,) if emulated and cols > 5000 else (1, 2, 5)
    xs = [random(rng, dtype, rows, cols) for rows in counts]
    scales = [
        [
            (np.float32(0.031), np.int32(-7)),
            (np.float32(rng.random((len(x), 1)) + 0.01), rng.integers(-128, 128, (len(x), 1), np.int32)),
        ]
        for x in xs
    ]
    check(xs, scales)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: np.dtype(d).name)
def test_every_16_bit_value(dtype, emulated):
    values = np.arange(65536, dtype=np.uint16).view(dtype)
    finite = values[np.isfinite(values.astype(np.float32))]
    # Rows of like size, normal or subnormal.
    columns = np.sort(finite).reshape(-1, 128 if dtype == np.float16 else 255)
    pairs = [(np.float32(scale), np.int32(zero_point)) for scale, zero_point in zip(SCALES, ZERO_POINTS)]
    pairs = pairs[: 3 if emulated else None]
    check([columns, values.reshape(256, 256)], [pairs, pairs])


def test_any_bits_of_float32(emulated):
    rng = np.random.default_rng(0)
    half, cols = (8, 512) if emulated else (256, 1024)
    bits = rng.integers(0, 2**32, (2 * half, cols), np.uint32)
    bits[:half] = bits[:half] & 0x807FFFFF | rng.integers(1, 250, (half, 1), np.uint32) << 23  # of like size
    x = bits.view(np.float32)
    pairs = [(np.float32(scale), np.int32(zero_point)) for scale, zero_point in zip(SCALES, ZERO_POINTS)]
    per_row = (rng.choice(np.float32(SCALES), (2 * half, 1)), rng.choice(np.int32(ZERO_POINTS), (2 * half, 1)))
    check([x, x[half:, :-24], x[:half, :333]], [[*pairs, per_row], pairs, pairs])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    "cols",
    (
        24,
        128,
        301,
        pytest.param(4096, marks=LONG),
        pytest.param(70001, marks=LONG),
    ),
)
def test_special_rows(dtype, cols):
    rng = np.random.default_rng(cols)
    row = random(rng, np.float32, 1, cols)[0]
    largest, smallest = float(ml_dtypes.finfo(dtype).max), float(ml_dtypes.finfo(dtype).smallest_subnormal)
    at = lambda i, value: np.where(np.arange(cols) == i % cols, np.float32(value), row)
    halves = np.float32(np.arange(cols) % 256 - 127.5)  # ties once the row's scale is 1
    x = np.stack(
        [
            0 * row,
            -np.abs(0 * row),
            0 * row + 3,
            0 * row - 3,
            np.abs(row),
            -np.abs(row) - 1,
            np.abs(row) + 100,
            at(0, np.nan),
            at(-1, np.nan),
            at(5, -np.nan),
            at(-2, np.inf),
            at(3, -np.inf),
            at(9, np.nan) * np.inf,
            at(1, largest),
            at(1, -largest),
            np.where(row > 0, largest, -largest),
            np.sign(row) * smallest,
            np.floor(row) * smallest,
            at(2, smallest) * 0,
            at(11, 1e-30),
            row * np.float32(1e-30),
            np.where(np.arange(cols) == 7, 127, halves),
            np.where(np.arange(cols) == 7, 448, halves),
            np.where(np.arange(cols) == 7, 255, np.abs(halves)),
            np.where(np.arange(cols) == 7, -255, -np.abs(halves)),
        ]
    )
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    check([x, *(x[i : i + 1] for i in range(len(x)))])


def test_slices_inside_a_program():
    def prepare(xs):
        (x,) = xs
        return [x[3:], x[:, 5:], x[1:20, 7:1000], x.reshape(-1)[1:].reshape(2, -1), x[:, ::2], x.T]

    check([random(np.random.default_rng(2), ml_dtypes.bfloat16, 37, 1031)], prepare=prepare)


def test_inside_scan():
    rng = np.random.default_rng(3)
    xs = random(rng, np.float32, 4 * 16, 1024).reshape(4, 16, 1024)

    @jax.jit
    def scanned(xs):
        def step(carry, x):
            # Each step's input depends on the last one's output.
            x = x + carry
            outs = [
                jax_qmm.quantize(x, qtype, axis=axis, symmetric=symmetric)
                for qtype, symmetric in KINDS
                for axis in (-1, None)
            ]
            return outs[0].qvalue.astype(x.dtype), (x, [(q.qvalue, q.scale) for q in outs])

        return jax.lax.scan(step, jnp.zeros_like(xs[0]), xs)[1]

    inputs, outs = jax.device_get(scanned(jnp.asarray(xs)))
    for step, x in enumerate(inputs):
        actual = iter(outs)
        for qtype, symmetric in KINDS:
            for axis in (-1, None):
                q, scale, _ = dynamic_oracle(x, qtype, symmetric, axis)
                for a, e in zip(next(actual), (q, scale)):
                    assert_same(a[step], e, f"step {step} {qtype} axis {axis}")


def test_runs_are_equal(emulated):
    x = jnp.asarray(random(np.random.default_rng(4), np.float32, 5 if emulated else 1000, 8191))
    run = jax.jit(lambda x: [jax_qmm.quantize(x, axis=axis, symmetric=False) for axis in (-1, None)])
    first, second = jax.device_get((run(x), run(x)))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second)))


@pytest.mark.parametrize("cols", [0, 1, 31, 64, 128, 256, 264, 1000, 4104, 8200, 16392, 65537])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_what_shares_a_scale(dtype, cols):
    """In every way that has a kernel, of the handlers themselves; the values and scales stay what they are."""
    rows = 3
    x = np.random.default_rng(cols).standard_normal((rows, cols), np.float32).astype(dtype)
    x[1, cols // 2 :] = np.nan  # for which no quick division serves
    column = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    values, workspace = jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct((2,), jnp.uint32)
    for zero_points in (False, True):
        for count in (rows, 1):
            scales = jax.ShapeDtypeStruct((count, 1), jnp.float32)
            others = [column((count, 1))] * zero_points
            dynamic = [values, scales, workspace, *others]
            call = functools.partial(jax.ffi.ffi_call, "jax_qmm_quantize_dynamic")
            plain = jax.jit(lambda x: call(dynamic)(x, sums=False))(x)
            *same, got = jax.jit(lambda x: call([*dynamic, column((count, 1))])(x, sums=True))(x)
            what = f"{count} scales, zero points: {zero_points}"
            for a, b in zip((plain[0], plain[1], *plain[3:]), (same[0], same[1], *same[3:])):
                assert_same(np.asarray(a), np.asarray(b), what)
            check_sums(plain[0], got, what)

            given = [np.float32([[0.01], [0.0], [1.0]])[:count], np.int32([[7], [-3], [0]])[:count]][: 1 + zero_points]
            call = functools.partial(jax.ffi.ffi_call, "jax_qmm_quantize_static")
            plain = jax.jit(lambda *operands: call(values)(*operands))(x, *given)
            same, got = jax.jit(lambda *operands: call([values, column((count, 1))])(*operands))(x, *given)
            assert_same(np.asarray(plain), np.asarray(same), f"static, {what}")
            check_sums(plain, got, f"static, {what}")


def check_sums(values, got, what):
    of_rows = np.asarray(values).sum(1, dtype=np.int32, keepdims=True)
    assert_same(np.asarray(got), of_rows if len(got) > 1 else of_rows.sum(0, dtype=np.int32, keepdims=True), what)
