"""What `serve` cannot do: one line with cause and next step, before a server starts or weights are
read."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli import main as cli
from oscar_zoo.engines.sglang.compat.releases import BEYOND, FIRST
from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.engines.sglang.launch.plan import free_port

SUPPORTED = ">={}.{}.{},<{}.{}.{}".format(*FIRST, *BEYOND)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"


class Table:
    """Folder of one case: a model to spoil, and the rest of the command line."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.model = folder / "a-model"
        shutil.copytree(EXAMPLE, self.model)
        self.artifact = write_folder(folder / "artifact", artifact_files())

    def config(self, **changes: Any) -> list[str]:
        """Change `config.json`; `None` removes a value."""
        path = self.model / "config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(
            json.dumps({name: value for name, value in values.items() if value is not None})
        )
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
    "weights larger than memory": (
        lambda t: t.weights(4 * 10**12),
        1,
        "about 8000 GB on cpu",
    ),
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
    "sliding windows everywhere": (config(sliding_window=512), 1, "no full-attention layer"),
    "MLA": (config(kv_lora_rank=512), 1, "multi-head latent attention"),
    "chunked attention": (config(attention_chunk_size=8192), 1, "chunked local attention"),
    "layers that share a cache": (config(num_kv_shared_layers=2), 1, "shares one KV cache"),
    "heads without a transform": (config(head_dim=88), 1, "has heads of 88 channels"),
    "code of the checkpoint": (
        config(model_type="mimo_v2_flash", hybrid_layer_pattern=[0, 1, 1, 0]),
        1,
        "--trust-remote-code",
    ),
    "an encoder": (config(is_encoder_decoder=True), 1, "is an encoder-decoder model"),
    "no config.json": (lambda t: t.remove("config.json"), 1, "no config.json"),
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
    "a flag that SGLang completes": (
        words("--", "--speculative-algo=DFLASH"),
        2,
        "--speculative-algorithm does",
    ),
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
    "groups that no row can be cut into": (
        words("--", "--oscar-group-size=48"),
        2,
        "a group size of 48 does not go with",
    ),
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
}
"""Cases that say something of this machine, where the printed command need not run."""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    def started(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(server, "_start", started)
    monkeypatch.setattr(
        "oscar_zoo.engines.requirements.importlib.util.find_spec", importlib.util.find_spec
    )
    yield Table(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_line_before_a_server_starts(name: str, table: Table) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    spoil, code, said = CASES[name]
    line = refusal(table, spoil(table), code)
    assert said in line, line


@pytest.mark.parametrize("name", sorted(CASES.keys() - ONLY_HERE))
def test_no_command_is_printed_that_would_be_refused(name: str, table: Table) -> None:
    """`--print` ends with the words and the code of `serve`."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    spoil, code, _ = CASES[name]
    arguments = spoil(table)
    assert refusal(table, ["--print", *arguments], code) == refusal(table, arguments, code)


def refusal(table: Table, arguments: list[str], code: int) -> str:
    """The only line that `serve` writes; it must end with `code`."""
    port = free_port()
    command = [
        "serve",
        str(table.artifact),
        "--model",
        str(table.model),
        "--port",
        str(port),
        *arguments,
    ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(command)
    lines = err.getvalue().splitlines()
    assert status == code and not out.getvalue(), (status, out.getvalue(), err.getvalue())
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


@pytest.mark.parametrize("options", [(), ("--detach",)])
def test_a_name_that_nobody_has_is_said_before_the_port(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscar_zoo.serving.serve.require_serve", lambda: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        more = ["--offline", "--device", "cpu", "--port", str(taken.getsockname()[1]), *options]
        assert cli.run(["serve", "Nobody-9B", *more]) == 3
        assert cli.run(["serve", "Qwen3-8B", *more]) == 7
