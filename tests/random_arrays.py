"""Random arrays that tests of layers share, and initializers of Flax that compile nothing."""

import jax.numpy as jnp
import numpy as np


def data(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def init(key, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape) / np.sqrt(shape[0]), dtype)


RANDOM = {"kernel_init": init, "bias_init": init}
