"""GPUs as a real executable called nvidia-smi names them, and what follows for a server."""

import os
from importlib.metadata import version
from pathlib import Path

import pytest

from oscar_zoo.errors import UnsupportedMachine, UsageError
from oscar_zoo.models import hardware

ROWS = ("0, GPU-aa, NVIDIA H200, 143771, 140000", "1, GPU-bb, NVIDIA L4, 23034, 100")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a machine with two GPUs and a torch that can use them."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in ROWS))
    tool.chmod(0o755)
    monkeypatch.setattr(hardware, "torch_without_cuda", lambda: False)
    monkeypatch.setattr(hardware, "driver_models", list)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_the_driver_names_them(machine: dict[str, str]) -> None:
    first, second = hardware.gpus(machine)
    assert (first.name, first.memory, first.free) == ("NVIDIA H200", 143771 << 20, 140000 << 20)
    assert (second.index, second.uuid) == (1, "GPU-bb")
    assert hardware.gpus({"PATH": "/nowhere"}) == []


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ("9.0\n9.0", [(9, 0), (9, 0)]),
        ("12.0", [(12, 0)]),
        ("Field compute_cap is not a valid field to query.", []),
        ("", []),
    ],
)
def test_compute_capabilities_come_from_the_driver(
    said: str, want: list[tuple[int, int]], tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}'\n")
    tool.chmod(0o755)
    assert hardware.compute_capabilities({"PATH": str(tmp_path)}) == want
    assert hardware.compute_capabilities({"PATH": "/nowhere"}) == []


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, [0, 1]),
        ("1,0", [1, 0]),
        ("GPU-b", [1]),
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
        ("MIG-aa/1/0", [0, 1]),
    ],
)
def test_what_a_server_sees(machine: dict[str, str], variable: str | None, seen: list[int]) -> None:
    environ = machine if variable is None else machine | {"CUDA_VISIBLE_DEVICES": variable}
    assert [gpu.index for gpu in hardware.visible(hardware.gpus(machine), environ)] == seen


def test_device_when_nobody_chose(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.default_device(machine) == "cuda"
    assert hardware.default_device(machine | {"CUDA_VISIBLE_DEVICES": ""}) == "cpu"
    assert hardware.default_device({"PATH": "/nowhere"}) == "cpu"
    monkeypatch.setattr(hardware, "driver_models", lambda: ["NVIDIA H200"])
    assert hardware.default_device({"PATH": "/nowhere"}) == "cuda"
    monkeypatch.undo()
    assert hardware.torch_without_cuda() == version("torch").endswith("+cpu")


def test_a_gpu_that_is_not_there(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    hardware.check_gpu(1, machine)
    with pytest.raises(UnsupportedMachine, match="no device cuda:2, only 2"):
        hardware.check_gpu(2, machine)
    with pytest.raises(UnsupportedMachine, match="no GPU here"):
        hardware.check_gpu(0, {"PATH": "/nowhere"})
    monkeypatch.setattr(hardware, "torch_without_cuda", lambda: True)
    with pytest.raises(UnsupportedMachine, match="build for CPUs"):
        hardware.check_gpu(0, machine)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:1", "cuda:-1", ""])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(UsageError, match="is not a device"):
        hardware.parse_device(name)
    assert hardware.parse_device("cuda:3") == ("cuda", 3)
    assert hardware.parse_device("cpu") == ("cpu", 0)


def test_one_look_asks_once(machine: dict[str, str]) -> None:
    script = Path(machine["PATH"].partition(":")[0]) / "nvidia-smi"
    with hardware.one_look():
        first = hardware.gpus(machine)
        script.unlink()
        assert hardware.gpus(machine) == first != []
    assert hardware.gpus(machine) == []
