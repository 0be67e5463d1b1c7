"""The commands `python -m jax_qmm bench` and `python -m jax_qmm tune`: measuring on the user's own GPU."""
