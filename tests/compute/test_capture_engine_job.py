"""The engine's process: what it is told, what its end is taken for, and that it never outlives its
parent.

A stand-in for sglang, on the path of the child, plays the engine; what it does is the body of
`Engine.generate`, and its parser looks at one flag. The child is started as users get it where the
start is what is tested, and forked where it is what comes after.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_python import ForkedPython

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.capture import engine_session, ranks, state
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.capture.engine import EngineFacts, capture_with_engine, discard
from oscar_zoo.compute.capture.engine_job import Scalar
from oscar_zoo.compute.capture.engine_session import open_engine
from oscar_zoo.compute.layer_moments import ROW_SUMS, LayerMoments, Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.engines.sglang.capture_program import capture_program
from oscar_zoo.engines.sglang.launch.capture_flags import REFUSED_FLAGS, read_flags
from oscar_zoo.errors import (
    ComputeFailed,
    FlagRefused,
    GeometryMismatch,
    IntegrityError,
    MissingDependency,
    OutputExists,
    UnsupportedModel,
)

GEOMETRY = Geometry(
    num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=4, v_head_dim=4, attention_layers=(0,)
)
SEQUENCES = ((1, 2, 3, 4, 5), (6, 7))
ENGINE = """
import json, os, signal, sys
from pathlib import Path

import torch

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.capture import ranks
from oscar_zoo.engines.sglang.capture_program import capture_program
from oscar_zoo.compute.layer_moments import LayerMoments

__version__ = "9.9.9"
HERE = Path(__file__).parents[1]


class Engine:
    def __init__(self, server_args):
        print("a line that SGLang prints")
        START
        (HERE / "seen.json").write_text(json.dumps({"arguments": server_args, "environment": dict(os.environ)}))
        self.sums, self.lengths = LayerMoments.zeros(1, 4, 4), []

    def generate(self, input_ids, sampling_params):
        with (HERE / "calls.txt").open("a") as calls:
            print("generate", file=calls)
        assert len(input_ids) == 1 and sampling_params["max_new_tokens"] == 1
        rows = torch.eye(4)[torch.tensor(input_ids[0]) % 4][None]
        self.sums.add(rows, rows, rows)
        self.lengths.append(len(input_ids[0]))
        BODY

    def collective_rpc(self, method, folder, **options):
        self.folder, self.place = Path(folder), Path(options.get("place", ""))
        with (HERE / "calls.txt").open("a") as calls:
            print(method, file=calls)
        if method == "oscar_tap_load":
            report, layers = ranks.read_rank(self.place, "pp0-tp0")
            self.sums, self.lengths = layers[0], list(report.layers[0].lengths)
        if method == "oscar_tap_save":
            SAVE
            layer = ranks.LayerReport(heads=(0,), tokens=self.sums.tokens, query_rows=self.sums.query_rows,
                output_rows=0, weighted_tokens=0, lengths=tuple(self.lengths), weighted_lengths=())
            geometry = Geometry(num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=4, v_head_dim=4,
                attention_layers=(0,))
            report = ranks.RankReport(geometry=geometry, dtype="bfloat16", device="GPU X", accumulate="float64",
                weights="0", layers={0: layer})
            ranks.write_rank(self.place, "pp0-tp0", report, {0: self.sums})
            SAVED

    def shutdown(self):
        (HERE / "closed").touch()
"""  # noqa: E501
PARSER = """
import argparse


def prepare_server_args(words):
    parser = argparse.ArgumentParser(prog="sglang serve")
    parser.add_argument("--page-size", type=int)
    parser.parse_known_args(words)
    return words
"""


Result = tuple[Moments, EngineFacts]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the stand-in, on the path of this process and of children."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the child: to import torch takes it seconds. An SGLang that another test imported here
    would take the place of the stand-in."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        engine_session, "subprocess", SimpleNamespace(Popen=ForkedPython, PIPE=subprocess.PIPE)
    )


def capture(
    folder: Path,
    body: str = "pass",
    *,
    start: str = "pass",
    save: str = "pass",
    saved: str = "pass",
    model: str = "org/model",
    sequences: Sequence[Sequence[int]] = SEQUENCES,
    needs: frozenset[Need] = frozenset({"rows"}),
    work: Path | None = None,
    engine: Mapping[str, Scalar] | None = None,
    tensor_parallel: int = 1,
    geometry: Geometry | None = None,
    progress: Progress = no_progress,
    flags: Sequence[str] = (),
    resume: bool = False,
) -> Result:
    bodies = {"BODY": body, "START": start, "SAVED": saved, "SAVE": save}
    text = functools.reduce(lambda text, name: text.replace(name, bodies[name]), bodies, ENGINE)
    files = {"__init__": text, "srt/server_args": PARSER, "srt/plugins": "load_plugins = dict"}
    (folder / "sglang/srt").mkdir(parents=True, exist_ok=True)
    for name, code in files.items():
        (folder / f"sglang/{name}.py").write_text(code)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("OSCAR_")
    }
    with open_engine(
        capture_program(environment, read_flags(flags)),
        model,
        max(map(len, sequences)),
        tensor_parallel=tensor_parallel,
        engine=engine,
        work=folder if work is None else work,
    ) as session:
        return capture_with_engine(
            session, sequences, needs=needs, geometry=geometry, progress=progress, resume=resume
        )


def left(folder: Path) -> list[Path]:
    """What a capture that ended kept, beside the sums to go on from."""
    return list(folder.glob(".tmp.*"))


def test_an_engine_is_told_to_run_each_sequence_whole_and_alone(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stand_in)
    model = Path("model")
    model.mkdir()
    moments, facts = capture(
        stand_in,
        model="model",
        engine={"dtype": "bfloat16"},
        flags=("--attention-backend=triton",),
        geometry=GEOMETRY,
        work=Path(),
    )
    assert (moments.tokens, moments.geometry) == (7, GEOMETRY)
    assert (facts.numerics.engine.version, facts.numerics.device) == ("9.9.9", "GPU X")
    seen = json.loads((stand_in / "seen.json").read_text())
    words, environment = seen["arguments"], seen["environment"]
    assert words[-1] == "--attention-backend=triton"  # the last one wins
    values = dict(word.split("=") for word in words if "=" in word)
    assert (values["--model-path"], values["--tp-size"]) == (str(stand_in / "model"), "1")
    assert (values["--dtype"], values["--kv-cache-dtype"]) == ("bfloat16", "auto")
    assert {
        "--disable-cuda-graph",
        "--disable-radix-cache",
        "--skip-tokenizer-init",
        "--disable-overlap-schedule",
    } <= set(words)
    for name in (
        "--chunked-prefill-size",
        "--max-prefill-tokens",
        "--max-total-tokens",
        "--context-length",
    ):
        assert int(values[name]) > 5
    assert (
        not {word.partition("=")[0] for word in words[:-1]}
        - REFUSED_FLAGS.keys()
        - {
            "--random-seed",
            "--watchdog-timeout",
        }
    )
    assert (environment[ranks.VARIABLE], environment["SGLANG_PLUGINS"]) == ("1", "oscar")
    assert (stand_in / "closed").exists() and not left(stand_in)


DYING = """
        print('[00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):', file=sys.stderr)
        print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB.', file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""  # noqa: E501
SILENT = "os.kill(os.getpid(), signal.SIGKILL)"
OTHER_RANK = """
        from oscar_zoo.errors import UnsupportedModel
        ranks.write_failure(self.folder, 'pp0-tp1', UnsupportedModel('layer 3 takes sinks.', hint='another'))
"""  # noqa: E501


@pytest.mark.parametrize(
    ("body", "kind", "text", "hint"),
    [
        (
            "raise RuntimeError('no kernel\\n  for this')",
            ComputeFailed,
            "RuntimeError: no kernel for this.",
            "serve",
        ),
        (
            DYING,
            ComputeFailed,
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB.",
            "--tensor-parallel",
        ),
        (SILENT, ComputeFailed, "could not run org/model: no error in its log.", "serve the model"),
        (OTHER_RANK, UnsupportedModel, "layer 3 takes sinks.", "another"),
        (
            "raise AssertionError('no attribute oscar_tap_check')",
            ComputeFailed,
            "oscar_tap_check",
            "plugin",
        ),
        ("self.sums.kk.zero_()", ComputeFailed, "layer 0, KV head 0: trace of kk is 0", None),
    ],
)
@pytest.mark.usefixtures("forked")
def test_what_went_wrong_is_said(
    stand_in: Path, body: str, kind: type[Exception], text: str, hint: str | None
) -> None:
    with pytest.raises(kind) as caught:
        capture(stand_in, body)
    assert isinstance(caught.value, ComputeFailed | UnsupportedModel)
    assert text in caught.value.message and "\n" not in caught.value.message
    assert hint is None or hint in str(caught.value.hint)
    assert not left(stand_in)


def test_another_model_than_expected_is_refused(stand_in: Path) -> None:
    with pytest.raises(GeometryMismatch, match="num_layers is 2 here and 1 there"):
        capture(stand_in, geometry=GEOMETRY.model_copy(update={"num_layers": 2}))


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("ImportError: Can not import FA3 in sgl_kernel", "-- --attention-backend=flashinfer"),
        ("RuntimeError: Not enough memory", "-- --mem-fraction-static="),
    ],
)
@pytest.mark.usefixtures("forked")
def test_an_engine_that_does_not_start_names_flags_that_may_help(
    stand_in: Path, error: str, hint: str
) -> None:
    """What a worker logged counts, and not what its parent makes of it."""
    start = f"""print("{error}", file=sys.stderr)
        raise RuntimeError("Initialization failed. Please see the error messages above.")"""
    with pytest.raises(ComputeFailed) as caught:
        capture(stand_in, start=start)
    assert caught.value.message.endswith(f"{error}.") and hint in str(caught.value.hint)
    assert not left(stand_in)


@pytest.mark.usefixtures("forked")
def test_what_the_parser_of_the_engine_says_is_passed_on(stand_in: Path) -> None:
    with pytest.raises(FlagRefused) as caught:
        capture(stand_in, flags=("--page-size=x",))
    assert "argument --page-size: invalid int value: 'x'" in caught.value.message
    assert "launch_server --help" in str(caught.value.hint)


def test_without_sglang_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    with pytest.raises(MissingDependency, match="sglang"):
        capture(tmp_path)


HOLDING = """
        if hasattr(self, 'held'):
            signal.pause()
        self.held = open(os.environ['FIFO'], 'w')
        print(os.getpid(), file=self.held, flush=True)
"""
"""Opens a pipe with the first sequence and never ends the second."""


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe that the engine holds open for as long as it lives."""
    place = tmp_path / "fifo"
    os.mkfifo(place)
    monkeypatch.setenv("FIFO", str(place))
    return place


def test_the_engine_ends_with_a_parent_that_is_killed(stand_in: Path, fifo: Path) -> None:
    code = (
        "import test_capture_engine_job as t, pathlib, sys;"
        " t.capture(pathlib.Path(sys.argv[1]), t.HOLDING)"
    )
    path = os.pathsep.join(
        map(str, (stand_in, Path(__file__).parent, Path(__file__).parents[1] / "support"))
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(stand_in)], env={**os.environ, "PYTHONPATH": path}
    )
    with fifo.open() as held:
        assert int(held.readline()) != parent.pid
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert held.read() == ""  # comes back when nobody holds the pipe any more
    assert not left(stand_in)


def test_the_engine_ends_when_its_parent_is_interrupted(stand_in: Path, fifo: Path) -> None:
    def interrupt(done: int, total: int, where: str) -> None:
        if done:
            raise KeyboardInterrupt

    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(KeyboardInterrupt):
        capture(stand_in, HOLDING, progress=interrupt)
    os.set_blocking(reader, True)
    assert int(os.read(reader, 100)) > 0
    assert os.read(reader, 100) == b""  # comes back when nobody holds the pipe any more
    os.close(reader)
    assert not left(stand_in)


KILL = "if len(self.lengths) == 2: os.killpg(0, signal.SIGKILL)"
"""At the second of two sequences, everything that belongs to the engine."""


@pytest.fixture
def always_saving(monkeypatch: pytest.MonkeyPatch, forked: None) -> None:
    monkeypatch.setattr(state, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(state, "SHARE", 0)


def killed(folder: Path, **where: str) -> None:
    with pytest.raises(ComputeFailed, match="no error in its log"):
        capture(folder, **where)
    assert (folder / "ranks/state.json").is_file() and not left(folder)
    (folder / "calls.txt").unlink()


@pytest.mark.parametrize("where", ["body", "save", "saved"])
def test_a_killed_capture_ends_with_the_same_bits(
    stand_in: Path, always_saving: None, where: str
) -> None:
    """In the second sequence, and before and after the ranks wrote what they have of it."""
    killed(stand_in, **{where: KILL})
    told: list[tuple[int, int, str]] = []
    got, _ = capture(stand_in, resume=True, progress=lambda *news: told.append(news))
    wanted = LayerMoments.zeros(1, 4, 4)
    for ids in SEQUENCES:
        rows = torch.eye(4)[torch.tensor(ids) % 4][None]
        wanted.add(rows, rows, rows)
    assert all(
        torch.equal(getattr(got.layers[0], name), getattr(wanted, name)) for name in ROW_SUMS
    )
    assert [path.name for path in (stand_in / "ranks").glob("sums-*")] == [
        "sums-2"
    ]  # older ones are gone
    assert told == [(5, 7, "engine start"), (7, 7, "pass 1 of 1")]
    assert (stand_in / "calls.txt").read_text().split().count("generate") == 1
    discard(stand_in)
    assert not (stand_in / "ranks").exists()


def test_a_capture_that_is_not_resumed_starts_anew(stand_in: Path, always_saving: None) -> None:
    killed(stand_in, body=KILL)
    moments, _ = capture(stand_in)
    assert moments.tokens == 7
    calls = (stand_in / "calls.txt").read_text().split()
    assert calls.count("generate") == 2 and "oscar_tap_load" not in calls


def test_only_the_same_capture_is_gone_on_with(stand_in: Path, always_saving: None) -> None:
    killed(stand_in, body=KILL)
    changes: dict[str, dict[str, Any]] = {
        "model": {"model": "org/other"},
        "needs": {"needs": frozenset({"rows", "outputs"})},
        "tensor parallel": {"tensor_parallel": 2},
        "engine arguments": {"flags": ("--attention-backend=triton",)},
        "data": {"sequences": ((1, 2, 3, 4, 5), (6, 8))},
    }
    for what, changed in changes.items():
        said = "of another calibration text" if what == "data" else f"with {what} "
        with pytest.raises(OutputExists, match=f"a capture {said}"):
            capture(stand_in, resume=True, **changed)
    (stand_in / "ranks/sums-1/pp0-tp0/rank.json").write_text("{")
    with pytest.raises(
        IntegrityError, match=r"sums-1 cannot be resumed.*left a report that cannot be read"
    ):
        capture(stand_in, resume=True)
    shutil.rmtree(stand_in / "ranks/sums-1")
    with pytest.raises(IntegrityError, match=r"state\.json cannot be resumed: sums-1 is missing"):
        capture(stand_in, resume=True)


def test_a_capture_that_cannot_succeed_leaves_nothing_to_go_on_from(
    stand_in: Path, always_saving: None
) -> None:
    with pytest.raises(ComputeFailed, match="trace of kk"):
        capture(stand_in, "self.sums.kk.zero_()")
    assert not list((stand_in / "ranks").iterdir())
