"""Programs of so many calls that XLA makes CUDA graphs of them: recorded kernels wait for each other's results.

A program's first run is no graph, the second makes it, later ones change the arguments of its kernels. Steps jitted one
by one are too short for graphs; they give the same bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm
from jax_qmm import _extension
from jax_qmm.ops import conv
from jax_qmm.ops.conv_form import Window
from jax_qmm.reference import activation, conv as conv_reference
from jax_qmm.selftest.weight_only_conv import DILATION, PADDING, STRIDES, TAPS

pytestmark = pytest.mark.gpu(not_emulated="the emulator has no CUDA graphs")

RUNS, STEPS = 4, 3


def check_chain(extension, step, inputs, *constants, message=""):
    """STEPS of `step` in one program, on each of the inputs, against the same one by one."""

    def chain(x, *constants):
        for _ in range(STEPS):
            x = step(x, *constants)
        return x

    program, one = jax.jit(chain), jax.jit(step)
    recorded = extension.count_recorded()
    for x in inputs:
        want = x
        for _ in range(STEPS):
            want = one(want, *constants)
        got = np.asarray(program(x, *constants))
        np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), np.asarray(want).view(f"u{got.itemsize}"), message)
    if _extension.launches().startswith("recorded"):
        assert extension.count_recorded() - recorded >= STEPS, message


def matrices(dtype, m, k):
    """b `(k, k)` and RUNS different a `(m, k)`."""
    rng = np.random.default_rng(0)
    b, *inputs = (rng.standard_normal((rows, k), np.float32) for rows in (k, *[m] * RUNS))
    return [jnp.asarray(x * (50 if dtype == jnp.int8 else 1)).astype(dtype) for x in (b, *inputs)]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("m", [7, 150])
def test_every_kernel_is_recorded(extension, gpu, dtype, m):
    k = 1040
    b, *inputs = matrices(dtype, m, k)
    scale = jnp.full(m, 0.03 if dtype == jnp.float8_e4m3fn else 6e-4)

    def step(a, b, scale):
        return jax_qmm.scaled_mm(a, b, scale, 1.0).astype(dtype)

    key = (m, k, k, 1, str(jnp.dtype(dtype)), "bfloat16", dtype != jnp.int8)
    for choice in extension.ScaledMmProblem(*key).choices(gpu):
        extension.ScaledMmProblem(*key).tune(choice, gpu)  # a new function is compiled anew, with this choice
        check_chain(extension, lambda *x: step(*x), inputs, b, scale, message=extension.describe_scaled_mm(choice))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("m", [7, 150])
def test_b_is_read_as_the_kernel_before_has_written_it(extension, gpu, dtype, m):
    """Kernels bring lines of b into L2 before that one is done."""
    k = 1040
    _, a, *_ = matrices(dtype, m, k)
    rng = np.random.default_rng(1)
    inputs = [jnp.asarray(rng.standard_normal((k, k), np.float32)) for _ in range(RUNS)]

    def step(x, a):
        y = jax_qmm.scaled_mm(a, jax_qmm.quantize(x, dtype).qvalue, 1e-5 if dtype == jnp.int8 else 1e-4, 1.0)
        return jnp.roll(x, 1, 0) + y[0].astype(jnp.float32)[:, None]

    key = (m, k, k, 1, str(jnp.dtype(dtype)), "bfloat16", dtype != jnp.int8)
    for choice in extension.ScaledMmProblem(*key).choices(gpu):
        extension.ScaledMmProblem(*key).tune(choice, gpu)
        check_chain(extension, lambda *x: step(*x), inputs, a, message=extension.describe_scaled_mm(choice))


@pytest.mark.parametrize("shape", [(64, 2048), (63, 2049)])
@pytest.mark.parametrize("scale", [None, 0.05])
@pytest.mark.parametrize("axis", [-1, None])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "float8"])
def test_quantizers_are_recorded(extension, shape, scale, axis, kind):
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if kind == "float8" else jnp.float32
    inputs = [jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype) for _ in range(RUNS)]
    given = {"axis": axis, "symmetric": kind != "asymmetric"}
    given["qtype"] = jnp.float8_e4m3fn if kind == "float8" else jnp.int8
    if scale is not None:
        given |= {"scale": scale} | ({"zero_point": 3} if kind == "asymmetric" else {})

    def step(x):
        return (1.01 * jnp.roll(jax_qmm.quantize(x, **given).dequantize(), 1, 0)).astype(dtype)

    check_chain(extension, step, inputs)


def test_a_recorded_call_keeps_its_kernel(extension, gpu):
    m, k = 16, 512
    key = (m, k, k, 1, "int8", "bfloat16", False)
    b, *inputs = matrices(jnp.int8, m, k)
    step = lambda a, b, i: jax_qmm.scaled_mm(a + i, b, 1.0, 1.0)
    program = jax.jit(lambda a, b: [step(a, b, i) for i in range(8)])
    for x, choice in zip(inputs, extension.ScaledMmProblem(*key).choices(gpu)):
        extension.ScaledMmProblem(*key).tune(choice, gpu)
        for _ in range(2):
            got = program(x, b)
            for i in range(8):
                np.testing.assert_array_equal(got[i].astype(np.float32), jax.jit(step)(x, b, i).astype(np.float32))


def test_a_program_chooses_other_kernels_as_its_buffers_move(extension, gpu):
    """Where XLA captured calls, as long as kernels were not recorded, it gave a kernel of before the new arguments."""
    image, taps, images, channels, outputs = (7, 6), TAPS, 3, 16, 133
    window = Window(STRIDES, PADDING, (1, 1), DILATION, 1)
    rng = np.random.default_rng(0)
    int8 = lambda *shape: jnp.asarray(rng.integers(-128, 128, shape, np.int8))
    lhs, rhs = int8(images, *image, channels), int8(outputs, *taps, channels)
    given = {"zero_point_lhs": int8(images), "zero_point_rhs": int8(outputs).astype(jnp.int32)}
    params = dict(num_batch=0, window=window, activation=activation.NONE, out_dtype=jnp.dtype("int32"))
    cpu = jax.devices("cpu")[0]
    reference = jax.jit(lambda lhs, rhs, given: conv_reference.conv(lhs, rhs, **given, **params))
    with jax.default_device(cpu):
        want = np.asarray(reference(*jax.device_put((lhs, rhs, given), cpu)))

    sizes = ((1, *of) for of in (image, taps, window.out_shape(image, taps), window.strides))
    before, dilation = (0, *(first for first, _ in window.padding)), (1, *window.rhs_dilation)
    problem = extension.ConvProblem(1, images, channels, outputs, 1, *sizes, before, dilation, "int32", True)
    kernels = problem.choices(gpu)
    program, kept = jax.jit(lambda lhs, rhs, given: conv.bind(lhs, rhs, given, **params)), []
    for turn in range(40):
        words = str(rng.choice(kernels))
        extension.restrict_conv(words)
        kept.append(program(lhs, rhs, given))
        np.testing.assert_array_equal(kept[-1], want, f"{words}, turn {turn}")
        kept.append(jnp.zeros(int(rng.integers(1, 9000)), jnp.int8))
        while len(kept) > 30:
            kept.pop(int(rng.integers(len(kept))))
    extension.restrict_conv("")
