"""`oscar-zoo serve --engine vllm` runs stock vLLM behind our front."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli
from served_model import fitted
from tiny_models import EXAMPLE

import oscar_zoo
from oscar_zoo.engines.metrics import METRICS, PREFIX
from oscar_zoo.engines.sglang.launch.plan import free_port
from oscar_zoo.engines.vllm import command
from oscar_zoo.engines.vllm.client import VllmClient
from oscar_zoo.errors import ServerFailed
from oscar_zoo.evaluate.benchmarks.answers import ask as ask_one
from oscar_zoo.serving import servers
from oscar_zoo.serving.records import client_of

VLLM, CHILD = Path(sys.prefix) / "vllm", Path(__file__).with_name("vllm_child.py")
MODEL = str(EXAMPLE)
FLAGS = (
    "--max-model-len=2048", "--max-num-seqs=3", "--block-size=32", "--dtype=float32",
    "--enforce-eager", "--kv-cache-memory-bytes=8388608",
)  # fmt: skip
OURS = rf"^{PREFIX}(\w+)\{{.*\}} (\S+)$"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed beside"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fitted(tmp_path_factory.mktemp("made") / "rotation")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is not where this process has its packages, and a CPU needs the stand-ins."""
    monkeypatch.syspath_prepend(str(VLLM))
    for name in ("PROGRAM", "OFFLINE"):
        monkeypatch.setattr(command, name, (str(CHILD), *getattr(command, name)))


def ask(url: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_server_of_vllm(cli: Cli, folder: Path) -> None:
    port, asked = free_port(), ("eval", folder, "--model", MODEL, "--engine", "vllm")
    cli.refused(2, *asked)
    with oscar_zoo.serve(
        folder, model=MODEL, engine="vllm", port=port, device="cpu", flags=FLAGS, require_key=True,
    ) as server:  # fmt: skip
        facts = server.facts
        assert (facts.engine, facts.version, facts.requests) == ("vllm", "0.33.0", 3)
        assert facts.capacity > 10_000 and facts.context == 2048
        assert facts.key_file is not None
        key = {"Authorization": f"Bearer {facts.key_file.read_text('utf-8').strip()}"}
        body = {"model": facts.model_id, "prompt": [5, 6, 7, 8], "max_tokens": 4}
        assert ask(f"{facts.url}/completions", body)[0] == 401
        status, answer = ask(f"{facts.url}/completions", body, **key)
        assert status == 200 and answer["usage"]["completion_tokens"] == 4
        assert ask(f"{facts.url}/completions", body | {"vllm_xargs": {}}, **key)[0] == 400
        for closed in ("collective_rpc", "v1/load_lora_adapter", "server_info", "pause"):
            assert ask(f"http://127.0.0.1:{port}/{closed}", {}, **key)[0] == 404
        assert ask(f"{facts.url}/models", None, Host="rebound.example")[0] == 403
        (shown,) = servers.ps().servers
        assert (shown.port, shown.state, shown.engine) == (port, "ready", "vllm")
        line = (*asked, "--url", facts.url.removesuffix("/v1"))
        few = ("--length", "1920", "--windows", "1", "--answers", "3")
        (row,) = cli.json(0, *line, *few)["servers"]
        assert row["engine"] == "vLLM 0.33.0" and row["violations"] == []
        few = ("--task", "sample", "--limit", "2", "--max-new-tokens", "8", "--temperature", "0")
        (score,) = cli.json(0, *line, *few)["tasks"][0]["scores"]
        assert (score["n"], score["engine"]["name"]) == (2, "vllm")
        client: Any = VllmClient.instead_of(client_of(facts.url.removesuffix("/v1")), asked=True)
        scored: Any = ask_one(client, {"context": "One two three", "continuation": " four five"})
        assert scored.log_probability < 0
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answered:
            rows = re.findall(OURS, answered.read().decode(), re.MULTILINE)
        told = {name: float(value) for name, value in rows}
        assert told["capacity_tokens"] == facts.capacity and told["used_ring_rows"] == 0
        assert told["capacity_ring_rows"] == 3 and told["bits_per_element"] == facts.bits
        assert told["sink_hits_total"] > 0 == told["sink_misses_total"]
        assert told.keys() - {name for name in told if name.endswith("_created")} <= {*METRICS}
        perplexity = row["perplexity"]
        assert abs(perplexity["server"] / perplexity["reference"] - 1) < 1e-5
    assert not servers.ps().servers


def test_a_comparison_in_vllm(cli: Cli, folder: Path) -> None:
    line = ("bench", "serve", folder, "--model", MODEL, "--engine", "vllm", "--device", "cpu")
    cases = ("--cases", "2x100", "--new-tokens", "8", "--repeats", "1", "--caches", "int2")
    cli.refused(2, *line, "--", "--attention-backend=FLASH_ATTN")
    (side,) = cli.json(0, *line, *cases, "--", *FLAGS)["sides"]
    assert (side["error"], side["vllm"], side["sglang"]) == (None, "0.33.0", None)
    assert side["capacity_tokens"] > 10_000 and side["engine"]["kv_cache_dtype"] == "oscar_int2"
    assert side["cases"][0]["repeats"] == 1 and side["cases"][0]["ttft_s"] > 0


def test_the_cause_of_a_failed_start(folder: Path) -> None:
    """What stands in vLLM's log behind names of processes and times."""
    with pytest.raises(ServerFailed) as failed:
        oscar_zoo.serve(
            folder, model=MODEL, engine="vllm", port=free_port(), device="cpu",
            flags=(*FLAGS, "--max-model-len=999999"),
        )  # fmt: skip
    assert "999999" in failed.value.message
