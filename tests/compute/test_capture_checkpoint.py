"""A capture that is killed goes on where it stood and ends with the same bits; nothing foreign is
gone on with."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import build, same_sum, sequences
from torch import Tensor

from oscar_zoo.cli import main
from oscar_zoo.compute.capture import checkpoint
from oscar_zoo.compute.capture.checkpoint import STATE, Checkpoint, kept_for_resume
from oscar_zoo.compute.capture.transformers import capture, numerics
from oscar_zoo.compute.moments import LayerMoments, Need
from oscar_zoo.compute.moments_file import MomentsInfo
from oscar_zoo.errors import IntegrityError, OutputExists

CHILD = Path(__file__).parents[1] / "support" / "capture_child.py"
NEEDS: frozenset[Need] = frozenset(("rows", "weighted", "outputs", "weights"))
LENGTHS = [40, 23, 33]
FACTS = {"model": "tests/model", "data": "abc"}
MODEL = build("Qwen3", num_hidden_layers=6, head_dim=8)
INFO = MomentsInfo(
    model=MODEL.block,
    calibration=None,
    coverage=None,
    numerics=numerics(MODEL),
    sequences=(),
    partial=True,
)
REPORTS = {
    False: 13,
    True: 8,
}  # of a whole capture: 1 + 4 layers x 3 sequences; 2 + 2 passes x 3 sequences


def run_child(jobs: list[dict[str, Any]], folder: Path) -> list[int]:
    """Exit codes of the captures."""
    place = folder / "job.json"
    place.write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(place)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    codes: list[int] = json.loads(Path(f"{place}.codes").read_text())
    return codes


class Killed:
    """Every way to kill tried once, in one child; results by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs, self.names = folder, [], []
        for passes in (False, True):
            engine = "passes" if passes else "layers"
            self.add(f"{engine} undisturbed", passes=passes)
            for report in range(1, REPORTS[passes] + 1, 2 if passes else 4):
                self.killed(f"{engine} at report {report}", passes=passes, kill_at=report)
            for number, when in itertools.product((1, 4), ("before", "after")):
                self.killed(
                    f"{engine} {when} save {number}", passes=passes, kill_in_save=[number, when]
                )
        self.killed("layers without hidden states", kill_at=9, largest=4096)
        self.killed("layers, twice", kill_at=5, then=8)
        self.codes = dict(zip(self.names, run_child(self.jobs, folder), strict=True))

    def add(self, name: str, **job: Any) -> None:
        self.names.append(name)
        out = str(self.folder / f"{name}.safetensors")
        self.jobs.append({"family": "Qwen3Next", "lengths": LENGTHS, "out": out, **job})

    def killed(self, name: str, then: int | None = None, **how: Any) -> None:
        work = str(self.folder / name)
        self.add(f"{name}, killed", work=work, **how)
        again = {key: how[key] for key in ("passes", "largest") if key in how}
        if then is not None:
            self.add(f"{name}, killed again", work=work, resume=True, kill_at=then, **again)
        self.add(name, work=work, resume=True, log=str(self.folder / f"{name}.log"), **again)

    def sums(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    yield Killed(tmp_path_factory.mktemp("killed"))


def test_a_killed_capture_ends_with_the_same_bits(killed: Killed) -> None:
    names = [name for name in killed.names if "killed" not in name and "undisturbed" not in name]
    assert len(names) == 4 + 4 + 8 + 2
    for name in names:
        want = killed.sums(f"{name.split()[0].rstrip(',')} undisturbed")
        got = killed.sums(name)
        assert got.keys() == want.keys()
        assert all(same_sum(got[key], want[key]) for key in want), name
        assert killed.codes[f"{name}, killed"] == -9, name


def test_both_engines_agree(killed: Killed) -> None:
    one, other = killed.sums("layers undisturbed"), killed.sums("passes undisturbed")
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_finished_work_is_not_done_again(killed: Killed) -> None:
    """The first report of a resumed capture says how far it was."""

    def first(name: str) -> int:
        return int((killed.folder / f"{name}.log").read_text().split()[0])

    total = sum(LENGTHS)
    assert first("layers at report 9") == total * 2 // 4  # two layers of four
    assert first("layers without hidden states") == 0  # forward passes again, sums not
    assert first("layers, twice") == total * 3 // 4
    assert first("passes at report 5") == total // 2


def test_a_state_is_whole_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LARGEST", 15_000)  # two layers
    layers = {layer: random_sums(layer) for layer in range(6)}
    keeper = Checkpoint(tmp_path / "capture", FACTS, INFO)
    for done, hidden in ((3, torch.ones(1, 7, 8)), (6, torch.ones(1, 900, 8))):
        some = {layer: layers[layer] for layer in range(done - 3, done)}
        keeper.save("layers", done, some, sequences=1, add=True, hidden=[hidden])
    saved = Checkpoint(tmp_path / "capture", FACTS, INFO).load()
    assert saved is not None
    assert (saved.phase, saved.done) == ("layers", 6)
    assert saved.hidden is None  # larger than a file may be
    for layer, want in layers.items():
        got = saved.layers[layer]
        assert (got.tokens, got.query_rows, got.output_rows, got.weighted_tokens) == (
            layer,
            2 * layer,
            3,
            4,
        )
        assert all(
            same_sum(getattr(got, name), getattr(want, name)) for name in (*checkpoint.SUMS, "wo")
        )
    sizes = [path.stat().st_size for path in (tmp_path / "capture").glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) <= 15_000


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data": "other"}, "of another calibration text"),
        ({"model": "tests/another"}, "model .*tests/another"),
        ({"needs": "rows"}, "needs rows weighted, this one has rows"),
    ],
)
def test_the_state_of_something_else_is_refused(
    tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    save_one(Checkpoint(tmp_path, FACTS | {"needs": "rows weighted"}, INFO))
    with pytest.raises(OutputExists, match=said) as refusal:
        Checkpoint(tmp_path, FACTS | {"needs": "rows weighted"} | changed, INFO).load()
    assert str(tmp_path) in refusal.value.message


@pytest.mark.parametrize(
    "damage", ["state cut", "state of another version", "sums cut", "sums gone", "one bit of a sum"]
)
def test_a_damaged_state_is_refused(tmp_path: Path, damage: str) -> None:
    save_one(Checkpoint(tmp_path, FACTS, INFO))
    place, sums = tmp_path / "state.json", next(tmp_path.glob("moments-*"))
    if damage == "state cut":
        os.truncate(place, 90)
    elif damage == "state of another version":
        place.write_bytes(place.read_bytes().replace(b"capture/1", b"capture/9"))
    elif damage == "sums cut":
        os.truncate(sums, 900)
    elif damage == "one bit of a sum":
        content = bytearray(sums.read_bytes())
        content[-8] ^= 1
        sums.write_bytes(content)
    else:
        sums.unlink()
    with pytest.raises(IntegrityError, match=r"state\.json.*"):
        Checkpoint(tmp_path, FACTS, INFO).load()


def interrupted(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of `MODEL` that stopped in its third layer."""
    monkeypatch.setattr(checkpoint, "MIN_SECONDS", 0.0)

    def stop(done: int, total: int) -> None:
        if 3 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(MODEL, sequences(20, 9), needs=NEEDS, progress=stop, work=work)


@pytest.mark.parametrize("what", ["data", "weights", "needs"])
def test_a_capture_goes_on_only_with_its_own_model_data_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    interrupted(tmp_path, monkeypatch)
    other = build("Qwen3", num_hidden_layers=6, head_dim=8)
    if what == "weights":
        other.model.model.layers[4].mlp.up_proj.weight.data[0, 3] += 1
    data = sequences(20, 9, seed=int(what == "data"))
    needs = NEEDS - {"weights"} if what == "needs" else NEEDS
    said = "of another calibration text" if what == "data" else f"with {what} "
    with pytest.raises(OutputExists, match=f"a capture {said}"):
        capture(other, data, needs=needs, work=tmp_path, resume=True)
    capture(other, data, needs=needs, work=tmp_path).check(needs)  # anew


def save_one(keeper: Checkpoint) -> None:
    keeper.save("rows", 1, {0: random_sums(0)}, sequences=1, add=False)


def random_sums(seed: int) -> LayerMoments:
    torch.manual_seed(seed)
    layer = LayerMoments.zeros(2, 8, 8)
    for name in checkpoint.SUMS:
        setattr(layer, name, torch.randn_like(getattr(layer, name)))
    layer.wo = torch.randn_like(layer.vv)
    layer.tokens, layer.query_rows, layer.output_rows, layer.weighted_tokens = seed, 2 * seed, 3, 4
    return layer


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, saved: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "r.work"
    if saved:
        (work / "capture").mkdir(parents=True)
        (work / "capture" / STATE).write_text("{}")
    with pytest.raises(KeyboardInterrupt) as caught, kept_for_resume(work):
        raise KeyboardInterrupt
    aborted = click.Abort()
    aborted.__cause__ = caught.value  # what click makes of it
    main._report(aborted, as_json=False)
    line = capsys.readouterr().err
    assert "nothing was left half-written" in line
    assert (f"is kept in {work}" in line) == saved == work.exists()
