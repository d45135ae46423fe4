"""Mistakes with a model, a text, a device or a server: what is said, and the exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fake_sglang
import pytest
from cli_output import parsed
from refusals import TINY, refused
from safetensors.torch import load_file, save_file
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run
from oscar_zoo.cli.pasting import measuring
from oscar_zoo.models.loading import check_weights
from oscar_zoo.models.nvidia_smi import torch_without_cuda

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
    port = fake_sglang.take_its_place(monkeypatch, dies=True)
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
    port = fake_sglang.take_its_place(monkeypatch, dies=True)
    place = ["--model", str(MODEL), "--port", str(port), "--device", "cpu"]
    assert run(["serve", str(artifact), *place, "--", "--attention-backend=fa3"]) == 1
    told = capsys.readouterr().err
    note = "note: --attention-backend fa3 is replaced by oscar_int2"
    assert note in told and told.index(note) < told.index("Starting SGLang")


def test_an_address_of_another_machine(
    capsys: pytest.CaptureFixture[str], artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret")
    expose = ["--api-key-file", tmp_path / "key", "--expose"]
    for address in ("192.0.2.1", "no.such.host.invalid", "2001:db8::1"):
        line = refused(capsys, 2, "serve", artifact, "--model", MODEL, *expose, address)
        assert f"{address} is not an address of this machine" in line


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("config.json", b"{bad", "config.json"),
        ("config.json", b"[]", "config.json"),
        ("config.json", b'{"num_hidden_layers": "four"}', "four"),
        ("tokenizer.json", b"nope", "tokenizer"),
        ("model.safetensors", b"", "model.safetensors"),
    ],
)
def test_a_model_with_a_damaged_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes, cause: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    if content.startswith(b'{"'):
        content = json.dumps(json.loads((MODEL / name).read_bytes()) | json.loads(content)).encode()
    (model / name).write_bytes(content)
    line = refused(
        capsys, 1, "compute", model, "--calib-tokens", 64, "--output-dir", tmp_path / "out"
    )
    assert cause in line and not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("text", ["hi", "one two three", ""])
def test_a_text_too_short_to_fit_anything(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "text.txt").write_text(text)
    command = [
        "compute",
        MODEL,
        "--calib-data",
        tmp_path / "text.txt",
        "--output-dir",
        tmp_path / "out",
    ]
    assert "text.txt" in refused(capsys, 2, *command) and not (tmp_path / "out").exists()


def test_an_artifact_of_another_model_says_so(
    capsys: pytest.CaptureFixture[str], artifact: Path
) -> None:
    assert run(["verify", str(artifact), "--model", "Qwen3-8B"]) == 4
    assert "it does not fit Qwen3-8B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "code", "word"),
    [
        ("frob", 2, "not a device"),
        ("cuda:99", 1, "build for CPUs" if torch_without_cuda() else "no device cuda:99"),
        ("mps", 2, "not a device"),
    ],
)
def test_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
    artifact: Path,
    tmp_path: Path,
    device: str,
    code: int,
    word: str,
) -> None:
    assert word in refused(capsys, code, "eval", artifact, "--model", MODEL, "--device", device)
    assert word in refused(
        capsys, code, "compute", MODEL, "--device", device, "--output-dir", tmp_path / "out"
    )


def test_a_digest_and_a_model_id_that_are_none(
    capsys: pytest.CaptureFixture[str], artifact: Path
) -> None:
    for digest in ("zz", "sha256:3f9a", "0" * 63):
        assert "64 hex digits" in refused(capsys, 2, "verify", artifact, "--digest", digest)
    for name in ("../x", "a/b/c", "a b"):
        assert "not a" in refused(
            capsys, 2, "compute", MODEL, "--model-id", name, "--output-dir", artifact / "x"
        )
    assert not (artifact / "x").exists()


def test_a_model_that_cannot_be_fetched(
    capsys: pytest.CaptureFixture[str],
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "offline mode asks no hub" in refused(
        capsys, 5, "compute", "no-such-org/no-such-model", "--output-dir", tmp_path / "out"
    )


def test_missing_text_is_named_before_the_network(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("OSCAR_ZOO_OFFLINE", "1")
    text = tmp_path / "missing.jsonl"
    told = refused(capsys, 3, "compute", "Qwen/Qwen3-8B", "--calib-data", text)
    assert f"no such calibration file: {text}" in told


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


@pytest.mark.parametrize("name", ["empty", "Qwen3-8B"])
def test_a_folder_without_a_model_is_the_same_mistake_everywhere(
    capsys: pytest.CaptureFixture[str], artifact: Path, tmp_path: Path, name: str
) -> None:
    """Also where the zoo knows a model of the folder's name."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "notes.txt").touch()
    lines = {
        refused(capsys, 1, "compute", folder),
        refused(capsys, 1, "fit-gpu", folder, "--gpu-memory", "24GB"),
        refused(capsys, 1, "eval", artifact, "--model", folder),
        refused(capsys, 1, "verify", artifact, "--model", folder),
        refused(capsys, 1, "bench", "serve", "--dummy-weights", folder),
    }
    (line,) = lines
    assert f"{folder} has no config.json. Name the folder of a Hugging Face checkpoint" in line


@pytest.mark.parametrize(
    "command", [["eval"], ["eval", "--engine", "sglang"], ["ruler"], ["bench", "serve"]]
)
def test_a_model_without_an_artifact_offers_to_compute_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, hub: Path, command: list[str]
) -> None:
    """The command that is offered gives what `eval` looks for."""
    model = tmp_path / "my model"
    shutil.copytree(MODEL, model)
    line = refused(capsys, 3, *command, model, "--hub", f"file:{hub}")
    assert line.startswith(f"error: {model} is a model; no rotation for it is known.")
    assert f"ompute one: oscar-zoo pull '{model}' --hub file:{hub} --compute" in line
