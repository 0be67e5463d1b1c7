"""A small convolutional network on handwritten digits: float32, int8 from end to end, and weights of 4 bits.

    python examples/digits_cnn.py

needs the extra "demo" and takes half a minute on two CPU cores.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_qmm
from jax_qmm import W4A16, W8A8, QArray, Rule, demo

W4 = W4A16(32, symmetric=False, clip_search=True)


class DigitCNN(nnx.Module):
    """Three convolutions and a linear layer.

    >>> DigitCNN(rngs=nnx.Rngs(0))(jnp.zeros((3, 8, 8))).shape
    (3, 10)
    """

    def __init__(self, *, rngs: nnx.Rngs):
        sizes = (1, 32, 1), (32, 64, 2), (64, 64, 2)
        self.convs = nnx.List([nnx.Conv(n_in, n_out, (3, 3), stride, rngs=rngs) for n_in, n_out, stride in sizes])
        self.head = nnx.Linear(4 * 64, demo.CLASSES, rngs=rngs)

    def __call__(self, images):
        """images are float32 `(batch, 8, 8)` in [0, 1]; returns logits `(batch, 10)`."""
        x = images[..., None]
        for conv in self.convs:
            x = nnx.relu(conv(x))
        return self.head(x.reshape(len(x), -1))


def quantize_static(model: DigitCNN, images: np.ndarray) -> DigitCNN:
    """The model in int8, with a scale for the input of each layer from its range on `images`."""
    scheme = W8A8(activation="per_tensor")
    return jax_qmm.nnx.quantize_model(model, [Rule(".*", scheme)], calibration=[images])[0]


def int8_logits(model: DigitCNN, images: jax.Array) -> jax.Array:
    """What a model of `quantize_static` computes, with no float array between its layers.

    Each convolution rounds its result as the next layer quantizes its input, so that both are the same bit for bit.
    """
    scales = [conv.conv_general_dilated.scale[...] for conv in model.convs] + [model.head.dot_general.scale[...]]
    x = jax_qmm.quantize(images[..., None], axis=None, scale=scales[0])
    for conv, scale in zip(model.convs, scales[1:]):
        values = jax_qmm.conv_general_dilated(
            x,
            conv.kernel[...],
            (conv.strides,) * 2,
            conv.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            bias=conv.bias[...],
            activation="relu",
            out_dtype=jnp.int8,
            out_scale=scale,
        )
        x = QArray(values, scale.reshape(1, 1, 1, 1))
    w = model.head.kernel[...].T
    rows = x.qvalue.reshape(len(images), -1)
    return jax_qmm.scaled_mm(rows, w.qvalue, scales[-1], w.scale.T, model.head.bias[...], out_dtype=jnp.float32)


def variants(model: DigitCNN, images: np.ndarray) -> dict:
    """Functions of images by name: the float model, its static int8 form as layers and as a chain, and W4A16."""
    static = quantize_static(model, images)
    w4, _ = jax_qmm.nnx.quantize_model(model, [Rule(".*", W4)])
    run = lambda variant: lambda images: variant(images)
    return {
        "float32": run(model),
        "W8A8, static": run(static),
        "int8 chain": lambda images: int8_logits(static, images),
        "W4A16": run(w4),
    }


def main(epochs: int, seed: int) -> None:
    train_images, test_images, train_labels, test_labels = demo.digits(seed)
    model = demo.train(train_images, train_labels, epochs=epochs, seed=seed, make=DigitCNN)
    for name, function in variants(model, train_images).items():
        logits = jax.jit(function)(test_images)
        print(f"\n{name}: {np.mean(logits.argmax(-1) == test_labels):.1%} of {len(test_images)} images named rightly")
        if name != "float32":
            print(jax_qmm.explain(function, test_images))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of split, parameters and order (%(default)s)")
    main(**vars(parser.parse_args()))
