"""Two processes started by torchrun give the sums of one, also where they go on from different
places."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_models import same_sum
from safetensors.torch import load_file
from torch import Tensor

from oscar_zoo.compute.capture.distributed import local_device, rank_and_size, world
from oscar_zoo.errors import ComputeFailed, UsageError

CHILD = Path(__file__).parents[1] / "support" / "capture_child.py"
ENGINES = ("layers", "passes")
STOPS = {
    "layers": 6,
    "passes": 7,
}  # of 1 + 4 layers x 2 sequences each, or 2 + 2 passes x 2 sequences each


class Runs:
    """The same captures in one process and in two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start(1, [self.job(f"{engine} alone", engine) for engine in ENGINES])
        jobs = []
        for engine in ENGINES:
            work = {"work": str(folder / engine)}
            jobs += [
                self.job(f"{engine} in two", engine),
                self.job("nothing", engine, stop_at=STOPS[engine], savers=[0], **work),
                self.job(f"{engine} in two, interrupted", engine, resume=True, **work),
            ]
        self.start(2, jobs)

    def job(self, name: str, engine: str, **more: Any) -> dict[str, Any]:
        shape = {"family": "Qwen3Next", "lengths": [40, 23, 33, 17], "passes": engine == "passes"}
        return {**shape, "out": str(self.folder / name), **more}

    def start(self, processes: int, jobs: list[dict[str, Any]]) -> None:
        place = self.folder / "job.json"
        place.write_text(json.dumps(jobs))
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
        command = [sys.executable, *(torchrun if processes > 1 else ()), str(CHILD), str(place)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            try:
                _, errors = child.communicate(timeout=500)
            finally:
                child.terminate()  # torchrun ends its processes then
        assert child.returncode == 0, errors[-3000:]

    def sums(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["in two", "in two, interrupted"])
def test_two_processes_give_the_sums_of_one(runs: Runs, engine: str, how: str) -> None:
    one, two = runs.sums(f"{engine} alone"), runs.sums(f"{engine} {how}")
    assert one.keys() == two.keys()
    for name, want in one.items():
        if name.endswith("counts"):
            assert torch.equal(two[name], want)
        else:
            assert (two[name] - want).abs().max() <= 1e-10 * want.abs().max(), name


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupted_capture_ends_with_the_same_bits(runs: Runs, engine: str) -> None:
    one, two = runs.sums(f"{engine} in two"), runs.sums(f"{engine} in two, interrupted")
    assert all(same_sum(one[name], two[name]) for name in one)


def test_one_process_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    tensor = torch.ones(3)
    here = world()
    assert (here.rank, here.size, here.least(7)) == (0, 1, 7)
    assert here.add_up(tensor) is tensor
    assert not torch.distributed.is_initialized()
    assert local_device("cuda") == "cuda"


def test_the_environment_of_torchrun_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert rank_and_size() == (3, 4)
    assert local_device("cuda") == "cuda:1"
    assert local_device("cuda:0") == "cuda:0"
    assert local_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("rank", "size", "said"),
    [
        ("2", "2", "process 2 of 2"),
        ("0", "0", "process 0 of 0"),
        ("-1", "2", "RANK is '-1'"),
        ("x", "2", "RANK is 'x'"),
        ("0", "many", "WORLD_SIZE is 'many'"),
    ],
)
def test_an_impossible_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str, said: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError, match=said):
        rank_and_size()


def test_processes_without_a_meeting_place_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ComputeFailed, match="MASTER_ADDR"):
        world().least(1)
