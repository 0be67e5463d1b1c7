"""Every op once more in plain jax.numpy: its definition, bit for bit but for what the op's file says."""
