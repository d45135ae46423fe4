"""Every chip that the kernels are compiled for: that they compile, without memory in place of
registers, and which shapes have room."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oscar_kernels import chips, nvrtc
from oscar_kernels.cache import BatchView, WindowState
from oscar_kernels.decode_attention import cuda, latent_cuda
from oscar_kernels.decode_attention import variant as variants
from oscar_kernels.kv_write import latent
from oscar_kernels.spec import QuantSpec

ROOT = Path(__file__).parents[2]
ALL = pytest.mark.parametrize("capability", chips.CHIPS, ids=lambda x: f"sm_{x[0]}{x[1]}")


def variant(head_dim: int = 128, *, group: int = 4, bits: int = 2) -> variants.AttentionVariant:
    spec = QuantSpec(head_dim, head_dim, bits=bits)
    return variants.AttentionVariant(spec, spec, group, 8, "int", "int", "long long", 0, False)


def resources(build: nvrtc.Build, function: str, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of memory in their place."""
    triton = pytest.importorskip("triton")
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    (folder / "code.cubin").write_bytes(build.code())
    command = [program, "-res-usage", folder / "code.cubin"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = told[told.index(function) :]
    registers, stack = (int(re.search(rf"{name}:(\d+)", found)[1]) for name in ("REG", "STACK"))
    return registers, stack


@ALL
def test_decode_compiles_with_enough_registers(
    capability: chips.Capability, compiler: Path, tmp_path: Path
) -> None:
    made = variants.fitting(variant(), chips.CHIPS[capability].shared_bytes)
    build = nvrtc.Build.of(cuda.SOURCE, made.flags, "sm_{}{}".format(*capability))
    registers, stack = resources(build, "oscar_decode_stage1", tmp_path)
    assert registers * 32 * variants.WARPS <= 65536
    assert stack == 0


@ALL
@pytest.mark.parametrize("each", latent_cuda.COSTS)
def test_decode_over_latents_compiles_and_has_room(
    capability: chips.Capability, each: int, compiler: Path, tmp_path: Path
) -> None:
    lists = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    batch = BatchView(*lists, lists[0][:1], WindowState(*(lists[0],) * 3))
    chip = chips.CHIPS[capability]
    build = latent_cuda.build(batch, each, chips.Target(capability, chip.shared_bytes, 1))
    registers, stack = resources(build, "oscar_latent_stage1", tmp_path)
    assert registers <= 65536 // (latent_cuda.THREADS * latent_cuda.RESIDENT)
    assert stack == 0
    assert latent_cuda.shared_bytes(8, each) <= chip.shared_bytes


@ALL
def test_the_write_of_latents_compiles(
    capability: chips.Capability, compiler: Path, tmp_path: Path
) -> None:
    integers = dict.fromkeys(("SLOT_T", "ROW_T", "POSITION_T", "END_T"), "long long")
    made = {"D": 512, "ROPE": 64, "GROUPS": 4, "FEEDBACK": 1, **integers}
    build = latent.build(made, chips.Target(capability, chips.CHIPS[capability].shared_bytes, 1))
    assert resources(build, "oscar_write_latents", tmp_path)[1] == 0


@pytest.mark.parametrize(("named", "arch", "shared"), [
    ("sm80", "compute_80", 163 << 10), ("sm89", "compute_89", 99 << 10),
    ("", "sm_90", 227 << 10), ("sm120", "sm_90", 227 << 10), ("sm75", "sm_90", 227 << 10),
])  # fmt: skip
def test_a_later_chip_runs_code_of_an_older_one(
    named: str, arch: str, shared: int, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(chips.OLDER_CODE, named)
    target = chips.Target((9, 0), 227 << 10, 132).as_older()
    assert (target.arch, target.shared_bytes) == (arch, shared)
    code = cuda.build(variant(), target).code()
    assert (b".target sm_8" in code) == target.older == (not code.startswith(b"\x7fELF"))


@ALL
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_codes_of_2_bits_have_room(capability: chips.Capability, head_dim: int, group: int) -> None:
    shared = chips.CHIPS[capability].shared_bytes
    made = variants.fitting(variant(head_dim, group=group), shared)
    assert variants.too_large(made, shared) is None


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "head_dim"), [
    ("8.0", 128), ("8.9", 512), ("10.0", 128), ("12.0", 256), ("12.1", 128),
])  # fmt: skip
def test_kernels_in_triton_compile_and_have_room(chip: str, head_dim: int) -> None:
    """What a server with heads of so many channels compiles, one variant of each kernel."""
    command = [sys.executable, ROOT / "contrib/benchmarks/compile_cost.py", "--one-each"]
    command += ["--chip", chip, "--head-dim", str(head_dim)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    assert "_write_kv_int2_kernel (Triton)" in done.stdout


@ALL
@pytest.mark.parametrize("resident", [1, variants.MOST_RESIDENT])
def test_a_multiprocessor_has_no_room_for_one_block_more(
    capability: chips.Capability, resident: int
) -> None:
    """It has room for one block of the largest size, and the system keeps a part of every block."""
    largest = chips.CHIPS[capability].shared_bytes
    total = largest + variants.RESERVED_BYTES
    block = variants.exclusive_bytes(total, resident) + variants.RESERVED_BYTES
    assert (resident + 1) * block > total >= resident * (block + variants.STATIC_BYTES)


def test_what_has_no_room_is_told_in_numbers() -> None:
    made = variants.fitting(variant(bits=4), 99 << 10)
    assert variants.too_large(made, 99 << 10) == (
        "a block needs 104,496 bytes of shared memory and has 101,376"
    )
    widest = variants.fitting(variant(256, bits=4), 227 << 10)
    assert variants.too_large(widest, 227 << 10) is None


def test_the_readme_says_which_gpus_work() -> None:
    """One row for each state, with the names of `CHIPS` in their order."""
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+) \| \*(.+?)\*.* \|$", readme, re.MULTILINE)
    told = {state: names.split(", ") for names, state in rows}
    (below, *_) = told.pop(chips.NOT_SUPPORTED)
    assert below.startswith("below sm_{}{}".format(*chips.LOWEST))
    assert told == chips.cards_by_state()
    assert {"H100", "H200"} <= {*told["measured on H100 and H200 only"]} and len(rows) == 4
    assert chips.state((7, 5)) == chips.NOT_SUPPORTED
    assert {chips.state(one) for one in ((8, 7), (10, 3), (11, 0), (13, 0))} == {"not tried"}


def test_paths_of_chips() -> None:
    found = {capability: chips.kernel_path(capability) for capability in (*chips.CHIPS, (7, 5))}
    assert found.pop((7, 5)) is None
    assert [capability for capability, path in found.items() if path.measured] == [(9, 0)]
    assert [capability for capability, path in found.items() if path.write == "cuda"] == [(9, 0)]
    assert {path.decode for path in found.values()} == {"cuda"}
