"""`compute`, `fit`, `merge-moments` and `plot` as people run them: one capture, many methods, a
model larger than this machine, and reports."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_child import Cli as Child
from cli_output import Cli
from random_moments import describe, random_moments
from raw_server import closed_port
from site_pages import sample_report
from tiny_artifacts import artifact_files, write_folder
from tiny_models import INDEX, TOKENIZER, change_config, save_model, write_model

from oscar_zoo.compute.moments_file import save_moments
from oscar_zoo.compute.obtain import plan_computing
from oscar_zoo.compute.report.data import ReportData
from oscar_zoo.errors import ArtifactNotFound, UnsupportedModel
from oscar_zoo.observer import SILENT
from oscar_zoo.registry.targets import ComputeWish, choose_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-qwen3-hard"
TEXT = ROOT / "examples" / "text" / "calibration.txt"
EXACT = ("--dtype", "float32")
"""Many processors multiply bfloat16 at a fifth of the speed."""


WORDS = ("--calib-data", TEXT, "--calib-tokens", 512, "--method", "oscar", *EXACT)


def compute(cli: Cli, folder: Path, text: Path, method: str) -> dict[str, Any]:
    words = ("--calib-data", text, "--calib-tokens", 512, "--method", method, *EXACT)
    return dict(cli.json(0, "compute", MODEL, *words, "--output-dir", folder))


@pytest.fixture
def halves(tmp_path: Path) -> list[Path]:
    """Two texts without a common document."""
    text = TEXT.read_text("utf-8")
    places = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for place, part in zip(places, (text[:40_000], text[-40_000:]), strict=True):
        place.write_text(part)
    return places


def test_an_artifact_goes_beside_the_folder_of_its_model(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder above and from within, for `compute` and `fit`: the model stays as it was."""
    shutil.copytree(MODEL, tmp_path / "mine")
    before = sorted(path.name for path in (tmp_path / "mine").iterdir())
    for here, model, beside in (("", "./mine", "mine-rotation"), ("mine", ".", "../mine-rotation")):
        monkeypatch.chdir(tmp_path / here)
        made = cli.json(0, "compute", model, *WORDS)
        place = Path(str(made["path"]))
        assert place.parent == Path(beside), made
        fitted = cli.json(0, "fit", made["moments"], "--method", "hadamard")
        assert Path(str(fitted["path"])).parent == Path(beside)
        assert cli.json(0, "info", model)["name"] == "mine"
        shutil.rmtree(tmp_path / "mine-rotation")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == before
    monkeypatch.chdir(tmp_path)
    made = cli.json(0, "compute", MODEL, *WORDS)
    assert Path(str(made["path"])).parent == Path("tiny-qwen3-hard")  # no model lies there


def test_the_folder_of_an_artifact_means_the_moments_beside_it(
    tmp_path: Path, halves: list[Path], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for `plot`, however the folder is written."""
    compute(cli, tmp_path / "one", halves[0], "oscar")
    compute(cli, tmp_path / "two", halves[1], "oscar")
    made = []
    for number, (here, given) in enumerate(
        (("", "./one.moments.safetensors"), ("", "one/"), ("one", "."), ("one", "../one"))
    ):
        monkeypatch.chdir(tmp_path / here)
        to = tmp_path / f"fit-{number}"
        made.append(cli.json(0, "fit", given, "--method", "oscar", "--output-dir", to)["digest"])
    assert len(set(made)) == 1
    monkeypatch.chdir(tmp_path)
    merged = cli.json(0, "merge-moments", "./one", "./two", "--output", "both.safetensors")
    assert int(str(merged["tokens"])) == 1024
    assert "one.moments.safetensors" in cli.refused(2, "fit", ".", "--method", "oscar")
    (tmp_path / "one.moments.safetensors").unlink()
    assert cli.json(0, "fit", ".", "--method", "hadamard", "--output-dir", "./two-h")
    assert "one.moments.safetensors" in cli.refused(3, "fit", "./one", "--method", "oscar")


def test_one_capture_gives_what_methods_make(tmp_path: Path, halves: list[Path], cli: Cli) -> None:
    moments = compute(cli, tmp_path / "oscar", halves[0], "oscar")["moments"]
    for method in ("wush", "oscar-per-head", "oscar"):
        target = tmp_path / f"fit-{method}"
        fitted = cli.json(0, "fit", moments, "--method", method, "--output-dir", target)
        again = compute(cli, tmp_path / f"again-{method}", halves[0], method)
        assert fitted["digest"] == again["digest"], method
        cli(0, "verify", target, "--strict")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example model in the current folder, under a name of its own."""
    shutil.copytree(MODEL, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(cli: Cli, *arguments: object) -> list[str]:
    """What a command that must succeed prints, stdout before stderr."""
    return [*cli(0, *arguments).splitlines(), *cli.err.splitlines()]


def next_step(printed: list[str]) -> list[str]:
    """The command line that is proposed, without the program."""
    line = next(line for line in printed if line.startswith("Next: "))
    return shlex.split(line.removeprefix("Next: "))[1:]


def test_what_is_printed_can_be_pasted(here: Path, cli: Cli) -> None:
    """Folders begin with ./, and the name of the artifact is said where its folder does not."""
    printed = lines(cli, "compute", "mine", "--calib-tokens", "300", "--method", "oscar")
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
    measured = lines(cli, *step, *short)
    assert (
        "Perplexity of 1 window(s) of 64 tokens of manuals, all positions; other text or windows"
        in measured[-2]
    )
    assert measured[-1].startswith("Scores: mine-rotation/seq300")
    fitted = lines(cli, "fit", moments, "--method", "wush")
    assert fitted[0].startswith("Saved ./mine-rotation/seq300")
    assert any("the folder of mine" in line and "--model FOLDER" in line for line in fitted)


def test_a_model_that_serve_refuses_is_told_first(tmp_path: Path, cli: Cli) -> None:
    folder = save_model(tmp_path / "chunked", "Qwen3", vocab_size=2048)
    change_config(folder, attention_chunk_size=8192)
    arguments = ["--method", "hadamard", "--output-dir", tmp_path / "out"]
    notes = [x for x in lines(cli, "compute", folder, *arguments) if x.startswith("note: ")]
    told = "serve will refuse this model: chunked local attention"
    assert [told in note for note in notes] == [True, *[False] * (len(notes) - 1)]
    facts = cli.json(0, "compute", folder, *arguments, "--force")
    assert [note for note in facts["notes"] if told in note] == [notes[0].removeprefix("note: ")]
    cli(0, "pull", folder, "--compute", "--dry-run")
    assert "serve will refuse this model" in cli.err
    choice, error = choose_model(str(folder)), ArtifactNotFound("nobody has it")
    with pytest.raises(UnsupportedModel, match="chunked local attention"):
        plan_computing(choice, ComputeWish(compute=True, to_serve=True), error, SILENT)
    assert plan_computing(choice, ComputeWish(compute=True), error, SILENT).notes
    facts = cli.json(0, "compute", MODEL, *arguments, "--force")
    assert not [note for note in facts["notes"] if "serve" in note]


@pytest.mark.parametrize("forbidden", [True, False])
def test_a_model_nobody_can_fetch_is_one_line_at_once(
    forbidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, and where nobody listens: no line for every attempt of a client."""
    with closed_port() as port:
        address = f"http://127.0.0.1:{port}"
        variables = {
            "HF_ENDPOINT": address,
            "HF_HUB_OFFLINE": "01"[forbidden],
            "HF_HOME": str(tmp_path / "home"),
        }
        cli = Child({**os.environ, **variables}, tmp_path)
        write_folder(tmp_path / "a", artifact_files())
        offline = ["--offline"] if forbidden else []
        for words in (
            ["compute", "org/model"],
            ["eval", str(tmp_path / "a"), "--model", "org/model", *offline],
        ):
            done = cli(*words)
            assert (done.code, done.out) == (5, "")
            (line,) = done.err.splitlines()
            assert line.startswith("error: ") and "org/model" in line
            assert line.endswith("give a local folder")


LAYERS, HIDDEN, INNER = 80, 8192, 1 << 19
SHAPES = {
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "self_attn.q_proj": (256, HIDDEN),
    "self_attn.k_proj": (128, HIDDEN),
    "self_attn.v_proj": (128, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 256),
    "self_attn.q_norm": (64,),
    "self_attn.k_norm": (64,),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """Two terabytes of weights in files that take no room: all holes behind their headers."""
    folder = tmp_path / "huge"
    folder.mkdir()
    for name in ("config.json", *TOKENIZER):
        shutil.copyfile(MODEL / name, folder / name)
    change_config(folder, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS)
    shapes = {"model.embed_tokens.weight": (2048, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {
        f"model.layers.{n}.{name}.weight": shape
        for n in range(LAYERS)
        for name, shape in SHAPES.items()
    }
    names = {}
    for number, (name, shape) in enumerate(shapes.items()):
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header = json.dumps(
            {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}
        ).encode()
        names[name] = f"model-{number:05}.safetensors"
        with (folder / names[name]).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def test_compute_says_what_is_missing_and_writes_none(huge: Path, tmp_path: Path, cli: Cli) -> None:
    words = ("--output-dir", tmp_path / "made/rotation", "--device", "cpu", "--no-stream-weights")
    err = cli.refused(1, "compute", huge, *WORDS, *words)
    assert "huge needs about 4129 GB on cpu, " in err and " GB are free. " in err
    assert not (tmp_path / "made").exists()


def test_a_streamed_computation_makes_the_same_artifact(tmp_path: Path, cli: Cli) -> None:
    model = write_model(tmp_path / "model")
    cli.capsys.readouterr()  # transformers shows how it writes one
    words = ["--calib-data", TEXT, "--calib-tokens", 512, "--method", "wush", "--group-size", 16]
    made = []
    for choice, device in (("--stream-weights", "cpu"), ("--no-stream-weights", "auto")):
        place = ["--output-dir", tmp_path / choice.strip("-"), "--device", device, choice]
        made.append(cli.json(0, "compute", model, *words, *place)["digest"])
    assert made[0] == made[1]


def small_report() -> ReportData:
    """With one chart, quick to draw."""
    return sample_report(2).model_copy(
        update={"errors": (), "clip": None, "spectra": None, "headroom": None}
    )


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Beside the folder of its artifact."""
    (tmp_path / "artifact").mkdir()
    path = tmp_path / "artifact.report.json"
    path.write_bytes(small_report().to_bytes())
    return path


def test_a_report_is_drawn_again(report: Path, tmp_path: Path, cli: Cli) -> None:
    """A folder means the report beside or in it, and the ending of the output the format."""
    cli(0, "plot", tmp_path / "artifact")
    cli(0, "plot", tmp_path, "--output", tmp_path / "again.html")
    pages = (tmp_path / "again.html", tmp_path / "artifact.report.html")
    assert pages[0].read_bytes() == pages[1].read_bytes()
    cli(0, "plot", report, "--output", tmp_path / "p.PNG")
    assert (tmp_path / "p.PNG").read_bytes().startswith(b"\x89PNG")
    facts = cli.json(0, "plot", report)
    assert Path(facts["path"]).is_file()
    assert facts["report"] == small_report().to_json()
    for number, output in ((2, "p.pdf"), (2, "p"), (3, "gone/r.html"), (8, "/proc/r.html")):
        cli.refused(number, "plot", report, "--output", tmp_path / output)
    (tmp_path / "other.report.json").write_bytes(b"{}")
    assert "artifact.report.json" in cli.refused(2, "plot", tmp_path)


def test_moments_give_their_spectra(tmp_path: Path, cli: Cli) -> None:
    moments = random_moments()
    save_moments(tmp_path / "moments.safetensors", moments, describe(moments))
    cli(0, "plot", tmp_path / "moments.safetensors")
    page = (tmp_path / "moments.html").read_text()
    assert "oscar-zoo/random" in page and "Eigenvalue spectra" in page and "<table>" not in page


@pytest.mark.parametrize("content", [b"", b"{", b"<html>", b"\xff"])
def test_broken_reports(content: bytes, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "r.report.json").write_bytes(content)
    assert "r.report.json" in cli.refused(4, "plot", tmp_path / "r.report.json")
    assert [path.name for path in tmp_path.iterdir()] == ["r.report.json"]
