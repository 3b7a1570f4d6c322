"""Estimates of large runs: chips, memory of programs, time."""
