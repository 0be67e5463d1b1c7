"""Products that no kernel computes: their values, and how they say so."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import QArray
from jax_qmm.ops import dispatch
from jax_qmm.ops.dequantized_dot import REASONS, dequantized_reason

FP8 = "float8_e4m3fn"


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    "reason, make",
    {
        "no_contraction": lambda: ("k,n->kn", jax_qmm.quantize(normal(8)), normal(5)),
        "two_dtypes": lambda: (
            "mk,kn->mn",
            jax_qmm.quantize(normal(5, 8)),
            jax_qmm.quantize(normal(6, 8), "float8_e4m3fn").T,
        ),
        "blocks": lambda: ("mk,nk->mn", normal(5, 8), QArray(normal(6, 8).astype(FP8), jnp.ones((2, 1)))),
        "scales_along_contraction": lambda: ("mk,kn->mn", normal(5, 8), jax_qmm.quantize(normal(8, 6), axis=1)),
        "weight_only": lambda: (
            "mk,nk->mn",
            jax_qmm.quantize(normal(5, 8), jnp.int4),
            jax_qmm.quantize(normal(6, 8), jnp.int4),
        ),
        "packed": lambda: ("mk,kn->mn", normal(5, 8), jax_qmm.quantize(normal(8, 6), jnp.int4, axis=0).pack()),
        "merged": lambda: (
            "md,nhd->mnh",
            normal(5, 4),
            jax_qmm.quantize(normal(6, 8), jnp.int4).pack().reshape(6, 2, 4),
        ),
    }.items(),
    ids=REASONS,
)
def test_what_the_kernels_cannot_do_is_dequantized_and_says_so(reason, make, monkeypatch):
    equation, *operands = make()
    call = functools.partial(jax_qmm.einsum, equation)
    dense = [x.dequantize() if isinstance(x, QArray) else x for x in operands]
    dispatch._noted.clear()
    with pytest.warns(UserWarning, match=f"jax_qmm.dot_general runs on .*{REASONS[reason]}"):
        got = jax.jit(call)(*operands)
    np.testing.assert_allclose(got, jnp.einsum(equation, *dense), rtol=1e-6, atol=1e-6)
    names = re.findall(r"name=(jax_qmm_\w+)", str(jax.make_jaxpr(call)(*operands)))
    assert [dequantized_reason(name) for name in names] == [REASONS[reason]]
    for i, x in enumerate(operands):
        if not isinstance(x, QArray):
            loss = lambda f, ops: lambda x: f(equation, *ops[:i], x, *ops[i + 1 :]).sum()
            got, want = jax.grad(loss(jax_qmm.einsum, operands))(x), jax.grad(loss(jnp.einsum, dense))(x)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    monkeypatch.setenv("JAX_QMM_STRICT", "1")
    strict = jax.jit(lambda *operands: call(*operands))
    (row,) = jax_qmm.explain(strict, *operands).rows  # not an error, nor does it keep the call below from being one
    assert row.runs_on == f"reference: {REASONS[reason]}"
    with pytest.raises(RuntimeError, match=REASONS[reason]):
        strict(*operands)


def test_transformations_and_shardings_leave_the_note_behind():
    x, q = normal(4, 8), jax_qmm.quantize(normal(8, 6), axis=1)  # scales along the contraction
    f, g = (lambda x, w=w: jax_qmm.matmul(jnp.sin(x), w) for w in (q, q.dequantize()))
    for transform in (
        jax.vmap,
        jax.checkpoint,
        lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
        lambda f: jax.hessian(lambda x: (f(x) ** 2).sum()),
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x)[1],
    ):
        np.testing.assert_allclose(transform(f)(x), transform(g)(x), rtol=1e-4, atol=1e-4)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("m",), axis_types=(kind,))
        placed = jax.device_put(x, NamedSharding(mesh, P("m", None)))
        everywhere = jax.device_put(q, NamedSharding(mesh, P()))
        with jax.set_mesh(mesh):
            got = jax.jit(jax_qmm.matmul)(placed, everywhere)
            assert got.sharding.spec == P("m", None)
            mapped = jax.shard_map(jax_qmm.matmul, in_specs=(P("m", None), P()), out_specs=P("m", None))
            np.testing.assert_allclose(jax.jit(mapped)(placed, everywhere), got, rtol=1e-6)
        np.testing.assert_allclose(got, x @ q.dequantize(), rtol=1e-5, atol=1e-6)
