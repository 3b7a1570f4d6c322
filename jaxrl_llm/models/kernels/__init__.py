"""Kernels for accelerators, imported only where they run."""
