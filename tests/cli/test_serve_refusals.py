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

    def environment(self, name: str, value: str) -> list[str]:
        self.monkeypatch.setenv(name, value)
        return []


Spoil = Callable[[Table], list[str]]
CASES: dict[str, tuple[Spoil, int, tuple[str, ...]]] = {
    "an artifact for fewer layers": (
        lambda t: t.config(num_hidden_layers=6),
        1,
        (
            "this K rotation is for layers [0, 1, 2, 3]; a-model has [0, 1, 2, 3, 4, 5]",
            "oscar-zoo list --for a-model",
        ),
    ),
    "an artifact for another head": (
        lambda t: t.config(head_dim=128),
        1,
        ("head_dim 64; a-model has 128",),
    ),
    "no GPU": (lambda t: ["--device", "cuda"], 1, ("--device cpu",)),
    "no such device": (
        lambda t: ["--device", "tpu"],
        2,
        ("'tpu' is not a device", "cpu, cuda or cuda:0"),
    ),
    "weights larger than memory": (
        lambda t: t.weights(4 * 10**12),
        1,
        ("a-model needs about 8000 GB on cpu", "are free", "smaller model"),
    ),
    "weights that are cut short": (
        lambda t: t.cut(4096),
        1,
        ("model.safetensors: it has ", "and its header says", "download it again"),
    ),
    "a model without architectures": (
        lambda t: t.config(architectures=None),
        1,
        ("a-model has no architectures",),
    ),
    "a model that SGLang runs on GPUs alone": (
        lambda t: t.config(model_type="qwen3_next", full_attention_interval=4),
        1,
        ("a-model (qwen3_next) on a CPU", "needs CUDA"),
    ),
    "too many requests at a time": (
        lambda t: ["--", "--max-running-requests=90000000"],
        1,
        (
            "a-model needs about",
            "windows of 90000000 requests",
            "50% of what is free",
            "-- --max-running-requests=",
        ),
    ),
    "no SGLang": (
        lambda t: t.sglang(None),
        1,
        ("this needs sglang", "pip install ", "[serve]"),
    ),
    "an SGLang too old": (
        lambda t: t.sglang("0.5.10"),
        1,
        ("sglang 0.5.10 is outside", SUPPORTED),
    ),
    "an SGLang too new": (
        lambda t: t.sglang("0.6.0rc1"),
        1,
        ("sglang 0.6.0rc1 is outside", "pip install"),
    ),
    "sliding windows everywhere": (
        lambda t: t.config(sliding_window=512),
        1,
        ("a-model (qwen3) has no full-attention layer", "SGLang alone"),
    ),
    "MLA": (
        lambda t: t.config(kv_lora_rank=512),
        1,
        ("a-model (qwen3) uses multi-head latent attention (MLA)",),
    ),
    "chunked attention": (
        lambda t: t.config(attention_chunk_size=8192),
        1,
        ("chunked local attention",),
    ),
    "layers that share a cache": (
        lambda t: t.config(num_kv_shared_layers=2),
        1,
        ("a-model (qwen3) shares one KV cache between layers",),
    ),
    "heads without a transform": (
        lambda t: t.config(head_dim=88),
        1,
        ("a-model (qwen3) has heads of 88 channels", "SGLang alone"),
    ),
    "code of the checkpoint": (
        lambda t: t.config(model_type="mimo_v2_flash", hybrid_layer_pattern=[0, 1, 1, 0]),
        1,
        ("SGLang reads the configuration of a-model (mimo_v2_flash)", "--trust-remote-code"),
    ),
    "an encoder": (
        lambda t: t.config(is_encoder_decoder=True),
        1,
        ("a-model (qwen3) is an encoder-decoder model",),
    ),
    "no config.json": (lambda t: t.remove("config.json"), 1, ("no config.json",)),
    "a broken config.json": (
        lambda t: ((t.model / "config.json").write_text("{") and []) or [],
        1,
        ("config.json is not JSON",),
    ),
    "no weights": (lambda t: t.remove("model.safetensors"), 1, ("no *.safetensors weights",)),
    "a misspelt variable": (
        lambda t: t.environment("SGLANG_OSCAR_K_CLIP", "0.9"),
        2,
        ("no setting is called SGLANG_OSCAR_K_CLIP", "SGLANG_OSCAR_K_CLIP_RATIO"),
    ),
    "another attention backend": (
        lambda t: ["--", "--attention-backend", "flashinfer"],
        2,
        ("--attention-backend does not work with an INT2 KV cache",),
    ),
    "speculative decoding": (
        lambda t: ["--", "--speculative-algo=DFLASH"],  # the engine's parser completes it
        2,
        ("--speculative-algorithm DFLASH does not work",),
    ),
    "a host cache": (
        lambda t: ["--", "--enable_hierarchical_cache"],
        2,
        ("--enable-hierarchical-cache does not work",),
    ),
    "a host cache by its short name": (
        lambda t: ["--", "--enable-hicache"],
        2,
        ("--enable-hierarchical-cache does not work",),
    ),
    "context parallelism": (
        lambda t: ["--", "--attention-context-parallel-size", "2"],
        2,
        ("--attn-cp-size does not work",),
    ),
    "a variable that moves the cache": (
        lambda t: t.environment("SGLANG_USE_HND_KVCACHE", "1"),
        2,
        ("SGLANG_USE_HND_KVCACHE does not work", "Unset SGLANG_USE_HND_KVCACHE"),
    ),
    "a flag that opens a port": (
        lambda t: ["--", "--grpc-port=1"],
        2,
        ("--grpc-port is not allowed",),
    ),
    "more ranks than the CPU has places for": (
        lambda t: [
            *t.environment("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),
            *("--device", "cpu", "--", "--tp=3"),
        ],
        1,
        (
            "the flags need 3 GPUs",
            "here",
            "SGLANG_CPU_OMP_THREADS_BIND names 2 of 3",
            "Leave out --tp",
        ),
    ),
    "more memory than there is": (
        lambda t: ["--", "--mem-fraction-static=8"],
        2,
        ("--mem-fraction-static '8' is no share of the memory", "-- --mem-fraction-static=0.8"),
    ),
    "groups that no row can be cut into": (
        lambda t: ["--", "--oscar-group-size=48"],
        2,
        ("a group size of 48 does not go with", "Use -- --oscar-group-size=64"),
    ),
    "a group size that is no number": (
        lambda t: ["--", "--oscar-group-size=abc"],
        2,
        (
            "--oscar-group-size 'abc': must be a whole number from 1 to 1048576.",
            "For example --oscar-group-size=128",
        ),
    ),
    "a sink below zero": (
        lambda t: ["--", "--oscar-sink-size=-1"],
        2,
        (
            "--oscar-sink-size '-1': must be a whole number from 0 to 1048576.",
            "--oscar-sink-size=64",
        ),
    ),
    "a window of half a token": (
        lambda t: ["--", "--oscar-recent-size=0.5"],
        2,
        ("--oscar-recent-size '0.5': must be a whole number from 1 to 1048576.", "=256"),
    ),
    "sinks of no number of prompts": (
        lambda t: ["--", "--oscar-idle-sinks=many"],
        2,
        ("--oscar-idle-sinks 'many': must be a whole number from 0 to 1048576.", "=16"),
    ),
    "bits of an unknown number of layers": (
        lambda t: ["--", "--oscar-bits=4xx"],
        2,
        ("--oscar-bits '4xx': '4xx' must say how many layers have the value, 1 to 1000", "=4/2"),
    ),
    "a clip ratio that is no number": (
        lambda t: ["--", "--oscar-k-clip=0.9,abc"],
        2,
        ("--oscar-k-clip '0.9,abc': a clip ratio is a number from 0 to 1, not 'abc'.", "=0.96"),
    ),
    "no number of GPUs": (lambda t: ["--", "--tp=many"], 2, ("--tp 'many'",)),
    "a number by the beginning of its flag": (
        lambda t: ["--", "--tensor-parallel=many"],
        2,
        ("--tp 'many'",),
    ),
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
    spoil, code, words = CASES[name]
    line = refusal(table, spoil(table), code)
    for word in words:
        assert word in line, line


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
