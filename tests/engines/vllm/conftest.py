"""Kernels are interpreted where there is no GPU."""

import triton_interpreter  # noqa: F401
