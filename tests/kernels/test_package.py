"""The package: its names are there without torch, an op has the signature of its definition, and
Triton kernels compile for a GPU that is not here, beside SGLang too."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import oscar_kernels

CHILD = Path(__file__).parents[1] / "support/ptx_child.py"
KERNELS = (
    "decode_attention.kernel",
    "decode_attention.codes_kernel",
    "decode_attention.latent_kernel",
    "kv_read_kernel",
    "kv_write.kernel",
    "kv_write.slot_kernel",
    "slots_kernel",
)
BESIDE_SGLANG = """
import importlib, sys, triton
triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # as sglang.srt.utils does
seen = 0
for name in sys.argv[1:]:
    module = importlib.import_module(f"oscar_kernels.{name}")
    for kernel in vars(module).values():
        if isinstance(kernel, triton.runtime.jit.JITFunction):
            kernel.cache_key  # looks at all that it refers to, the first step of compiling it
            seen += 1
print(seen)
"""


def test_importing_the_package_loads_neither_torch_nor_triton() -> None:
    code = "import sys, oscar_kernels as k; k.QuantSpec(128, 64); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_every_name_is_there_and_listed() -> None:
    assert list(oscar_kernels.__all__) == sorted(oscar_kernels.__all__)
    assert set(oscar_kernels.__all__) <= set(dir(oscar_kernels))
    assert all(callable(getattr(oscar_kernels, name)) for name in oscar_kernels.__all__)
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        _ = oscar_kernels.attend  # type: ignore[attr-defined]


def test_the_folder_of_decode_attention_is_the_op_and_still_a_package() -> None:
    from oscar_kernels.decode_attention import launcher

    assert oscar_kernels.extend_attention is launcher.extend_attention
    with pytest.raises(AttributeError, match="NoneType"):
        oscar_kernels.decode_attention(None, None, None, sm_scale=1.0)  # type: ignore[arg-type]


def test_an_op_has_the_signature_of_its_definition() -> None:
    from oscar_kernels import reference
    from oscar_kernels.decode_attention import dispatch as decode
    from oscar_kernels.decode_attention import launcher as triton_decode
    from oscar_kernels.kv_write import dispatch as write

    for op, definition in (
        (write.write_kv_int2, reference.write_kv_int2),
        (decode.decode_attention, triton_decode.decode_attention),
        (decode.decode_attention, reference.decode_attention),
    ):
        taken, wanted = (inspect.signature(one).parameters.values() for one in (op, definition))
        assert [(p.name, p.kind, p.default) for p in taken] == [
            (p.name, p.kind, p.default) for p in wanted
        ]


def test_what_kernels_refer_to_can_be_compiled_beside_sglang() -> None:
    """SGLang puts a function of its own in the place of `triton.next_power_of_2`."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", BESIDE_SGLANG, *KERNELS]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) >= 8


@pytest.fixture(scope="module")
def registers() -> dict[str, dict[str, int]]:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, CHILD], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kernel", ["decode", "read", "write"])
def test_codes_of_4_bits_do_not_spill_more_registers_than_codes_of_2(
    kernel: str, registers: dict[str, dict[str, int]]
) -> None:
    narrow, wide = registers[f"{kernel} 2 2"], registers[f"{kernel} 4 4"]
    assert 0 < wide["registers"] <= 255
    assert wide["spilled"] <= narrow["spilled"]
    assert wide["instructions"] < 1.1 * narrow["instructions"]


def test_kernels_of_latents_compile_and_decode_keeps_its_loop_in_registers(
    registers: dict[str, dict[str, int]],
) -> None:
    found = {name: one for name, one in registers.items() if name.startswith("latent")}
    names = ("materialize", "write_kv_int2", "latent_stage1", "merge_stage2")
    assert all(any(name in one for one in found) for name in names)
    decode = [one for name, one in found.items() if "latent_stage1" in name]
    assert len(decode) == 2 and all(one["spilled"] <= 128 for one in decode)
