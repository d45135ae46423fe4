"""Timing the kernels against what their bytes allow."""
