"""Compile the Triton kernels for compute capability 9.0, without a GPU, and print what the
assembler says of them as JSON."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oscar_kernels import cache, kv_read
from oscar_kernels.ahead import recording
from oscar_kernels.chips import Target
from oscar_kernels.decode_attention import latent
from oscar_kernels.decode_attention.kernel import _attention_stage1_kernel
from oscar_kernels.kv_read_kernel import _materialize_prefix_kernel
from oscar_kernels.kv_write.kernel import _write_kv_int2_kernel
from oscar_kernels.kv_write.launcher import write_kv_int2
from oscar_kernels.spec import PLAIN, QuantSpec

DIM, HEADS, GROUP, SINK, RECENT = 128, 8, 4, 64, 256
POINTERS = {"codes_ptr": "*u8", "affine_ptr": "*fp16"}
MATRICES = ("k_forward_ptr", "v_forward_ptr", "q_partner_ptr", "k_mean_ptr")
LISTS = ("slots", "indptr", "rows", "block", "from", "start", "cuts", "positions", "ends", "first")


def main() -> None:
    found = {}
    for k, v in ((2, 2), (4, 4)):
        found[f"decode {k} {v}"] = _decode(k, v)
        found[f"read {k} {v}"] = _read(k, v)
        found[f"write {k} {v}"] = _write(k, v)
    json.dump(found | _of_latents(), sys.stdout)


def _of_latents() -> dict[str, dict[str, int]]:
    """Rows of DeepSeek-V3, as launchers ask for them."""
    specs = QuantSpec(512, 128), QuantSpec(64, 64, bits=PLAIN)
    layer = cache.allocate(*specs, slots=8, rows=2, num_kv_heads=1, sink=SINK, recent=RECENT)
    ends, some = torch.tensor([0, 4], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    windows = cache.WindowState(some, some, some)
    batch = cache.BatchView(ends, some, some[:1], windows)
    rows = [torch.zeros(4, 1, spec.head_dim, dtype=torch.bfloat16) for spec in specs]
    matrix, feedback = torch.zeros(1, 512, 512), torch.zeros(1, 512, 512).half()
    pairs = cache.Transforms(*[matrix] * 4, None, feedback)
    found = {}
    with recording(Target((9, 0), 227 << 10, 132)) as recorder:
        kv_read.materialize_prefix(layer, batch, out_k=rows[0], out_v=rows[1])
        targets = cache.TokenTargets(some, some, some, some)
        query = torch.zeros(4, 16, 576, dtype=torch.bfloat16)
        write_kv_int2(*rows, layer, pairs, targets, windows=windows, query=query)
        for heads in (16, 128):
            latent.decode_attention(query.new_zeros(1, heads, 576), layer, batch, sm_scale=0.1)
    for number, launch in enumerate(recorder.launches.values()):
        compiled: Any = launch.code()
        found[f"latent {number} {compiled.metadata.name}"] = _measured(compiled.asm["ptx"])
    return found


def _decode(k: int, v: int) -> dict[str, int]:
    """One query token of a request; the tiles of `tuning.decode_tiles`."""
    constants = {
        "H": HEADS, "G": GROUP, "DK": DIM, "DV": DIM, "GK": 1, "GV": 1, "BK": k, "BV": v,
        "SINK": SINK, "RECENT": RECENT, "RING": RECENT, "REQUESTS": 64, "TOKENS": 0, "DRAFTS": 0,
        "TREE": False, "M": 8, "BLOCK_N": 64, "EXACT_BLOCK_N": 16, "STAGES": 5, "HALF": True,
        "BF16": False, "CAPPED": False, "PDL": True,
    }  # fmt: skip
    kinds = {"codes_ptr": "*i16", "affine_ptr": "*i32", "out_ptr": "*fp32", "lse_ptr": "*fp32"}
    return _assembled(_attention_stage1_kernel, constants, kinds, warps=1)


def _read(k: int, v: int) -> dict[str, int]:
    quarter = DIM // 4
    constants = {
        "HEADS": HEADS, "DK": DIM, "DV": DIM, "QUARTER_K": quarter, "QUARTER_V": quarter,
        "GROUPS_K": 1, "GROUPS_V": 1, "BITS_K": k, "BITS_V": v, "RECENT": RECENT, "RING": RECENT,
        "SINK": SINK, "FIRST": False, "BLOCK_M": 16,
    }  # fmt: skip
    return _assembled(_materialize_prefix_kernel, constants, POINTERS, warps=1)


def _write(k: int, v: int) -> dict[str, int]:
    quarter = DIM // 4
    constants = {
        "HEADS": HEADS, "GROUP": GROUP, "DK": DIM, "DV": DIM, "QUARTER_K": quarter,
        "QUARTER_V": quarter, "GROUPS_K": 1, "GROUPS_V": 1, "BITS_K": k, "BITS_V": v, "RANK_K": 6,
        "RANK_V": 11, "PTX": True, "LANE_COLUMNS": 8, "RECENT": RECENT, "RING": RECENT,
        "SINK": SINK, "LARGEST": 65504.0, "MEAN": False, "SLOTS": True, "WINDOWS": True,
        "ROWS_OUT": False, "PARTS": 2, "PRECISION": "ieee", "BLOCK_M": 64, "BLOCK_K_K": 128,
        "BLOCK_K_V": 128, "STAGES": 2, "FEEDBACK": False,
    }  # fmt: skip
    kinds = POINTERS | dict.fromkeys(MATRICES, "*fp32") | {"feedback_ptr": "*fp16"}
    return _assembled(_write_kv_int2_kernel, constants, kinds, warps=4)


def _assembled(
    kernel: Any, constants: dict[str, Any], kinds: dict[str, str], *, warps: int
) -> dict[str, int]:
    signature = {p.name: _kind(p.name, constants, kinds) for p in kernel.params}
    places = {p.name: (index,) for index, p in enumerate(kernel.params)}
    aligned = [
        p.name
        for p in kernel.params
        if p.name.endswith("_ptr") and not p.do_not_specialize_on_alignment
    ]
    source = ASTSource(
        kernel,
        signature,
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return _measured(made.asm["ptx"])


def _measured(text: str) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, and instructions of PTX."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = [assembler, "-arch=sm_90a", "-v", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": _number(r"Used (\d+) registers", said),
        "spilled": _number(r"(\d+) bytes spill stores", said),
        "instructions": sum(line.rstrip().endswith(";") for line in text.splitlines()),
    }


def _kind(name: str, constants: dict[str, Any], kinds: dict[str, str]) -> str:
    if name in constants:
        return "constexpr"
    if name in kinds:
        return kinds[name]
    if name.endswith("_ptr"):
        return "*i32" if name.removesuffix("_ptr").split("_")[-1] in LISTS else "*bf16"
    return "fp32" if name in ("sm_scale", "cap") else "i32"


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])


if __name__ == "__main__":
    main()
