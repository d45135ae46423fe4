"""Benchmarks of the kernels against the time that their bytes need."""
