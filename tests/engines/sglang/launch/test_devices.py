"""Flags that need more devices than a machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oscar_zoo.engines.sglang.compat import versions
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.engines.sglang.launch.devices import CORES, check_devices
from oscar_zoo.errors import UnsupportedMachine


def machine(folder: Path, *, gpus: int = 0, cpulists: tuple[str, ...] = ("0-3",)) -> Path:
    """A folder with the driver's tool, for so many GPUs, and the kernel's list of NUMA nodes."""
    tool = folder / "nvidia-smi"
    rows = [f"{i}, GPU-{i}, NVIDIA H200, 143771, 140000" for i in range(gpus)]
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    tool.chmod(0o755)
    for number, cores in enumerate(cpulists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n")
    return folder


def check(folder: Path, layout: Layout, device: str, gpu: int = 0, cores: str = "") -> None:
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"} | ({CORES: cores} if cores else {})
    check_devices(layout, device, gpu, environ=environ, nodes=folder)


def test_a_rank_on_a_cpu_needs_a_numa_node(tmp_path: Path) -> None:
    folder = machine(tmp_path, cpulists=("0-1", "2-3", ""))  # the last one has memory only
    check(folder, Layout(tp=2), "cpu")
    with pytest.raises(UnsupportedMachine) as caught:
        check(folder, Layout(tp=4), "cpu")
    assert "need 4 GPUs, no GPU is here" in caught.value.message
    assert "its NUMA nodes are enough for 2 of 4 ranks" in caught.value.message
    assert f"{CORES}='0|1|2|3'" in str(caught.value.hint)
    check(folder, Layout(tp=4), "cpu", cores="0|1|2|3")
    with pytest.raises(UnsupportedMachine, match="names 3 of 4 ranks"):
        check(folder, Layout(tp=4), "cpu", cores="0|1|2")


def test_replicas_count_on_a_cpu_where_sglang_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = machine(tmp_path)
    told = {"sglang": "0.5.17"}
    monkeypatch.setattr(versions, "version", told.__getitem__)
    check(folder, Layout(replicas=2), "cpu")
    told["sglang"] = "0.5.21"
    with pytest.raises(UnsupportedMachine, match="need 2 GPUs"):
        check(folder, Layout(replicas=2), "cpu")
    check(folder, Layout(workers=2), "cpu")


def test_all_gpus_count_whatever_sglang_counts_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang 0.5.17 gives only the ranks of one group a part of the CPU."""
    folder = machine(tmp_path)
    for release, ranks in (("0.5.17", 2), ("0.5.21", 4)):
        monkeypatch.setattr(versions, "version", {"sglang": release}.__getitem__)
        with pytest.raises(UnsupportedMachine, match="need 4 GPUs") as caught:
            check(folder, Layout(tp=2, pp=2), "cpu")
        assert f"1 of {ranks} ranks" in caught.value.message


def test_gpus_that_stay_unused_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedMachine, match="2 GPUs are here") as caught:
        check(machine(tmp_path, gpus=2), Layout(tp=2), "cpu")
    assert "--device cuda" in str(caught.value.hint)


def test_all_ranks_count_on_gpus(tmp_path: Path) -> None:
    folder = machine(tmp_path, gpus=4)
    for fits in (Layout(tp=4), Layout(tp=2, pp=2), Layout(tp=4, workers=4)):
        check(folder, fits, "cuda")
    with pytest.raises(UnsupportedMachine, match="8 GPUs are wanted, 4 are here") as caught:
        check(folder, Layout(tp=2, pp=2, replicas=2), "cuda")
    assert "--dp need no more than 4 together" in str(caught.value.hint)
    with pytest.raises(UnsupportedMachine, match="4 GPUs are wanted from cuda:1 on") as caught:
        check(folder, Layout(tp=4), "cuda", 1)
    assert caught.value.hint == "spread the model over fewer: -- --tp=3"


def test_unknown_gpus_are_left_to_sglang(tmp_path: Path) -> None:
    check(machine(tmp_path), Layout(tp=4), "cuda")
