"""The names of `oscar_kernels` itself: there without torch, and what their modules hold."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import oscar_kernels


def test_importing_the_package_loads_neither_torch_nor_triton() -> None:
    code = (
        "import sys, oscar_kernels; oscar_kernels.QuantSpec(128, 64); sys.exit('torch' in"
        " sys.modules)"
    )
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
    with pytest.raises(AttributeError, match="k_spec"):
        oscar_kernels.decode_attention(None, None, None, sm_scale=1.0)  # type: ignore[arg-type]


def test_an_op_has_the_signature_of_its_definition() -> None:
    from oscar_kernels import reference as decode_reference
    from oscar_kernels import reference as write_reference
    from oscar_kernels.decode_attention import dispatch as decode
    from oscar_kernels.decode_attention import launcher as triton_decode
    from oscar_kernels.kv_write import dispatch as write

    for op, definition in (
        (write.write_kv_int2, write_reference.write_kv_int2),
        (decode.decode_attention, triton_decode.decode_attention),
        (decode.decode_attention, decode_reference.decode_attention),
    ):
        taken, wanted = (inspect.signature(one).parameters.values() for one in (op, definition))
        assert [(p.name, p.kind, p.default) for p in taken] == [
            (p.name, p.kind, p.default) for p in wanted
        ]
