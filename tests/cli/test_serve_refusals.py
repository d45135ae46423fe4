"""What `serve` cannot do: one line with cause and next step, before a server starts or weights are
read; models that are not whole, and those that docs/models.md calls refused."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import served_model
from architecture_attempts import sentence
from architecture_page import read_records
from architectures import ARCHITECTURES, write_config
from cli_output import Cli, parsed
from engines import needs_sglang
from safetensors.torch import load_file, save_file
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.engines.sglang.compat.releases import BEYOND, FIRST
from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.engines.sglang.launch.plan import free_port
from oscar_zoo.models.loading import check_weights
from oscar_zoo.registry.architectures import architecture

SUPPORTED = ">={}.{}.{},<{}.{}.{}".format(*FIRST, *BEYOND)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"


class Table:
    """Folder of one case: a model to spoil, and the rest of the command line."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
        self.monkeypatch, self.cli = monkeypatch, cli
        self.model = folder / "a-model"
        shutil.copytree(EXAMPLE, self.model)
        self.artifact = write_folder(folder / "artifact", artifact_files())

    def config(self, **changes: Any) -> list[str]:
        """Change `config.json`; `None` removes a value."""
        path = self.model / "config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: one for name, one in values.items() if one is not None}))
        return []

    def sglang(self, version: str | None) -> list[str]:
        """The SGLang that is installed, as its metadata says."""
        if version is None:
            find = importlib.util.find_spec
            hide = lambda name, package=None: None if name == "sglang" else find(name, package)  # noqa: E731
            self.monkeypatch.setattr(importlib.util, "find_spec", hide)
        else:
            known = importlib.metadata.version
            told = lambda name: version if name == "sglang" else known(name)  # noqa: E731
            self.monkeypatch.setattr("oscar_zoo.engines.sglang.compat.releases.version", told)
        return []

    def weights(self, size: int) -> list[str]:
        """Weights with `size` bytes more, of which the disk holds none."""
        path = self.model / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
        places = [len(numbers), len(numbers) + size]
        entries["more"] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": places}
        header = json.dumps(entries).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + numbers)
        os.truncate(path, 8 + len(header) + places[1])
        return []

    def cut(self, size: int) -> list[str]:
        """The weights without their last `size` bytes."""
        path = self.model / "model.safetensors"
        os.truncate(path, path.stat().st_size - size)
        return []

    def remove(self, name: str) -> list[str]:
        (self.model / name).unlink()
        return []

    def broken(self) -> list[str]:
        (self.model / "config.json").write_text("{")
        return []

    def environment(self, name: str, value: str) -> list[str]:
        self.monkeypatch.setenv(name, value)
        return []


Spoil = Callable[[Table], list[str]]


def config(**changes: Any) -> Spoil:
    return lambda table: table.config(**changes)


def words(*given: str) -> Spoil:
    return lambda table: list(given)


CASES: dict[str, tuple[Spoil, int, str]] = {
    "an artifact for fewer layers": (config(num_hidden_layers=6), 1, "a-model has [0, 1, 2, 3, 4"),
    "an artifact for another head": (config(head_dim=128), 1, "head_dim 64; a-model has 128"),
    "no GPU": (words("--device", "cuda"), 1, "--device cpu"),
    "no such device": (words("--device", "tpu"), 2, "'tpu' is not a device"),
    "weights larger than memory": (lambda t: t.weights(4 * 10**12), 1, "about 8000 GB on cpu"),
    "weights that are cut short": (lambda t: t.cut(4096), 1, "and its header says"),
    "a model without architectures": (config(architectures=None), 1, "has no architectures"),
    "a model that SGLang runs on GPUs alone": (
        config(model_type="qwen3_next", full_attention_interval=4),
        1,
        "a-model (qwen3_next) on a CPU",
    ),
    "too many requests at a time": (
        words("--", "--max-running-requests=90000000"),
        1,
        "windows of 90000000 requests",
    ),
    "no SGLang": (lambda t: t.sglang(None), 1, "this needs sglang"),
    "an SGLang too old": (lambda t: t.sglang("0.5.10"), 1, SUPPORTED),
    "an SGLang too new": (lambda t: t.sglang("0.6.0rc1"), 1, SUPPORTED),
    "heads without a transform": (config(head_dim=88), 1, "has heads of 88 channels"),
    "code of the checkpoint": (
        config(model_type="mimo_v2_flash", hybrid_layer_pattern=[0, 1, 1, 0]),
        1,
        "--trust-remote-code",
    ),
    "no config.json": (lambda t: t.remove("config.json"), 3, "no config.json"),
    "a broken config.json": (lambda t: t.broken(), 1, "config.json is not JSON"),
    "no weights": (lambda t: t.remove("model.safetensors"), 1, "no *.safetensors weights"),
    "a misspelt variable": (
        lambda t: t.environment("SGLANG_OSCAR_K_CLIP", "0.9"),
        2,
        "SGLANG_OSCAR_K_CLIP_RATIO",
    ),
    "a variable that moves the cache": (
        lambda t: t.environment("SGLANG_USE_HND_KVCACHE", "1"),
        2,
        "Unset SGLANG_USE_HND_KVCACHE",
    ),
    "a flag SGLang completes": (words("--", "--speculative-algo=DFLASH"), 2, "-algorithm does"),
    "a flag that opens a port": (words("--", "--grpc-port=1"), 2, "--grpc-port is not allowed"),
    "more ranks than the CPU has places for": (
        lambda t: [
            *t.environment("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),
            *("--device", "cpu", "--", "--tp=3"),
        ],
        1,
        "SGLANG_CPU_OMP_THREADS_BIND names 2 of 3",
    ),
    "more memory than there is": (words("--", "--mem-fraction-static=8"), 2, "is no share of"),
    "groups that cut no row": (words("--", "--oscar-group-size=48"), 2, "a group size of 48"),
    "a value of the cache": (words("--", "--oscar-sink-size=-1"), 2, "--oscar-sink-size '-1'"),
    "no number of GPUs": (words("--", "--tensor-parallel=many"), 2, "--tp 'many'"),
}
ONLY_HERE = {
    "no GPU",
    "more ranks than the CPU has places for",
    "weights larger than memory",
    "too many requests at a time",
    "no SGLang",
    "an SGLang too old",
    "an SGLang too new",
    "a model that SGLang runs on GPUs alone",
}
"""Cases that say something of this machine, where the printed command need not run."""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Table:
    def started(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(server, "_start", started)
    monkeypatch.setattr(
        "oscar_zoo.engines.requirements.importlib.util.find_spec", importlib.util.find_spec
    )
    return Table(tmp_path, monkeypatch, cli)


@needs_sglang
@pytest.mark.parametrize("name", CASES)
def test_it_is_one_line_before_a_server_starts(name: str, table: Table) -> None:
    """No command is printed that would be refused: `--print` ends with the same line and code."""
    spoil, code, said = CASES[name]
    arguments = spoil(table)
    line = refusal(table, arguments, code)
    assert said in line, line
    assert name in ONLY_HERE or refusal(table, ["--print", *arguments], code) == line


def refusal(table: Table, words: list[str], code: int) -> str:
    """The only line that `serve` writes; it must end with `code`."""
    port = ["--port", str(free_port())]
    return table.cli.refused(code, "serve", table.artifact, "--model", table.model, *port, *words)


def test_a_server_dies_serving(cli: Cli, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs still get one object; the cause goes to stderr, and the exit code says it."""
    port = served_model.take_its_place(monkeypatch, dies=True)
    command = ["serve", artifact, "--model", EXAMPLE, "--port", port, "--device", "cpu"]
    assert parsed(cli(1, *command, "--json"))["url"] == f"http://127.0.0.1:{port}/v1"
    assert cli.err.count("\n") == 1 and "it fell over. Log: " in cli.err
    cli(1, *command, "-q", "--", "--attention-backend=fa3")
    assert "it fell over. Log: " in cli.err
    cli(1, *command, "--", "--attention-backend=fa3")
    note = "note: --attention-backend fa3 is replaced by oscar_int2"
    assert note in cli.err and cli.err.index(note) < cli.err.index("Starting SGLang")


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


def holding(file: str, data: bytes) -> Callable[[Path], object]:
    return lambda model: (model / file).write_bytes(data)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 9\n"
SPOILT: dict[str, Callable[[Path], object]] = {
    "a tensor is lost": lambda model: without(model, "layers.2.self_attn.k_proj"),
    "a layer is lost": lambda model: without(model, "layers.3."),
    "an index that lacks a layer": lambda model: divided(model, unnamed="layers.1."),
    "an index of other weights": lambda model: divided(model, invented="model.layers.9.x"),
    "an index of files that are not there": lambda model: indexed(model, '"a.safetensors"'),
    "an index of files elsewhere": lambda model: indexed(model, '"../../a.safetensors"'),
    "an index of numbers": lambda model: indexed(model, "5"),
    "an index that is a pointer": holding("model.safetensors.index.json", POINTER),
    "a template that is a pointer": holding("chat_template.jinja", POINTER),
    "an empty generation_config.json": holding("generation_config.json", b""),
    "weights that are a pointer": holding("model.safetensors", POINTER),
    "a tokenizer that is a pointer": holding("tokenizer.json", POINTER),
    "a tokenizer that is a page": holding("tokenizer.json", b"<html>"),
    "an empty tokenizer": holding("tokenizer.json", b""),
    "other heads": lambda model: (model / "config.json").write_text(
        json.dumps(json.loads((EXAMPLE / "config.json").read_bytes()) | {"num_attention_heads": 8})
    ),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_model_that_is_not_whole_is_refused_everywhere(
    cli: Cli, tmp_path: Path, artifact: Path, spoil: Callable[[Path], object]
) -> None:
    """In the same words, before weights are read and before a server starts."""
    shutil.copytree(EXAMPLE, tmp_path / "a-model")
    spoil(tmp_path / "a-model")
    model, out = tmp_path / "a-model", tmp_path / "out"
    lines = {
        cli.refused(1, "compute", model, "--calib-tokens", 64, "--output-dir", out),
        cli.refused(1, "eval", artifact, "--model", model, "--task", "perplexity"),
        cli.refused(1, "serve", artifact, "--model", model, "--device", "cpu"),
    }
    assert len(lines) == 1 and not out.exists()


def test_weights_in_two_files_are_whole(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "a-model")
    divided(tmp_path / "a-model")
    check_weights(tmp_path / "a-model")


RECORDS = read_records()
Said = Callable[..., str]
REFUSED = [
    name for name, row in RECORDS.items() if "refused" in (row.compute.outcome, row.serve.outcome)
]


@pytest.fixture
def said(cli: Cli) -> Said:
    """The error of a command line that must fail, with what works instead."""

    def say(*words: object) -> str:
        error = cli.json(1, *words)["error"]
        assert "\n" not in error["message"]
        return sentence(error["message"], error["hint"])

    return say


@pytest.mark.parametrize("name", REFUSED)
def test_every_command_says_what_the_document_says(
    name: str, artifact: Path, tmp_path: Path, said: Said
) -> None:
    """In the sentence that docs/models.md records, from `config.json` alone."""
    row, model = RECORDS[name], write_config(name, tmp_path / "model")
    serve = ("serve", artifact, "--model", model, "--device", "cpu")
    assert row.serve.outcome == "refused"
    assert said(*serve) == said(*serve, "--print") == row.serve.said
    if row.compute.outcome == "refused":
        assert said("compute", model, "--output-dir", tmp_path / "made") == row.compute.said
        assert said("eval", artifact, "--model", model) == row.compute.said
    known = architecture(ARCHITECTURES[name].model_type)
    anywhere = known is None or known.serve_gpu.reason  # what is printed may run elsewhere
    for more in ("--print", "--device=cpu") if anywhere else ("--device=cpu",):
        assert said("serve", model, more) == row.serve.said  # the folder is the target itself
    if row.compute.said == row.serve.said:  # what the file alone tells
        assert said("eval", model) == said("pull", model) == row.compute.said
    if known is not None and row.serve.said != row.compute.said:  # of `serve` alone: as `info`
        reason = known.serve_gpu.reason or known.serve_cpu.reason
        assert reason and reason in row.serve.said


@pytest.mark.parametrize("more", ["--print", "--device=cpu"])
def test_a_name_that_no_server_takes_is_refused_before_any_look(more: str, said: Said) -> None:
    reason = "SGLang masks chunks in its FlashAttention backend alone"
    for name in ("Llama-4-Scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct"):
        assert reason in said("serve", name, more) and "compute" not in said("serve", name, more)


def test_info_of_a_folder_says_what_is_wrong_with_its_model(tmp_path: Path, said: Said) -> None:
    model = write_config(REFUSED[0], tmp_path / "model")
    assert said("info", model) == RECORDS[REFUSED[0]].serve.said
