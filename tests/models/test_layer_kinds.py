"""What the layers of Flax do with their kernels, told by class, shape and equation."""

import jax.numpy as jnp
import pytest
from flax import linen, nnx

from jax_qmm.models import layer_kinds
from jax_qmm.ops.quantize import quantize


@pytest.mark.parametrize(
    "equation, want",
    [
        ("...ta,hab->...thb", (-2,)),
        ("bthd, hdf -> btf", (-3, -2)),
        ("eta,eab->etb", (-2,)),
        ("a,...ab->b", "the weight has an ellipsis"),
        ("aa,ab->b", "'aa' repeats an index"),
        ("ab,bc->a", "'c' is summed over one operand alone"),
        ("ab,cd->abcd", "contracts nothing"),
    ],
)
def test_einsum_contracted(equation, want):
    if isinstance(want, tuple):
        assert layer_kinds.einsum_contracted(equation) == want
    else:
        with pytest.raises(ValueError, match=want):
            layer_kinds.einsum_contracted(equation)


@pytest.mark.parametrize(
    "kernel, shape, reason",
    [
        (jnp.ones((8, 6)), (8, 6), None),
        (jnp.ones((8, 8, 6)), (8, 6), "the axis along which layers of shape (8, 6) are stacked could be 0 or 1"),
        (jnp.ones((2, 3, 8, 6)), (8, 6), None),
        (jnp.ones((3, 2, 3, 8)), (3, 8), "the axes along which layers of shape (3, 8) are stacked could be (0, 1) or"),
        (jnp.ones((8, 3, 6)), (8, 6), "which does not end in (8, 6)"),
        (jnp.ones((8, 6), jnp.int8), (8, 6), "dtype int8"),
        (quantize(jnp.ones((8, 6))), (8, 6), "quantized already"),
    ],
)
def test_why_not(kernel, shape, reason):
    why = layer_kinds.why_not(kernel, shape)
    assert why is None if reason is None else reason in why


def test_advice_is_for_what_looks_like_a_weight():
    weights = {"experts": jnp.ones((4, 8, 6)), "gate": jnp.ones((8, 4)), "final_logits_bias": jnp.ones((1, 50))}
    assert layer_kinds.by_hand(weights) == (
        "no layer of Flax: if the model computes x @ experts, keep jax_qmm.quantize(experts.mT).mT and use "
        "jax_qmm.matmul; likewise gate"
    )
    for name, shape in {"cls_token": (1, 1, 8), "position_embeddings": (1, 16, 8), "mask": (1, 9)}.items():
        assert "no weight of a product" in layer_kinds.by_hand({name: jnp.ones(shape)})


@pytest.mark.parametrize("kinds, layers", [(layer_kinds.NNX, nnx), (layer_kinds.LINEN, linen)])
def test_a_layer_is_of_the_kind_of_its_nearest_class(kinds, layers):
    dense = layers.Linear if layers is nnx else layers.Dense
    options = {"in_features": 2, "out_features": 3, "rngs": nnx.Rngs(0)} if layers is nnx else {"features": 3}
    layer = type("Own", (dense,), {})(**options)
    assert layer_kinds.kind_of(layer, kinds) == (dense, kinds[dense])
    with pytest.raises(TypeError, match="layer is a str, needs "):
        layer_kinds.check_kind("layer", kinds)


def test_a_subclass_of_a_subclass_is_blamed_where_it_multiplies():
    class Own(nnx.Linear):
        def __call__(self, x):
            return x @ self.kernel[...]

    class Calling(Own):
        def __call__(self, x):
            return super().__call__(x)

    assert layer_kinds.own_mathematics(Calling, nnx.Linear) == "the __call__ of Own never calls that of Linear"
    assert layer_kinds.own_mathematics(nnx.LoRALinear, nnx.Linear) is None
