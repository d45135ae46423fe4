"""`pull` and `serve` where nobody has an artifact: what they say, and what `--compute` leaves
behind."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_child import Cli, Finished
from cli_output import parsed
from engines import INSTALLED, needs_sglang
from forked_process import ForkedProcess
from quick_cli import QuickCli
from safetensors.torch import load_file, save_file
from tiny_artifacts import artifact_files
from tiny_models import change_config

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.cli.main import run
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.targets import check_made_for, choose_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-qwen3-hard"
NAME = "tiny-qwen3-hard"
TEXT = (ROOT / "examples" / "text" / "calibration.txt").read_text("utf-8")[:36_000]
"""Less would leave no held-out sequence that is longer than both windows."""
SHORT = "one-layer"
"""Another model, which is measured in a quarter of the time."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]  # minutes of computing beside other processes


@dataclass(frozen=True)
class Made:
    """One state in which an artifact was computed: after an interrupt, beside a damaged state, by
    one of two."""

    cli: Cli
    model: Path
    text: Path
    interrupted: Finished
    left: list[str]
    both: list[dict[str, Any]]

    @property
    def computed(self) -> dict[str, Any]:
        return next(row for row in self.both if row["computed"])


def results(cli: Cli) -> list[str]:
    """Every file of an artifact that anybody could find."""
    places = (
        cli.folder / "data",
        cli.folder / "cache" / "artifacts",
        cli.folder / "cache" / "blobs",
    )
    return [str(path) for place in places for path in place.rglob("*") if path.is_file()]


def first_layer(folder: Path) -> Path:
    """The example model without its other layers, in float32, because many processors multiply
    bfloat16 at a fifth of the speed: its artifact is real, its text is not."""
    shutil.copytree(MODEL, folder)
    change_config(folder, num_hidden_layers=1, torch_dtype="float32")
    weights = load_file(folder / "model.safetensors")
    kept = {
        name: weight.float()
        for name, weight in weights.items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def start(cli: Cli, *arguments: str) -> ForkedProcess | subprocess.Popen[str]:
    """Start a command, as a fork of a process that has imported torch where SGLang is installed."""
    if not INSTALLED:
        return cli.start(*arguments)
    return ForkedProcess(["-m", "oscar_zoo", *arguments], cli.variables, cli.folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    text = folder / "text.txt"
    text.write_text(TEXT)
    model = first_layer(folder / SHORT)
    cli = QuickCli({**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, folder)
    wanted = ("pull", str(model), "--compute", "--calib-data", str(text))
    first = start(cli, *wanted)
    while not (found := list(folder.glob("cache/computing/*/rotation.work/*"))):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)  # until the model is loaded and the capture begins
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=300)
    left = results(cli)
    found[0].mkdir(parents=True, exist_ok=True)
    (found[0] / "state.json").write_text("{}")  # of another version: nothing to go on from
    children = [start(cli, *wanted, "--json") for _ in range(2)]
    told = [child.communicate(timeout=1500) for child in children]
    assert [child.returncode for child in children] == [0, 0], told
    both = [parsed(out)["artifacts"][0] for out, _ in told]
    return Made(cli, model, text, Finished(first.returncode, out, err), left, both)


def test_it_says_how_long_it_will_take_before_it_starts(made: Made) -> None:
    first = made.interrupted.err.splitlines()[0]
    assert "16,384 tokens" in first and str(made.text) in first and " on cpu: about " in first


def test_nothing_is_said_of_earlier_work_where_there_was_none(made: Made) -> None:
    assert "nothing to go on from" not in made.interrupted.err


def test_ctrl_c_leaves_no_artifact_and_a_second_run_ends(made: Made) -> None:
    assert made.interrupted.code == 130 and not made.interrupted.out
    assert made.left == []
    assert not [
        path for path in (made.cli.folder / "cache" / "computing").iterdir() if path.is_dir()
    ]


def test_of_two_processes_one_computes(made: Made) -> None:
    assert sorted(row["computed"] for row in made.both) == [False, True]
    assert len({(row["id"], row["digest"], row["path"]) for row in made.both}) == 1


def test_it_is_told_as_any_pull(made: Made) -> None:
    row, other = made.computed, next(row for row in made.both if not row["computed"])
    assert set(row) >= set(other)
    assert row["id"].startswith(f"{SHORT}/seq") and not row["already_present"]
    assert Path(row["path"], FILE_NAME).is_file()
    assert row["hub"] == f"file:{made.cli.folder / 'data' / 'zoo'}"
    assert Path(row["report"]).is_file() and Path(row["moments"]).is_file()
    manifest = Manifest.from_bytes(Path(row["path"], FILE_NAME).read_bytes())
    assert manifest.fit.calibration is not None and manifest.fit.calibration.dataset == "text.txt"
    assert manifest.fit.selection is not None


def test_every_command_finds_it_by_name_without_network(made: Made) -> None:
    cli, row = made.cli, made.computed
    for wanted in (SHORT, str(made.model), row["id"].replace("/", ":")):
        pulled = cli("pull", wanted, "--offline", "--json").json["artifacts"][0]
        assert (pulled["digest"], pulled["already_present"]) == (row["digest"], True)
    again = cli("pull", SHORT, "--compute", "--json").json["artifacts"][0]
    assert (again["digest"], again["computed"]) == (row["digest"], False)
    elsewhere = cli(
        "pull", SHORT, "--no-lock", "--json", OSCAR_ZOO_CACHE=str(cli.folder / "other-cache")
    )
    assert elsewhere.json["artifacts"][0]["digest"] == row["digest"]
    listed = cli("list", "--offline", "--json").json["artifacts"]
    assert [one["status"] for one in listed if one["id"] == row["id"]] == ["installed"]
    assert cli("verify", SHORT, "--strict").code == 0


@pytest.fixture
def inside(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The same state for commands that run in this process."""
    for name, value in made.cli.variables.items():
        if name.startswith("OSCAR_ZOO_"):
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(made.cli.folder)
    return made


@needs_sglang
def test_serve_finds_it_by_name(inside: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty key is found out after the artifact was opened and fitted to its model."""
    key = inside.cli.folder / "key"
    key.write_text("\n")
    model = str(inside.model)
    for what in ([SHORT, "--model", model], [model], [model, "--compute"]):
        error = error_of(capsys, 2, "serve", *what, "--expose", "127.0.0.1", "--api-key-file", key)
        assert "one line with a key" in error["message"]


def error_of(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> dict[str, str]:
    """The error of a command that must fail, in this process."""
    capsys.readouterr()
    assert run([*map(str, arguments), "--json"]) == code
    result: dict[str, str] = parsed(capsys.readouterr().out)["error"]
    return result


def test_without_compute_the_next_step_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OSCAR_ZOO_PORT")
    monkeypatch.setenv("OSCAR_ZOO_HUB", f"file:{tmp_path}")  # which answers
    for wanted, shown in ((NAME, "FOLDER"), ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B"), (MODEL, MODEL)):
        assert run(["pull", str(wanted)]) == 3
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1
        assert err.rstrip().endswith(f"oscar-zoo pull {shown} --compute")
    assert run(["serve", NAME, "--model", str(MODEL), "--print"]) == 3
    assert (
        capsys.readouterr()
        .err.rstrip()
        .endswith(f"oscar-zoo serve {NAME} --model {MODEL} --print --compute")
    )


def test_without_a_network_only_a_model_that_is_here_is_offered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:nobody/asks")
    monkeypatch.setenv("OSCAR_ZOO_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    for here in (False, True):
        for command in ("pull", "serve"):
            error = error_of(capsys, 5, command, "Qwen3-8B", "--offline")
            assert ("--compute" in error["hint"]) == here and "run it without --offline" in error[
                "hint"
            ]
        snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / commit
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
        refs = tmp_path / "models--Qwen--Qwen3-8B" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(commit)


def test_what_cannot_be_computed_is_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    tag, digest = f"{NAME}:seq1_prompt1_group64", f"{NAME}@sha256:{'0' * 64}"
    for wanted, code in (("qwen3-7b", 3), (tag, 5), (digest, 5)):  # a hub may have both
        for more in ([], ["--compute"]):
            error = error_of(capsys, code, "pull", wanted, *more)
            assert "--compute" not in (error["hint"] or "")


def test_a_folder_without_weights_is_refused_before_anything_is_announced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    for words in (["pull", str(tmp_path)], ["serve", str(tmp_path), "--print", "--device", "cpu"]):
        assert run([*words, "--compute"]) == 1
        err = capsys.readouterr().err
        assert "has no *.safetensors weights" in err and "Computing one" not in err


def test_computing_is_offered_for_a_folder_that_nobody_knows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can have published anything under its name, so fetching it alone is no way on."""
    shutil.copytree(MODEL, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    error = error_of(capsys, 3, "pull", "./mine", "--offline")
    assert error["hint"].endswith("oscar-zoo pull ./mine --compute --offline")
    serve = ["serve", "./mine", "--print", "--device", "cpu", "--offline"]
    hint = error_of(capsys, 3, *serve)["hint"]
    assert "oscar-zoo serve ./mine " in hint and "--compute" in hint


def test_a_plan_costs_nothing(capsys: pytest.CaptureFixture[str], own_state: Path) -> None:
    assert run(["pull", str(MODEL), "--compute", "--dry-run"]) == 0
    assert " on cpu: about " in capsys.readouterr().out
    assert not [path for path in own_state.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_hub_that_does_not_answer_is_told_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """An artifact may be there after all; nobody listens on this port."""
    for name in ("HF_HUB_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:  # bound, never listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        hub = ("--hub", "hf:org/zoo")
        error = error_of(capsys, 5, "pull", MODEL, *hub)
        assert error["hint"].endswith(f"oscar-zoo pull {MODEL} --hub hf:org/zoo --compute")
        assert run(["pull", str(MODEL), *hub, "--compute", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "Would compute" in out and "note: Hugging Face org/zoo " in err


def test_options_that_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--locked" in error_of(capsys, 2, "pull", NAME, "--compute", "--locked")["message"]
    assert "--compute" in error_of(capsys, 2, "pull", NAME, "--calib-data", "text.txt")["message"]
    error = error_of(capsys, 3, "pull", MODEL, "--compute", "--calib-data", "absent.txt")
    assert "absent.txt" in error["message"]


@needs_sglang
def test_serve_offers_it_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    port = os.environ["OSCAR_ZOO_PORT"]
    assert error_of(capsys, 5, "serve", MODEL)["hint"].endswith(
        f"oscar-zoo serve {MODEL} --port {port} --compute"
    )


@needs_sglang
def test_serve_asks_on_a_terminal(tmp_path: Path) -> None:
    """Nothing is computed after a no; standard input and error are a terminal."""
    ours, theirs = pty.openpty()
    cli = Cli({**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "dumb"}, tmp_path)
    command = [sys.executable, "-m", "oscar_zoo", "serve", str(MODEL)]
    child = subprocess.Popen(
        command, env=cli.variables, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    try:
        while b"[Y/n]" not in seen:
            seen += os.read(ours, 4096)
        os.write(ours, b"n\n")
        assert child.wait(timeout=300) == 5
        said = os.read(ours, 4096).decode().splitlines()[-1]
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert f"No artifact for {NAME} exists. Compute one now (about ".encode() in seen
    assert said.startswith(f"error: nothing was computed for {NAME}. Compute one: oscar-zoo serve ")
    assert said.endswith(" --compute") and str(MODEL) in said
    assert results(cli) == []


def test_two_folders_of_one_name_are_two_models(tmp_path: Path) -> None:
    """A name that the zoo knows means one model; any other folder is known by its configuration."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    made_for = Manifest.from_bytes(artifact_files()[FILE_NAME])

    def of(config: str) -> Manifest:
        block = made_for.model.model_copy(update={"config_sha256": sha256_hex(config.encode())})
        return made_for.model_copy(update={"model": block})

    choice = choose_model(folder)
    check_made_for(choice, of("{}"))
    check_made_for(choice, None)
    check_made_for(choose_model(MODEL), of("another"))
    with pytest.raises(UsageError, match=r"another model than .*checkpoint"):
        check_made_for(choice, of("another"))
