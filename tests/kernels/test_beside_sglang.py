"""Kernels inside a process of SGLang, which puts a function of its own in the place of
`triton.next_power_of_2`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

MODULES = (
    "decode_attention.kernel",
    "decode_attention.codes_kernel",
    "kv_read_kernel",
    "kv_write.kernel",
    "kv_write.slot_kernel",
    "slots_kernel",
)
PROGRAM = """
import importlib, sys, triton
triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # as sglang.srt.utils does
seen = 0
for name in sys.argv[1:]:
    module = importlib.import_module(f"oscar_kernels.{name}")
    for kernel in vars(module).values():
        if isinstance(kernel, triton.runtime.jit.JITFunction):
            kernel.cache_key  # looks at everything the kernel refers to, the first step of compiling it
            seen += 1
print(seen)
"""  # noqa: E501


def test_what_kernels_refer_to_can_be_compiled_beside_sglang() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *MODULES], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) >= 8
