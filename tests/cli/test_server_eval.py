"""`oscar-zoo eval --engine sglang` for real: stock SGLang on loopback, the example model, and the
reference."""

from __future__ import annotations

import csv
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from engines import MODEL, environment, needs_sglang
from forked_commands import ForkedCli
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run

LIMIT = 0.005
SAME = 0.0005
"""What float32 leaves between the two."""


@pytest.mark.sglang
@pytest.mark.timeout(900)
@needs_sglang
def test_a_server_agrees_with_this_process(tmp_path: Path) -> None:
    """One server with pages and a prefix cache: perplexity cold and after a hit, and conversations
    that reuse it."""
    (tmp_path / "tmp").mkdir()
    cli = ForkedCli(environment(TMPDIR=str(tmp_path / "tmp"), HF_HUB_OFFLINE="1"), tmp_path)
    artifact = write_folder(tmp_path / "rotation", artifact_files())
    sizes = [
        "--windows=1",
        "--answers=3",
        "--page-size=16",
        "--csv=a.csv",
        "--json",
    ]
    engine = ["--engine", "sglang", *sizes]
    done = cli("eval", str(artifact), "--model", str(MODEL), *engine, timeout=800)
    report = done.json
    assert report.get("schema") == "oscar-zoo.eval-server/1" and report["failures"] == [], report
    (row,) = report["servers"]
    assert (row["chunk"], row["page_size"], row["radix"], row["tensor_parallel"]) == (
        512,
        16,
        True,
        1,
    )
    cold, warm = row["perplexity"], row["perplexity_after_hit"]
    assert abs(cold["deviation"]) < SAME
    assert abs(cold["server"] / cold["exact"] - 1) > LIMIT, (
        "so that a server without quantization would be noticed"
    )
    assert abs(warm["deviation"]) < SAME
    assert abs(warm["server"] / row["perplexity_after_hit_without_sinks"] - 1) > SAME, (
        "lost sinks would be noticed"
    )
    assert row["reused_tokens"] == [report["shared_tokens"]]
    assert row["recall"]["answers"] == 3
    assert (done.code, row["violations"]) == (0, [])
    (line,) = csv.DictReader((tmp_path / "a.csv").open())
    assert float(line["perplexity_server"]) == cold["server"] and line["radix"] == "True"
    assert not list((tmp_path / "tmp").glob("oscar-zoo-*"))


@pytest.mark.parametrize(
    ("arguments", "seen", "code"),
    [
        (["--chunk", "64"], "--chunk needs --engine sglang", 2),
        (["--sweep"], "--sweep needs --engine sglang", 2),
        (["--", "--mem-fraction-static=0.5"], "--mem-fraction-static=0.5 is for an engine", 2),
        (
            ["--engine", "sglang", "--chunk", "100", "--page-size", "16"],
            "chunks of 100 tokens are not whole pages",
            2,
        ),
        (["--engine", "sglang", "--radix", "maybe"], "--radix 'maybe' is not on, off, or both", 2),
        (
            ["--engine", "sglang", "--url", "localhost:3"],
            "'localhost:3' is not the address of a server",
            2,
        ),
        (
            ["--engine", "sglang", "--url", "http://127.0.0.1:9", "--tp", "2"],
            "--url measures a server as it is",
            2,
        ),
        (
            ["--engine", "sglang", "--sweep", "--chunk", "64"],
            "--sweep and --chunk exclude each other",
            2,
        ),
        (["--engine", "sglang", "--csv", "nowhere/a.csv"], "no such folder: nowhere", 3),
        (["--engine", "sglang", "--csv", "/proc/a.csv"], "cannot write /proc/a.csv", 8),
        (["--engine", "sglang", "--", "--tp=2"], "--tp is not allowed after --", 2),
        (["--engine", "sglang", "--", "--host=0.0.0.0"], "--host is not allowed after --", 2),
        (["--engine", "sglang", "--length", "300"], "300 tokens are too few to share a prefix", 2),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    arguments: list[str], seen: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = write_folder(tmp_path / "rotation", artifact_files())
    assert run(["eval", str(artifact), "--model", str(MODEL), *arguments]) == code
    assert seen in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = write_folder(tmp_path / "rotation", artifact_files())
    options = ["--engine", "sglang", "--url", "http://127.0.0.1:9", "--task", "perplexity"]
    assert run(["eval", str(artifact), "--model", str(MODEL), *options]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err


def test_a_server_with_other_settings_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "version": "0.5.21",
        "kv_cache_dtype": "int2",
        "dtype": "float32",
        "device": "cpu",
        "page_size": 1,
    }
    told |= {"chunked_prefill_size": 512, "disable_radix_cache": False, "tp_size": 1}
    told |= {"max_total_num_tokens": 9000, "max_req_input_len": 2042}
    told |= {"internal_states": [{"oscar_int2": {"recipe": {"sink": 64, "recent": 32}}}]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_: object) -> None: ...

    artifact = write_folder(tmp_path / "rotation", artifact_files())
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = [
            "--engine",
            "sglang",
            "--url",
            f"http://127.0.0.1:{server.server_port}",
            "--task",
            "perplexity",
        ]
        assert run(["eval", str(artifact), "--model", str(MODEL), *options]) == 2
        server.shutdown()
    assert "the server has recent 32, the artifact's recipe says 256" in capsys.readouterr().err
