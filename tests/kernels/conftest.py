"""Kernels are interpreted where there is no GPU, and every test draws the same numbers each
time."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import triton_interpreter

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    triton_interpreter.patch_once()


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)
