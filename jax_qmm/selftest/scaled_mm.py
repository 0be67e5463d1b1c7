"""Products of 8-bit operands, with the plain epilogue and the full one."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_qmm
from jax_qmm import _extension
from jax_qmm.reference import activation as activations, scaled_mm as reference
from jax_qmm.selftest.result import Checks, Result, bits
from jax_qmm.tuning import Product

# M and K of products, ragged in whatever a kernel tiles; rows of 75 bytes are aligned for the general kernel alone.
PRODUCTS = ((1, 16), (7, 4624), (17, 1040), (130, 272), (333, 2064), (33, 75))
# Each kernel gets an N of its own, with rows of so many bytes more than the one before, so that one program runs all.
FIRST_N, ALIGNED = 128, 16
# dtype of the operands, dtype of the result, whether fp8 is summed in the tensor cores' narrow accumulator, and whether
# the kernels are those with the full epilogue, which then has zero points of both sides, a clamp and 8-bit results.
KINDS = (
    ("int8", "bfloat16", False, False),
    ("int8", "float32", False, False),
    ("int8", "int32", False, False),
    ("float8_e4m3fn", "bfloat16", True, False),
    ("float8_e4m3fn", "float32", True, False),
    ("float8_e4m3fn", "bfloat16", False, False),
    ("int8", "bfloat16", False, True),
    ("int8", "float32", False, True),
    ("int8", "int8", False, True),
    ("float8_e4m3fn", "bfloat16", True, True),
    ("float8_e4m3fn", "float32", True, True),
    ("float8_e4m3fn", "float8_e4m3fn", True, True),
    ("float8_e4m3fn", "bfloat16", False, True),
    ("float8_e4m3fn", "float8_e4m3fn", False, True),
)
# What the full epilogue does besides.
CLAMP, OUT_SCALE, OUT_ZERO_POINT = (-40.0, 30.0), 0.37, -9
# Of the sum of absolute products: tensor cores cut each of the 33 terms of a step at 2**-13 of the largest.
FP8_TOLERANCE = 2.0**-9


def checks(kernels, gpu) -> Checks:
    """A check for each kind of product with each M and K, by name."""
    for kind in KINDS:
        for m, k in PRODUCTS:
            check = functools.partial(check_scaled_mm, kernels, gpu, kind, m, k)
            yield f"scaled_mm {' '.join(map(str, kind))}, M {m}, K {k}", check


def check_scaled_mm(kernels, gpu, kind: tuple[str, str, bool, bool], m: int, k: int) -> Iterator[Result]:
    """Runs every kernel that serves products of this kind, M and K.

    int8 must agree bit for bit, and with the full epilogue fp8 too, whose sums are exact there; else fp8 within
    FP8_TOLERANCE of the sum of absolute products and one rounding.
    """
    dtype, out_dtype, fast_accum, full_epilogue = kind
    step = ALIGNED // jnp.dtype(out_dtype).itemsize
    choices = kernels.ScaledMmProblem(m, FIRST_N + step, k, 1, *kind).choices(gpu)
    products = [Product(m, FIRST_N + step * (i + 1), k, 1, *kind) for i in range(len(choices))]
    for product, choice in zip(products, choices):
        kernels.ScaledMmProblem(*product).tune(choice, gpu)
    operands = _operands(m, products[-1].n, k, kind)
    inputs = [
        {name: x[: product.n] if reference.LABELS[name].startswith("n") else x for name, x in operands.items()}
        for product in products
    ]
    outputs = jax.jit(lambda inputs: [_by_kernels(kind, **x) for x in inputs])(inputs)
    want, tolerance = _expected(operands, kind)
    more = ["full epilogue"] * full_epilogue + ["highest"] * (dtype != "int8" and not fast_accum)
    name = ", ".join([f"scaled_mm, {dtype} to {out_dtype}", *more])
    for product, choice, out in zip(products, choices, outputs):
        of_product = np.s_[:, : product.n]
        if tolerance is None:
            right = bits(np.asarray(out)) == bits(want[of_product])
        else:
            right = np.abs(np.asarray(out, np.float64) - want[of_product]) <= tolerance[of_product]
        shape = f"M {m}, N {product.n}, K {k}"
        words = _extension.as_compiled(kernels, kernels.describe_scaled_mm(choice), gpu)
        yield Result(name, words, shape, int((~right).sum()))


def _operands(m, n, k, kind) -> dict[str, Any]:
    """a, b and the vectors, by the names that they have in the reference."""
    dtype, out_dtype, _, full_epilogue = kind
    rng = np.random.default_rng(m)
    if dtype == "int8":
        a, b = (rng.integers(-128, 128, (rows, k), np.int8) for rows in (m, n))
    elif full_epilogue:
        a, b = (rng.choice([-1.0, 0.0, 1.0], (rows, k)).astype(jnp.dtype(dtype)) for rows in (m, n))
    else:
        a, b = (rng.standard_normal((rows, k), np.float32).astype(jnp.dtype(dtype)) for rows in (m, n))
    if out_dtype == "int32":  # the sums alone
        return {"a": a, "b": b}
    vectors = {"scale_a": m, "scale_b": n, "bias": n}
    operands = {"a": a, "b": b} | {name: rng.uniform(-2, 2, size).astype("f") for name, size in vectors.items()}
    if dtype == "int8":
        operands["azp"] = rng.integers(-128, 128, m, np.int32)
        operands["azp_adj"] = b.sum(axis=1, dtype=np.int32)
    if full_epilogue:  # most results between the bounds of the clamp
        operands["scale_a"] *= np.float32(20 / np.sqrt(k) / (1e4 if dtype == "int8" else 1))
        if dtype == "int8":
            operands["azp_b"] = rng.integers(-128, 128, n, np.int32)
            operands["sums_a"] = a.sum(axis=1, dtype=np.int32) - k * operands["azp"]
    return operands


def _output(kind) -> dict[str, Any]:
    """What the full epilogue takes besides vectors along the result."""
    _, out_dtype, _, full_epilogue = kind
    options: dict[str, Any] = {"activation": CLAMP} if full_epilogue else {}
    if jnp.dtype(out_dtype).itemsize == 1:
        options["out_scale"] = jnp.float32(OUT_SCALE)
    if out_dtype == "int8":
        options["out_zero_point"] = jnp.int32(OUT_ZERO_POINT)
    return options


def _by_kernels(kind, a, b, scale_a=1.0, scale_b=1.0, bias=None, **terms: Any):
    dtype, out_dtype, fast_accum, _ = kind
    options = {"out_dtype": out_dtype} | _output(kind)
    if "azp_b" in terms:
        azp, azp_b = terms["azp"], terms["azp_b"]
        sums = {"sums_a": terms["sums_a"] + a.shape[1] * azp, "sums_b": terms["azp_adj"]}
        return jax_qmm.scaled_mm_zero_points(a, b, scale_a, scale_b, azp, azp_b, bias, **sums, **options)
    if "azp" in terms:
        azp, azp_adj = terms["azp"], terms["azp_adj"]
        return jax_qmm.scaled_mm_azp_per_token(a, b, scale_a, scale_b, azp_adj, azp, bias, **options)
    if dtype != "int8" and not fast_accum:
        options["precision"] = "highest"
    return jax_qmm.scaled_mm(a, b, scale_a, scale_b, bias, **options)


def _expected(operands, kind):
    """The reference's result and by how much a kernel's may differ from it; None where it may not."""
    dtype, out_dtype, _, full_epilogue = kind
    exact = dtype == "int8" or full_epilogue
    with jax.default_device(jax.devices("cpu")[0]):
        if out_dtype == "int32":
            return np.asarray(reference.sums(operands["a"], operands["b"])), None
        options = _output(kind)
        if full_epilogue:
            options["activation"] = activations.Activation("clamp", *CLAMP)
        want = np.asarray(
            reference.scaled_mm(**operands, **options, out_dtype=jnp.dtype(out_dtype) if exact else jnp.float32)
        )
    if exact:
        return want, None
    a, b, scale_a, scale_b = (np.abs(operands[name].astype("f")) for name in ("a", "b", "scale_a", "scale_b"))
    size = scale_a[:, None] * scale_b * (a @ b.T)
    return want, FP8_TOLERANCE * size + float(jnp.finfo(out_dtype).eps) * np.abs(want) + 2.0**-20
