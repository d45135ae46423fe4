"""A model that is larger than its device is said in one line, before a weight is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import EXAMPLE, float8_pair, save_model

from oscar_zoo.errors import NotEnoughMemory
from oscar_zoo.models import checkpoint
from oscar_zoo.models.hardware import available_ram
from oscar_zoo.models.loading import load_model
from oscar_zoo.models.memory import Workload, memory_errors, work_bytes

EXAMPLE_BYTES = sum(one.nbytes for one in load_file(EXAMPLE / "model.safetensors").values())
CPU = torch.device("cpu")


def machine(
    folder: Path, available_kb: int, groups: dict[str, dict[str, object]], own: str = "0::/a/b\n"
) -> int:
    """`available_ram` of a made-up machine."""
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kb} kB\n")
    (proc / "self/cgroup").write_text(own)
    for name, files in groups.items():
        (cgroup / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (cgroup / name / file).write_text(f"{text}\n")
    return available_ram(proc, cgroup)


def test_the_narrowest_control_group_counts_and_file_pages_are_given_back(tmp_path: Path) -> None:
    groups: dict[str, dict[str, object]] = {
        "": {"memory.stat": "file 1"},
        "a": {
            "memory.max": 3_000_000,
            "memory.current": 2_500_000,
            "memory.stat": "anon 9\ninactive_file 100000",
        },
        "a/b": {"memory.max": "max", "memory.current": 5},
    }
    assert machine(tmp_path, 4096, groups) == 600_000


def test_control_groups_of_the_first_version_count(tmp_path: Path) -> None:
    groups: dict[str, dict[str, object]] = {
        "memory": {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 7},
        "memory/a": {"memory.limit_in_bytes": 1_000_000, "memory.usage_in_bytes": 250_000},
    }
    assert machine(tmp_path, 4096, groups, own="3:cpu,memory:/a\n1:name=systemd:/x\n") == 750_000


def test_a_model_that_does_not_fit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(checkpoint.CheckpointFile, "_parts", read)
    free = {"device": "cpu", "free": lambda device: 12_000_000}
    with pytest.raises(NotEnoughMemory, match=r"about 0\.014 GB on cpu, 0\.012 GB") as refusal:
        load_model(str(EXAMPLE), stream=False, dtype="float32", **free)  # type: ignore[arg-type]
    for advice in ("--stream-weights", "--dtype bfloat16"):
        assert advice in str(refusal.value.hint)


def test_one_layer_that_does_not_fit_is_refused_too() -> None:
    with pytest.raises(NotEnoughMemory, match=r"on cpu, 0\.001 GB are free"):
        load_model(str(EXAMPLE), free=lambda device: 1_000_000)
    with pytest.raises(NotEnoughMemory) as refusal:
        load_model(str(EXAMPLE), stream=True, free=lambda device: 1_000_000)
    assert "--stream-weights" not in str(refusal.value.hint)


def test_a_model_that_just_fits_is_loaded_whole_and_one_byte_less_is_streamed() -> None:
    whole = load_model(str(EXAMPLE), free=lambda device: EXAMPLE_BYTES)
    assert (whole.streamed, whole.notes) == (False, ())
    streamed = load_model(str(EXAMPLE), free=lambda device: EXAMPLE_BYTES - 1)
    assert streamed.streamed
    assert "layer by layer" in streamed.notes[0]


def test_what_runs_counts_too() -> None:
    busy = Workload(longest=512, tokens=4096)
    with pytest.raises(NotEnoughMemory):
        load_model(str(EXAMPLE), stream=False, workload=busy, free=lambda device: EXAMPLE_BYTES)
    config = load_model(str(EXAMPLE)).model.config
    assert work_bytes(config, Workload(), 2) == 0
    assert (
        work_bytes(config, busy, 4) > work_bytes(config, busy, 2) > 4096 * 256 * 2 + 512 * 2048 * 4
    )


@pytest.mark.parametrize("said", ["31.50 GiB", None])
def test_memory_that_ends_in_the_middle_is_the_same_line(said: str | None) -> None:
    """What torch says of a GPU, and a real allocation that no machine grants."""
    with pytest.raises(NotEnoughMemory, match=r"^big needs about \d+ GB on cpu, \d+(\.\d)? GB"):
        with memory_errors("big", CPU):
            if said:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {said}. GPU 0")
            torch.empty(1 << 52, dtype=torch.uint8)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_errors("big", CPU):
        raise RuntimeError("shapes do not fit")


def test_float8_counts_as_what_it_becomes(tmp_path: Path) -> None:
    quantized, plain = float8_pair(save_model(tmp_path / "model"), tmp_path, (16, 16))
    said = []
    for folder in (quantized, plain):
        with pytest.raises(NotEnoughMemory) as refusal:
            load_model(
                str(folder), model_id="m", stream=False, dtype="bfloat16", free=lambda device: 1
            )
        said.append(refusal.value.message)
    assert said[0] == said[1]
