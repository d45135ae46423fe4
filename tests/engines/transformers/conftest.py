"""Kernels are interpreted where there is no GPU."""

import importlib.util
import os

import triton_interpreter

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    triton_interpreter.patch_once()
