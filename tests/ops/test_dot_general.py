import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm
from jax_qmm import W8A8, QArray

E4M3 = jnp.dtype(ml_dtypes.float8_e4m3fn)
SCHEMES = {
    "int8": W8A8(),
    "asymmetric": W8A8(symmetric=False),
    "per_tensor": W8A8(activation="per_tensor", symmetric=False),
    "static": W8A8(activation_scale=0.03),
    "static_asymmetric": W8A8(symmetric=False, activation_scale=0.03, activation_zero_point=-20),
    "fp8": W8A8(E4M3),
}
ATOL = 1e-4  # of float32 sums of 8 products below 12
schemes = pytest.mark.parametrize("scheme", [pytest.param(scheme, id=name) for name, scheme in SCHEMES.items()])


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def stored(w, contracted, order=None, qtype=jnp.int8):
    """Quantizes `w` over its axes `contracted` and stores its axes in `order`, by default with those last."""
    contracted = [axis % w.ndim for axis in contracted]
    order = order or [axis for axis in range(w.ndim) if axis not in contracted] + contracted
    q = jax_qmm.quantize(w.transpose(order), qtype, axis=tuple(order.index(axis) for axis in contracted))
    return q.transpose([order.index(axis) for axis in range(w.ndim)])


def activation(x, scheme, contracted):
    axis = contracted if scheme.activation == "per_token" and scheme.activation_scale is None else None
    return jax_qmm.quantize(
        x,
        scheme.dtype,
        axis=axis,
        symmetric=scheme.symmetric,
        scale=scheme.activation_scale,
        zero_point=scheme.activation_zero_point,
    )


def dequantized(x, contracted):
    return (x if isinstance(x, QArray) else activation(x, W8A8(), contracted)).dequantize()


def exact(q):
    """The values that a QArray without blocks stands for, in float64."""
    qvalue, scale, zero_point = (
        np.asarray(0 if v is None else v, np.float64) for v in (q.qvalue, q.scale, q.zero_point)
    )
    return ((qvalue - zero_point) * scale).transpose(q.storage_axes())


def contracted_axes(equation, ndims):
    """The contracted axes of both operands."""
    terms, out = equation.split("->")
    terms = terms.split(",")
    expand = lambda term, n: term.replace("...", "-" * (n - len(term.replace("...", ""))))
    return [
        tuple(i for i, c in enumerate(expand(term, n)) if c.isalpha() and c not in out) for term, n in zip(terms, ndims)
    ]


def assert_close_to_exact(got, want, roundings=4):
    """float32 epilogue: the int sums are exact, each scale step rounds once."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=roundings * 2.0**-24, atol=1e-30)


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = [draw(st.integers(*bounds)) for bounds in ((0, 2), (1, 2), (0, 2), (0, 2))]
    letters = iter("abcdefghij")
    batch, contracted, left, right = ([next(letters) for _ in range(n)] for n in counts)
    sizes = {letter: draw(st.integers(1, 4)) for letter in (*batch, *contracted, *left, *right)}
    lhs, rhs, out = (
        list(rng.permutation(labels))
        for labels in (batch + contracted + left, batch + contracted + right, batch + left + right)
    )
    sides = draw(st.sampled_from(["lhs", "rhs", "both"]))
    operands = []
    for labels, side in ((lhs, "lhs"), (rhs, "rhs")):
        x = jnp.asarray(rng.normal(size=[sizes[label] for label in labels]), jnp.float32)
        order = [int(axis) for axis in rng.permutation(len(labels))]
        operands.append((x, order if side == sides or sides == "both" else None))
    equation = "".join([*lhs, ",", *rhs, "->", *out])
    return equation, operands, draw(st.sampled_from(list(SCHEMES)))


@hypothesis.settings(max_examples=12)
@hypothesis.given(problems())
def test_einsum_is_the_exact_product_of_what_the_operands_quantize_to(problem):
    equation, operands, name = problem
    scheme = SCHEMES[name]
    axes = contracted_axes(equation, [x.ndim for x, _ in operands])
    quantized = [
        activation(x, scheme, axis) if order is None else stored(x, axis, order, scheme.dtype)
        for (x, order), axis in zip(operands, axes)
    ]
    given = [x if order is None else q for (x, order), q in zip(operands, quantized)]
    options = {} if all(isinstance(x, QArray) for x in given) else {"scheme": scheme}
    got = jax.jit(functools.partial(jax_qmm.einsum, equation, **options))(*given)
    want = np.einsum(equation, *map(exact, quantized))
    if name == "fp8":  # float32 sums of 16 terms at most
        bound = 2.0**-20 * np.einsum(equation, *(np.abs(exact(q)) for q in quantized))
        assert got.shape == want.shape and (np.abs(np.asarray(got, np.float64) - want) <= bound + 1e-30).all()
    else:
        assert_close_to_exact(got, want)


@schemes
def test_differs_from_the_dequantized_product_by_the_rounding_of_the_activations(scheme):
    x, w = normal(3, 5, 64), stored(normal(64, 24, seed=1), (0,), qtype=scheme.dtype)
    got = np.asarray(jax_qmm.matmul(x, w, scheme=scheme), np.float64)
    dense = np.asarray(w.dequantize(), np.float64)
    q = activation(x, scheme, (2,))
    if scheme.dtype == E4M3:
        step = np.maximum(np.abs(x) * 2.0**-4, np.asarray(q.scale) * 2.0**-10)  # half an ulp of 3 bits
    else:
        step = np.asarray(q.scale, np.float64) * (0.5 if scheme.symmetric else 1.0) * np.ones(64)
        if scheme.activation_scale is not None:  # which may be too small for some
            step = np.maximum(step, np.abs(np.asarray(x) - np.asarray(q.dequantize())))
    bound = step.astype(np.float64) @ np.abs(dense) + 2.0**-18 * np.abs(np.asarray(x)) @ np.abs(dense)
    error = np.abs(got - np.asarray(x, np.float64) @ dense)
    assert (error <= bound).all()
    assert error.max() > 0  # something was quantized


@pytest.mark.parametrize(
    "scheme, dtype", list(zip(SCHEMES.values(), [jnp.float32, jnp.bfloat16, jnp.float16] * 2)), ids=str
)
def test_is_scaled_mm_bit_for_bit(scheme, dtype):
    x, w = normal(7, 64, dtype=dtype), stored(normal(64, 24, seed=1), (0,), qtype=scheme.dtype)
    bias = normal(24, seed=2)
    got = jax_qmm.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=dtype, scheme=scheme, bias=bias)
    q = activation(x, scheme, (1,))
    scales = q.scale.reshape(()) if q.scale.size == 1 else q.scale[:, 0], w.scale[:, 0]
    if q.zero_point is None:
        want = jax_qmm.scaled_mm(q.qvalue, w.qvalue, *scales, bias, out_dtype=dtype)
    else:
        azp = jnp.broadcast_to(q.zero_point, (7, 1))
        want = jax_qmm.scaled_mm_azp_per_token(
            q.qvalue, w.qvalue, *scales, jax_qmm.azp_adjustment(w.qvalue), azp, bias, out_dtype=dtype
        )
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_sums_kept_with_the_weight_replace_those_of_each_call():
    x, w = normal(7, 64), stored(normal(64, 4, 6, seed=1), (0,))
    scheme, call = W8A8(symmetric=False), functools.partial(jax_qmm.einsum, "mk,khd->mhd")
    np.testing.assert_array_equal(call(x, w.with_azp_adj(0), scheme=scheme), call(x, w, scheme=scheme))
    np.testing.assert_array_equal(call(x, w.with_azp_adj((0, 1)), scheme=scheme), call(x, w, scheme=scheme))
    sums = lambda w: str(jax.make_jaxpr(functools.partial(call, scheme=scheme))(x, w)).count("reduce_sum")
    assert (sums(w), sums(w.with_azp_adj(0))) == (1, 0)


def test_the_input_is_transposed_rather_than_the_weight():
    w = stored(normal(4, 6, 5), (0, 1))
    table = jax_qmm.explain(functools.partial(jax_qmm.einsum, "mdh,hdn->mn"), normal(3, 6, 4), w)
    assert [row.op.split()[0] for row in table.rows] == ["quantize", "scaled_mm"]


@pytest.mark.parametrize(
    "dims, lhs, rhs, weight",
    [
        (((1,), (0,)), (5, 8), (8, 6), "rhs"),
        (((2, 1), (0, 1)), (5, 4, 8), (8, 4, 6), "rhs"),
        (((0,), (0,)), (8, 5), (8,), "lhs"),
        (((0,), (0,)), (8,), (8,), "rhs"),
        (((1,), (1,)), (6, 8), (5, 8), "lhs"),
        (((2,), (1,), (0,), (2,)), (3, 5, 8), (6, 8, 3), "rhs"),
        (((1,), (2,), (2, 0), (1, 0)), (3, 8, 2, 5), (3, 2, 8), "lhs"),
        (((1,), (0,)), (0, 8), (8, 6), "rhs"),
        (((1,), (0,)), (5, 0), (0, 6), "rhs"),
    ],
)
def test_dot_general_has_the_shape_and_value_of_lax(dims, lhs, rhs, weight):
    contract, batch = dims[:2], dims[2:] or ((), ())
    operands = [normal(*lhs), normal(*rhs, seed=1)]
    given = [stored(x, a) if side == weight else x for x, side, a in zip(operands, ("lhs", "rhs"), contract)]
    dense = [dequantized(x, axes) for x, axes in zip(given, contract)]
    got = jax.jit(lambda *args: jax_qmm.dot_general(*args, (contract, batch)))(*given)
    want = jax.lax.dot_general(*dense, (contract, batch))
    assert got.shape == want.shape and got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=ATOL)


@pytest.mark.parametrize(
    "equation, implied, lhs, rhs, weight",
    [
        ("...k,kn->...n", "", (2, 3, 8), (8, 5), "rhs"),
        ("...k,kn", "->...n", (2, 3, 8), (8, 5), "rhs"),
        ("bk , kn", "->bn", (3, 8), (8, 5), "lhs"),
        ("...ij,...jk->...ik", "", (2, 1, 3, 8), (2, 4, 8, 5), "lhs"),
        ("...ij,...jk->...ik", "", (2, 1, 3, 8), (2, 4, 8, 5), "rhs"),
        ("...ij,...jk", "->...ik", (4, 3, 8), (8, 5), "rhs"),
        ("mk,ekn->emn", "", (3, 8), (2, 8, 5), "rhs"),
        ("btf,fhd->bthd", "", (2, 3, 8), (8, 4, 2), "rhs"),
        ("bthd,hdf->btf", "", (2, 3, 4, 2), (4, 2, 8), "rhs"),
        ("bqhd,bkhd->bhqk", "", (2, 3, 4, 8), (2, 5, 4, 8), "rhs"),
        ("kn,...k->...n", "", (8, 5), (2, 3, 8), "lhs"),
        ("k,k->", "", (8,), (8,), "lhs"),
        # Sizes of 1 are repeated: batch, contracted, and one head of keys for several of queries.
        ("bmk,bkn->bmn", "", (1, 3, 8), (4, 8, 5), "rhs"),
        ("mk,kn->mn", "", (3, 1), (8, 5), "rhs"),
        ("mk,kn->mn", "", (3, 8), (1, 5), "rhs"),
        ("mkj,jkn->mn", "", (3, 1, 2), (1, 4, 5), "rhs"),
        ("bqhd,bkhd->bhqk", "", (2, 3, 4, 8), (2, 5, 1, 8), "rhs"),
        ("bqhd,bkhd->bhqk", "", (2, 3, 4, 8), (2, 5, 1, 8), "lhs"),
    ],
)
def test_einsum_has_the_shape_and_value_of_jnp(equation, implied, lhs, rhs, weight):
    operands = [normal(*lhs), normal(*rhs, seed=1)]
    axes = contracted_axes((equation + implied).replace(" ", ""), (len(lhs), len(rhs)))
    given = [stored(x, a) if side == weight else x for x, side, a in zip(operands, ("lhs", "rhs"), axes)]
    dense = [dequantized(x, a) for x, a in zip(given, axes)]
    got, want = jax.jit(functools.partial(jax_qmm.einsum, equation))(*given), jnp.einsum(equation, *dense)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=ATOL)


@pytest.mark.parametrize(
    "a, b",
    [
        ((8,), (8,)),
        ((8,), (8, 5)),
        ((3, 8), (8,)),
        ((2, 3, 8), (8, 5)),
        ((3, 8), (2, 8, 5)),
        ((2, 3, 8), (2, 8, 5)),
        ((4, 1, 3, 8), (2, 8, 5)),
        ((8,), (2, 8, 5)),
        ((2, 3, 8), (8,)),
    ],
)
def test_matmul_has_the_shape_and_value_of_jnp(a, b):
    x, w = normal(*a), stored(normal(*b, seed=1), (-2 if len(b) > 1 else -1,))
    got, want = jax.jit(jax_qmm.matmul)(x, w), jnp.matmul(dequantized(x, (-1,)), w.dequantize())
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=ATOL)


def test_the_output_dtype_is_that_of_the_dequantized_product():
    w = stored(normal(8, 5), (0,))
    half = QArray(w.qvalue, w.scale.astype(jnp.bfloat16)).T
    for x, weight, preferred in (
        (jnp.float32, w, None),
        (jnp.bfloat16, w, None),
        (jnp.bfloat16, half, None),
        (jnp.float16, half, None),
        (jnp.float32, w, jnp.bfloat16),
    ):
        x = normal(3, 8, dtype=x)
        want = preferred or jnp.matmul(x, weight.dequantize()).dtype
        assert jax_qmm.matmul(x, weight, preferred_element_type=preferred).dtype == want


def test_a_weak_float_does_not_widen_the_output():
    w = stored(normal(8, 5), (0,))
    half = QArray(w.qvalue, w.scale.astype(jnp.bfloat16)).T
    x = jnp.full((3, 8), 0.5)  # weakly typed
    assert x.aval.weak_type and jax_qmm.matmul(x, half).dtype == jnp.matmul(x, half.dequantize()).dtype == jnp.bfloat16


@pytest.mark.parametrize("bias", [None, (5,), (3, 5), (3, 1)])
def test_strict_promotion_takes_bfloat16_throughout(bias):
    x, w = normal(3, 8, dtype=jnp.bfloat16), stored(normal(8, 5), (0,))
    half = QArray(w.qvalue, w.scale.astype(jnp.bfloat16)).T
    per_row = jax_qmm.quantize(normal(8, 5), axis=1)  # scales along the contraction
    dequantized = QArray(per_row.qvalue, per_row.scale.astype(jnp.bfloat16))
    bias = None if bias is None else jnp.ones(bias, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        for weight in (half, dequantized):
            for scheme in (W8A8(), W8A8(activation_scale=0.05)):
                f = lambda x, weight=weight, scheme=scheme: jax_qmm.matmul(x, weight, bias=bias, scheme=scheme)
                assert f(x).dtype == jax.grad(lambda x, f=f: f(x).sum())(x).dtype == jnp.bfloat16


def test_without_a_qarray_it_is_jax():
    x, w, bias = normal(3, 8), normal(8, 5, seed=1), normal(5)
    dims = (((1,), (0,)), ((), ()))
    np.testing.assert_array_equal(
        jax_qmm.dot_general(x, w, dims, None, jnp.float32, None), jax.lax.dot_general(x, w, dims)
    )
    np.testing.assert_array_equal(jax_qmm.matmul(x, w, bias=bias), jnp.matmul(x, w) + bias)
    np.testing.assert_array_equal(jax_qmm.einsum("ab,bc,cd", x, w, w.T), jnp.einsum("ab,bc,cd", x, w, w.T))


@pytest.mark.parametrize("shape", [(4, 6), (6,), (), (1, 1), (5, 1, 1), (2, 5, 4, 6)])
def test_bias_broadcasts_and_is_added_before_the_rounding(shape):
    x, w, bias = normal(2, 5, 32), stored(normal(32, 4, 6, seed=1), (0,)), normal(*shape, seed=2)
    call = functools.partial(jax_qmm.einsum, "btk,khd->bthd", x, w)
    want = (call() + bias).astype(jnp.bfloat16)
    got = call(bias=bias, preferred_element_type=jnp.bfloat16)
    # The kernel's fma rounds once where `call() + bias` rounds twice: a tie in bfloat16 may fall to the other
    # side.
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2.0**-7)
    assert (got != want).mean() < 0.02


def test_one_zero_point_is_enough_for_the_kernel_on_either_side():
    x, w = normal(5, 8), jax_qmm.quantize(normal(6, 8, seed=1), symmetric=False)
    for equation, operands in (("mk,nk->mn", (x, w)), ("nk,mk->nm", (w, x))):
        quantized = [q if isinstance(q, QArray) else jax_qmm.quantize(q) for q in operands]
        assert_close_to_exact(jax_qmm.einsum(equation, *operands), np.einsum(equation, *map(exact, quantized)))


# Bad input


W = jax_qmm.quantize(np.ones((6, 8), np.float32)).T


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: jax_qmm.matmul(np.ones((2, 8), np.int32), W),
            TypeError,
            "a has dtype int32, needs .* or to be a QArray",
        ),
        (lambda: jax_qmm.matmul(np.float32(1), W), ValueError, "a has rank 0, needs 1 or more"),
        (lambda: jax_qmm.matmul(normal(2, 7), W), ValueError, "'k' has sizes 7 and 8"),
        (lambda: jax_qmm.dot_general(normal(2, 7), W, (((1,), (0,)), ((), ()))), TypeError, "contracting dimensions"),
        (lambda: jax_qmm.dot_general(normal(2, 8), W, (((1,), (2,)), ((), ()))), TypeError, "."),
        (
            lambda: jax_qmm.matmul(normal(2, 8), W, preferred_element_type=jnp.int32),
            TypeError,
            "preferred_element_type is int32, needs float32",
        ),
        (lambda: jax_qmm.matmul(normal(2, 8), W, scheme="w8a8"), TypeError, "scheme is 'w8a8', needs a W8A8"),
        (
            lambda: jax_qmm.matmul(normal(2, 8), W, scheme=W8A8(E4M3)),
            ValueError,
            "scheme has dtype float8_e4m3fn, needs",
        ),
        (
            lambda: jax_qmm.matmul(W.T, W, scheme=W8A8()),
            ValueError,
            r"scheme is W8A8\(int8, per_token\), needs to be None: both operands are QArrays",
        ),
        (
            lambda: jax_qmm.matmul(normal(2, 8), W, bias=np.ones(5, np.float32)),
            ValueError,
            r"bias has shape \(5,\), needs",
        ),
        (lambda: jax_qmm.matmul(normal(2, 8), W, bias=np.ones(6, np.int32)), TypeError, "bias has dtype int32"),
        (lambda: jax_qmm.einsum("mk,kn,no->mo", normal(2, 8), W, normal(6, 2)), ValueError, "needs 2 operands, got 3"),
        (lambda: jax_qmm.einsum("mk->m", W), ValueError, "needs 2 operands, got 1"),
        (lambda: jax_qmm.einsum("mk", normal(2, 8), W), ValueError, "needs a string of two terms"),
        (lambda: jax_qmm.einsum("kk,kn->n", normal(8, 8), W), ValueError, "'kk' repeats a letter"),
        (lambda: jax_qmm.einsum("mk,kn->n", normal(2, 8), W), ValueError, "'m' is summed in one operand alone"),
        (lambda: jax_qmm.einsum("...k,kn->n", normal(2, 8), W), ValueError, "'...' is summed in one operand alone"),
        (lambda: jax_qmm.einsum("mk,kn->mnn", normal(2, 8), W), ValueError, "output 'mnn' repeats a letter"),
        (lambda: jax_qmm.einsum("mk,kn->mz", normal(2, 8), W), ValueError, "output 'mz' .* one of neither operand"),
        (lambda: jax_qmm.einsum("mka,kn->mn", normal(2, 8), W), ValueError, r"'mka' does not fit shape \(2, 8\)"),
        (lambda: jax_qmm.einsum("m1,1n->mn", normal(2, 8), W), ValueError, "'m1' does not fit"),
        (lambda: jax_qmm.einsum(normal(2, 8), [0, 1], W, [1, 2]), ValueError, "needs its subscripts as a string"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
