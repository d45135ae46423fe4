"""Mistakes with a model, a text, a device or a server: what is said, and the exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import served_model
from cli_output import TINY, parsed, refused
from safetensors.torch import load_file, save_file
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run
from oscar_zoo.cli.pasting import measuring
from oscar_zoo.models.loading import check_weights

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TAG = "seq512_prompt2_group64"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "artifact", artifact_files())


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hub" / TINY / TAG, artifact_files())
    return tmp_path / "hub"


def test_a_server_that_dies_while_serving(
    capsys: pytest.CaptureFixture[str], artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs still get one object; the cause goes to stderr, and the exit code says it."""
    port = served_model.take_its_place(monkeypatch, dies=True)
    command = [
        "serve",
        str(artifact),
        "--model",
        str(MODEL),
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    assert run([*command, "--json"]) == 1
    done = capsys.readouterr()
    assert parsed(done.out)["url"] == f"http://127.0.0.1:{port}/v1"
    assert done.err.count("\n") == 1 and "it fell over. Log: " in done.err
    assert run([*command, "-q"]) == 1
    assert "it fell over. Log: " in capsys.readouterr().err


def test_a_backend_that_is_replaced_is_told_before_the_start(
    capsys: pytest.CaptureFixture[str], artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = served_model.take_its_place(monkeypatch, dies=True)
    place = ["--model", str(MODEL), "--port", str(port), "--device", "cpu"]
    assert run(["serve", str(artifact), *place, "--", "--attention-backend=fa3"]) == 1
    told = capsys.readouterr().err
    note = "note: --attention-backend fa3 is replaced by oscar_int2"
    assert note in told and told.index(note) < told.index("Starting SGLang")


def without(model: Path, lost: str) -> None:
    """The weights without the tensors whose names hold `lost`."""
    tensors = load_file(model / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if lost not in name}
    assert len(kept) < len(tensors)
    save_file(kept, model / "model.safetensors")


def divided(model: Path, *, unnamed: str = "", invented: str = "") -> None:
    """The weights in two files with an index that does not name some, or names some that are not
    there."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for number in range(2):
        part = {name: tensors[name] for name in names[number::2]}
        save_file(part, model / f"part-{number}.safetensors")
        index |= dict.fromkeys(part, f"part-{number}.safetensors")
    index = {name: file for name, file in index.items() if not unnamed or unnamed not in name}
    index |= {invented: "part-0.safetensors"} if invented else {}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def indexed(model: Path, file: str) -> None:
    """Put an index that names `file` beside the one file with all weights."""
    index = f'{{"weight_map": {{"model.norm.weight": {file}}}}}'
    (model / "model.safetensors.index.json").write_text(index)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 9\n"
SPOILT: dict[str, Callable[[Path], object]] = {
    "a tensor is lost": lambda model: without(model, "layers.2.self_attn.k_proj"),
    "a layer is lost": lambda model: without(model, "layers.3."),
    "an index that lacks a layer": lambda model: divided(model, unnamed="layers.1."),
    "an index of other weights": lambda model: divided(model, invented="model.layers.9.x"),
    "an index of files that are not there": lambda model: indexed(model, '"a.safetensors"'),
    "an index of files elsewhere": lambda model: indexed(model, '"../../a.safetensors"'),
    "an index of numbers": lambda model: indexed(model, "5"),
    "an index that is a pointer": lambda model: (
        model / "model.safetensors.index.json"
    ).write_bytes(POINTER),
    "a template that is a pointer": lambda model: (model / "chat_template.jinja").write_bytes(
        POINTER
    ),
    "an empty generation_config.json": lambda model: (model / "generation_config.json").write_bytes(
        b""
    ),
    "weights that are a pointer": lambda model: (model / "model.safetensors").write_bytes(POINTER),
    "a tokenizer that is a pointer": lambda model: (model / "tokenizer.json").write_bytes(POINTER),
    "a tokenizer that is a page": lambda model: (model / "tokenizer.json").write_text("<html>"),
    "an empty tokenizer": lambda model: (model / "tokenizer.json").write_bytes(b""),
    "other heads": lambda model: (model / "config.json").write_text(
        json.dumps(json.loads((MODEL / "config.json").read_bytes()) | {"num_attention_heads": 8})
    ),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_model_that_is_not_whole_is_refused_everywhere(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    artifact: Path,
    spoil: Callable[[Path], object],
) -> None:
    """In the same words, before weights are read and before a server starts."""
    shutil.copytree(MODEL, tmp_path / "a-model")
    spoil(tmp_path / "a-model")
    model, out = tmp_path / "a-model", tmp_path / "out"
    lines = {
        refused(capsys, 1, "compute", model, "--calib-tokens", 64, "--output-dir", out),
        refused(capsys, 1, "eval", artifact, "--model", model, "--task", "perplexity"),
        refused(capsys, 1, "serve", artifact, "--model", model, "--device", "cpu"),
    }
    assert len(lines) == 1 and not out.exists()


def test_weights_in_two_files_are_whole(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "a-model")
    divided(tmp_path / "a-model")
    check_weights(tmp_path / "a-model")


def test_a_model_on_no_hub_needs_its_folder(
    capsys: pytest.CaptureFixture[str], hub: Path, artifact: Path, tmp_path: Path
) -> None:
    """The zoo knows it by an id that no hub has: every printed command says where its folder
    goes."""
    cause = f"the checkpoint of {TINY} is on no hub. Give its folder: oscar-zoo"
    assert f"{cause} compute FOLDER" in refused(
        capsys, 2, "compute", TINY, "--output-dir", tmp_path / "out"
    )
    assert f"{cause} pull FOLDER --compute" in refused(capsys, 2, "pull", TINY, "--compute")
    assert f"{cause} serve {TINY} --model FOLDER" in refused(capsys, 2, "serve", TINY, "--print")
    assert run(["info", TINY]) == run(["info", "Qwen3.5-4B"]) == 0
    told = capsys.readouterr().out
    assert "weights 6.9 MB (its shapes, in BF16)" in told
    assert (
        "make one: oscar-zoo compute FOLDER" in told
        and "oscar-zoo pull Qwen3.5-4B --compute" in told
    )
    assert run(["pull", TINY, "--hub", f"file:{hub}"]) == 0
    told = capsys.readouterr().err
    assert measuring(Path("made"), f"oscar-zoo/{TINY}").endswith(
        "oscar-zoo eval ./made --model FOLDER"
    )
    assert (
        f"give the folder of the model: oscar-zoo serve {TINY}:{TAG} --model FOLDER" in told
        and "Next" not in told
    )
    for what in (TINY, artifact):
        for more in ("--print", "--device=cpu"):
            assert f"{cause} serve {what} --model FOLDER" in refused(capsys, 2, "serve", what, more)
        assert f"{cause} eval {what} --model FOLDER" in refused(capsys, 2, "eval", what)


def test_what_is_short_and_where_it_goes_is_said_before_the_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["compute", str(MODEL), "--method", "oscar", "--calib-tokens", "300"]) == 0
    told = capsys.readouterr().err.splitlines()
    began = next(number for number, line in enumerate(told) if line.startswith("capture"))
    for words in ("the artifact goes into", "tokens are few"):
        assert [number < began for number, line in enumerate(told) if words in line] == [True]
