"""Measures speed and memory of this library and of others in the same run.

`peers`, `summary` and `tail` do not need jax.
"""
