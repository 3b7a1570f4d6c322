"""Measures speed and memory, ours and that of other programs in the same run.

`peers`, `summary`, `tail` and `static_batches` run where jax is not installed.
"""
