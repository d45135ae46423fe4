"""A capture that is killed goes on where it stood and ends with the same bits; nothing foreign is
gone on with."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from random_moments import COUNTS
from tiny_models import build, same_sum, sequences

from oscar_zoo.artifact import durable
from oscar_zoo.cli import main
from oscar_zoo.compute.capture import checkpoint, passes
from oscar_zoo.compute.capture.checkpoint import STATE, Checkpoint, kept_for_resume
from oscar_zoo.compute.capture.transformers import capture, numerics
from oscar_zoo.compute.moments import LayerMoments, Moments, Need
from oscar_zoo.compute.moments_file import MomentsInfo
from oscar_zoo.errors import IntegrityError, OutputExists

NEEDS: frozenset[Need] = frozenset(("rows", "weighted", "outputs", "weights"))
DATA = sequences(40, 23, 33)
TOTAL = DATA.tokens_used
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
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(params=["layers", "passes"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the model runs layer by layer, or whole; each saves whenever it can."""
    monkeypatch.setattr(passes, "MEMORY_SHARE", 0.6 if request.param == "layers" else 0.0)
    monkeypatch.setattr(checkpoint, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", 0)
    name: str = request.param
    return name


def captured(
    work: Path | None, *, resume: bool = False, report: int = 0, save: tuple[int, str] = (0, "")
) -> tuple[Moments, int]:
    """All sums, and what the first report said. The process is killed at that report, or before or
    after that replacement of the state."""
    reports, replacements, replace = [], itertools.count(1), durable.replace_file

    def progress(done: int, total: int) -> None:
        reports.append(done)
        if len(reports) == report:
            os.kill(os.getpid(), signal.SIGKILL)

    def replaced(path: Path, data: bytes) -> None:
        at = next(replacements)
        for when in ("before", "after"):
            if (at, when) == save:
                os.kill(os.getpid(), signal.SIGKILL)
            if when == "before":
                replace(path, data)

    loaded = build("Qwen3Next", torch.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(durable, "replace_file", replaced)
        found = capture(loaded, DATA, needs=NEEDS, progress=progress, work=work, resume=resume)
    found.check(NEEDS)
    return found, reports[0]


def killed(work: Path, **how: Any) -> None:
    if (child := os.fork()) == 0:
        try:
            captured(work, **how)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed() -> Moments:
    return captured(None)[0]


def assert_same(got: Moments, want: Moments) -> None:
    for layer, mine in got.layers.items():
        for name in (*checkpoint.SUMS, "wo"):
            assert same_sum(getattr(mine, name), getattr(want.layers[layer], name)), name
        assert all(getattr(mine, name) == getattr(want.layers[layer], name) for name in COUNTS)


@pytest.mark.parametrize(
    "how",
    [
        *({"report": at} for at in (1, 4, 8)),
        *({"save": (at, when)} for at in (1, 4) for when in ("before", "after")),
    ],
    ids=str,
)
def test_a_killed_capture_ends_with_the_same_bits(
    how: dict[str, Any], engine: str, undisturbed: Moments, tmp_path: Path
) -> None:
    killed(tmp_path, **how)
    assert_same(captured(tmp_path, resume=True)[0], undisturbed)


@pytest.mark.parametrize(
    ("engine", "kills", "largest", "done"),
    [
        ("layers", [9], 256 << 20, TOTAL * 2 // 4),  # two layers of four
        ("layers", [9], 4096, 0),  # forward passes again, sums not
        ("layers", [5, 8], 256 << 20, TOTAL * 3 // 4),
        ("passes", [5], 256 << 20, TOTAL // 2),
    ],
    indirect=["engine"],
)
def test_finished_work_is_not_done_again(
    engine: str,
    kills: list[int],
    largest: int,
    done: int,
    undisturbed: Moments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first report of a resumed capture says how far it was."""
    monkeypatch.setattr(checkpoint, "LARGEST", largest)
    for at, report in enumerate(kills):
        killed(tmp_path, report=report, resume=at > 0)
    found, first = captured(tmp_path, resume=True)
    assert first == done
    assert_same(found, undisturbed)


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
        assert got.tokens == layer and got.query_rows == 2 * layer and got.output_rows == 3
        assert got.weighted_tokens == 4
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
def test_the_state_of_others_is_refused(tmp_path: Path, changed: dict[str, str], said: str) -> None:
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
    with pytest.raises(KeyboardInterrupt) as caught, kept_for_resume(work, anew=saved):
        raise KeyboardInterrupt
    aborted = click.Abort()
    aborted.__cause__ = caught.value  # what click makes of it
    main._report(aborted, ["compute"], as_json=False)
    line = capsys.readouterr().err
    assert "nothing was left half-written" in line
    assert (f"is kept in {work}" in line) == ("--no-resume" in line) == saved == work.exists()
