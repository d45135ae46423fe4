"""`compute`, `fit` and `merge-moments` as people run them: one capture, many methods."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from cli_child import Cli
from cli_output import parsed
from tiny_artifacts import artifact_files, write_folder
from tiny_models import change_config, save_model

from oscar_zoo.cli.main import run
from oscar_zoo.compute.obtain import plan_computing
from oscar_zoo.errors import ArtifactNotFound, UnsupportedModel
from oscar_zoo.observer import SILENT
from oscar_zoo.registry.compute_wish import ComputeWish
from oscar_zoo.registry.targets import choose_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "models" / "tiny-qwen3-hard")
TEXT = ROOT / "examples" / "text" / "calibration.txt"
EXACT = ("--dtype", "float32")
"""Many processors multiply bfloat16 at a fifth of the speed."""


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    """The JSON of a command that must succeed."""
    capsys.readouterr()
    code = run([str(argument) for argument in (*arguments, "--json")])
    out, err = capsys.readouterr()
    assert code == 0, (out, err)
    result: dict[str, object] = parsed(out)
    return result


def compute(
    capsys: pytest.CaptureFixture[str], folder: Path, text: Path, method: str
) -> dict[str, object]:
    return told(
        capsys,
        "compute",
        MODEL,
        "--calib-data",
        text,
        "--calib-tokens",
        512,
        "--method",
        method,
        *EXACT,
        "--output-dir",
        folder,
    )


@pytest.fixture
def halves(tmp_path: Path) -> list[Path]:
    """Two texts without a common document."""
    text = TEXT.read_text("utf-8")
    places = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for place, part in zip(places, (text[:40_000], text[-40_000:]), strict=True):
        place.write_text(part)
    return places


def test_an_artifact_goes_beside_the_folder_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder above and from within, for `compute` and `fit`: the model stays as it was."""
    shutil.copytree(MODEL, tmp_path / "mine")
    before = sorted(path.name for path in (tmp_path / "mine").iterdir())
    words = ("--calib-data", TEXT, "--calib-tokens", 512, "--method", "oscar", *EXACT)
    for here, model, beside in (("", "./mine", "mine-rotation"), ("mine", ".", "../mine-rotation")):
        monkeypatch.chdir(tmp_path / here)
        made = told(capsys, "compute", model, *words)
        place = Path(str(made["path"]))
        assert place.parent == Path(beside), made
        fitted = told(capsys, "fit", made["moments"], "--method", "hadamard")
        assert Path(str(fitted["path"])).parent == Path(beside)
        assert told(capsys, "info", model)["name"] == "mine"
        shutil.rmtree(tmp_path / "mine-rotation")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == before
    monkeypatch.chdir(tmp_path)
    made = told(capsys, "compute", MODEL, *words)
    assert Path(str(made["path"])).parent == Path("tiny-qwen3-hard")  # no model lies there


def test_the_folder_of_an_artifact_means_the_moments_beside_it(
    tmp_path: Path,
    halves: list[Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for `plot`, however the folder is written."""
    compute(capsys, tmp_path / "one", halves[0], "oscar")
    compute(capsys, tmp_path / "two", halves[1], "oscar")
    made = []
    for number, (here, given) in enumerate(
        (("", "./one.moments.safetensors"), ("", "one/"), ("one", "."), ("one", "../one"))
    ):
        monkeypatch.chdir(tmp_path / here)
        to = tmp_path / f"fit-{number}"
        made.append(told(capsys, "fit", given, "--method", "oscar", "--output-dir", to)["digest"])
    assert len(set(made)) == 1
    monkeypatch.chdir(tmp_path)
    merged = told(capsys, "merge-moments", "./one", "./two", "--output", "both.safetensors")
    assert int(str(merged["tokens"])) == 1024
    assert run(["fit", ".", "--method", "oscar"]) == 2
    said = capsys.readouterr().err
    assert "holds 2 files" in said and "for example one.moments.safetensors" in said
    (tmp_path / "one.moments.safetensors").unlink()
    assert told(capsys, "fit", ".", "--method", "hadamard", "--output-dir", "./two-h")
    assert run(["fit", "./one", "--method", "oscar"]) == 3
    said = capsys.readouterr().err
    assert "no moments in or beside ./one" in said
    assert "compute leaves it beside an artifact as one.moments.safetensors" in said


def test_one_capture_gives_what_every_method_would_have_computed(
    tmp_path: Path, halves: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first = compute(capsys, tmp_path / "oscar", halves[0], "oscar")
    moments = first["moments"]
    for method in ("wush", "oscar-per-head", "oscar"):
        fitted = told(
            capsys, "fit", moments, "--method", method, "--output-dir", tmp_path / f"fit-{method}"
        )
        again = compute(capsys, tmp_path / f"again-{method}", halves[0], method)
        assert fitted["digest"] == again["digest"], method
        assert run(["verify", str(tmp_path / f"fit-{method}"), "--strict"]) == 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example model in the current folder, under a name of its own."""
    shutil.copytree(MODEL, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What a command that must succeed prints, stdout before stderr."""
    capsys.readouterr()
    assert run(list(arguments)) == 0
    out, err = capsys.readouterr()
    return [*out.splitlines(), *err.splitlines()]


def next_step(printed: list[str]) -> list[str]:
    """The command line that is proposed, without the program."""
    line = next(line for line in printed if line.startswith("Next: "))
    return shlex.split(line.removeprefix("Next: "))[1:]


def test_what_is_printed_can_be_pasted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders begin with ./, and the name of the artifact is said where its folder does not."""
    printed = lines(capsys, "compute", "mine", "--calib-tokens", "300", "--method", "oscar")
    (saved,) = [line for line in printed if line.startswith("Saved ")]
    name = r"seq300_prompt\d+_group64"
    place = rf"\./mine-rotation/{name}"
    assert re.fullmatch(rf"Saved {place}  mine/{name}  sha256:[0-9a-f]{{64}}", saved)
    assert any(line.startswith("Report: ./mine-rotation/") for line in printed) or not list(
        here.glob("mine-rotation/*.html")
    )
    moments = next(line.rpartition(" ")[2] for line in printed if "another method" in line)
    assert moments.startswith("./mine-rotation/")
    step = next_step(printed)
    assert step[0] == "eval" and step[2:] == ["--model", "./mine"]
    assert step[1].startswith("./mine-rotation/seq")
    short = ["--task", "perplexity", "--windows", "1", "--length", "64", "-q"]
    measured = lines(capsys, *step, *short)
    assert (
        "Perplexity of 1 window(s) of 64 tokens of manuals, all positions; other text or windows"
        in measured[-2]
    )
    assert measured[-1].startswith("Scores: mine-rotation/seq300")
    fitted = lines(capsys, "fit", moments, "--method", "wush")
    assert fitted[0].startswith("Saved ./mine-rotation/seq300")
    assert any("the folder of mine" in line and "--model FOLDER" in line for line in fitted)


def test_a_model_that_serve_refuses_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "chunked", "Qwen3", vocab_size=2048)
    change_config(folder, attention_chunk_size=8192)
    arguments = ["--method", "hadamard", "--output-dir", str(tmp_path / "out")]
    printed = lines(capsys, "compute", str(folder), *arguments)
    told = [
        line for line in printed if "serve will refuse this model: chunked local attention" in line
    ]
    assert len(told) == 1 and told[0].startswith("note: ")
    assert printed.index(told[0]) == printed.index(
        next(line for line in printed if line.startswith("note: "))
    )
    facts = compute_json(capsys, folder, *arguments, "--force")
    assert [note for note in facts["notes"] if "serve will refuse" in note] == [
        told[0].removeprefix("note: ")
    ]
    capsys.readouterr()
    assert run(["pull", str(folder), "--compute", "--dry-run"]) == 0
    assert "serve will refuse this model" in capsys.readouterr().err
    choice, error = choose_model(str(folder)), ArtifactNotFound("nobody has it")
    with pytest.raises(UnsupportedModel, match="chunked local attention"):
        plan_computing(choice, ComputeWish(compute=True, to_serve=True), error, SILENT)
    assert plan_computing(choice, ComputeWish(compute=True), error, SILENT).notes
    assert not [
        note
        for note in compute_json(capsys, Path(MODEL), *arguments, "--force")["notes"]
        if "serve" in note
    ]


def compute_json(
    capsys: pytest.CaptureFixture[str], model: Path, *arguments: str
) -> dict[str, Any]:
    return told(capsys, "compute", model, *arguments)


@pytest.mark.parametrize("forbidden", [True, False])
def test_a_model_nobody_can_fetch_is_one_line_at_once(
    forbidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, and where nobody listens: no line for every attempt of a client."""
    with socket.socket() as taken:  # bound, never listening
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        variables = {
            "HF_ENDPOINT": address,
            "HF_HUB_OFFLINE": "01"[forbidden],
            "HF_HOME": str(tmp_path / "home"),
        }
        cli = Cli({**os.environ, **variables}, tmp_path)
        for command in (
            ["compute", "org/model"],
            ["eval", str(tmp_path / "a"), "--model", "org/model"],
        ):
            if command[0] == "eval":
                write_folder(tmp_path / "a", artifact_files())
                command += ["--offline"] if forbidden else []
            done = cli(*command)
            assert (done.code, done.out) == (5, "")
            (line,) = done.err.splitlines()
            assert (
                line.startswith("error: ")
                and "org/model" in line
                and line.endswith("give a local folder")
            )
