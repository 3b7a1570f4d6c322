"""Measures speed and memory, ours and that of other programs in the same run.

`peers`, `summary` and `tail` run where jax is not installed.
"""
