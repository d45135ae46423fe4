"""`oscar-zoo eval --engine sglang` for real: stock SGLang on loopback, the example model, and the
reference."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from engines import MODEL, environment, needs_sglang
from forked_commands import ForkedCli
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run

LIMIT = 0.005
SGLANG = ("--engine", "sglang")
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
    engine = [*SGLANG, "--windows=1", "--answers=3", "--page-size=16", "--csv=a.csv", "--json"]
    done = cli("eval", str(artifact), "--model", str(MODEL), *engine, timeout=800)
    report = done.json
    assert report.get("schema") == "oscar-zoo.eval-server/1" and report["failures"] == [], report
    (row,) = report["servers"]
    told = [row[name] for name in ("chunk", "page_size", "radix", "tensor_parallel")]
    assert told == [512, 16, True, 1]
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
        (["--", "--mem-fraction-static=0.5"], "--mem-fraction-static=0.5 is for an engine", 2),
        ([*SGLANG, "--chunk", "100", "--page-size", "16"], "are not whole pages", 2),
        ([*SGLANG, "--radix", "maybe"], "--radix 'maybe' is not on, off, or both", 2),
        ([*SGLANG, "--url", "localhost:3"], "'localhost:3' is not the address of a server", 2),
        ([*SGLANG, "--url", "http://127.0.0.1:9", "--tp", "2"], "--url measures a server", 2),
        ([*SGLANG, "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer", 1),
        ([*SGLANG, "--sweep", "--chunk", "64"], "--sweep and --chunk exclude each other", 2),
        ([*SGLANG, "--csv", "nowhere/a.csv"], "no such folder: nowhere", 3),
        ([*SGLANG, "--", "--tp=2"], "--tp is not allowed after --", 2),
        ([*SGLANG, "--", "--host=0.0.0.0"], "--host is not allowed after --", 2),
        ([*SGLANG, "--length", "300"], "300 tokens are too few to share a prefix", 2),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    arguments: list[str], seen: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = write_folder(tmp_path / "rotation", artifact_files())
    assert run(["eval", str(artifact), "--model", str(MODEL), *arguments]) == code
    assert seen in capsys.readouterr().err
