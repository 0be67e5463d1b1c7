"""The example's network, trained briefly: what quantizing does to its logits is predicted layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_qmm
from jax_qmm import Rule, demo


@pytest.fixture(scope="module")
def example(load_script):
    return load_script("examples/digits_cnn.py")


@pytest.fixture(scope="module")
def trained(example):
    """The model, the images that it was trained on, and images and labels that it was not."""
    train_images, test_images, train_labels, test_labels = demo.digits(seed=0)
    with jax.default_device(jax.devices("cpu")[0]):
        model = demo.train(train_images, train_labels, epochs=4, seed=0, make=example.DigitCNN)
    return model, train_images, test_images, test_labels


@pytest.fixture(scope="module")
def logits(example, trained):
    model, train_images, test_images, _ = trained
    variants = example.variants(model, train_images)
    return {name: np.asarray(jax.jit(function)(test_images)) for name, function in variants.items()}


def test_accuracy_is_kept_within_a_point(logits, trained):
    right = {name: float(np.mean(each.argmax(-1) == trained[-1])) for name, each in logits.items()}
    assert right["float32"] > 0.9
    assert all(each >= right["float32"] - 0.01 for each in right.values()), right


def test_the_chain_of_int8_is_the_quantized_model(logits):
    np.testing.assert_array_equal(logits["int8 chain"], logits["W8A8, static"])


def layers(model):
    """(what a layer computes of x and a kernel without bias, the layer) for each, and relu between them."""
    conv = lambda strides: (
        lambda x, w: jax.lax.conv_general_dilated(
            *(x, w, (strides,) * 2, "SAME"), dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
        )
    )
    yield from ((conv(layer.strides), layer) for layer in model.convs)
    yield lambda x, w: jnp.matmul(x.reshape(len(x), -1), w, precision="highest"), model.head


def predicted(model, quantized, images, static):
    """The float model's logits, and the variance of what quantizing adds to them, if all errors were independent.

    With inputs of variance v and a weight off by dw, a layer's output has (w + dw)^2 v + dw^2 x^2; relu adds nothing.
    Rounding to a static scale adds step^2 / 12 to v.
    """
    x, variance = images[..., None], jnp.zeros(())
    for (run, layer), (_, other) in zip(layers(model), layers(quantized)):
        w, rounded = layer.kernel[...], other.kernel[...].dequantize()
        if static:
            product = getattr(other, "conv_general_dilated", None) or other.dot_general
            variance += product.scale[...] ** 2 / 12
        variance = run(jnp.broadcast_to(variance, x.shape), rounded**2) + run(x**2, (rounded - w) ** 2)
        x = run(x, w) + layer.bias[...]
        out, x = x, jax.nn.relu(x)
    return out, variance


@pytest.mark.parametrize("name", ["W8A8, static", "W4A16"])
def test_logits_are_as_near_as_the_steps_say(example, trained, logits, name):
    model, train_images, test_images, _ = trained
    if name == "W4A16":
        quantized, _ = jax_qmm.nnx.quantize_model(model, [Rule(".*", example.W4)])
        for layer in (*quantized.convs, quantized.head):
            if isinstance(layer.kernel, nnx.Param):  # too small to gain
                layer.kernel = Exact(layer.kernel[...])
    else:
        quantized = example.quantize_static(model, train_images)
    out, variance = predicted(model, quantized, jnp.asarray(test_images), name != "W4A16")
    np.testing.assert_allclose(logits["float32"], out, rtol=1e-4, atol=1e-4)
    got, want = float(np.mean((logits[name] - out) ** 2)), float(jnp.mean(variance))
    # 0.9 and 0.7 of it: pixels share the errors of weights, and relu drops some.
    assert want / 2 < got < 2 * want


class Exact:
    """A kernel that is not quantized, as `bounds` reads one."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, _):
        return self

    def dequantize(self):
        return self.value
