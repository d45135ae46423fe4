"""`oscar-zoo bench serve`: all sides in stock SGLang on the CPU with the example model, and what it
refuses."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_child import Cli
from cli_output import parsed
from engines import MODEL, environment, needs_sglang
from forked_commands import ForkedCli
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan
from oscar_zoo.evaluate.bench import sides

CASES = [(batch, context) for batch in (1, 2) for context in (64,)]
ROOM = 1500
DUMMY = ("--dummy-weights", "tiny-qwen3-hard")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "tmp").mkdir()
    return Cli(environment(TMPDIR=str(tmp_path / "tmp"), HF_HUB_OFFLINE="1"), tmp_path)


@pytest.mark.sglang
@pytest.mark.timeout(600)
@needs_sglang
def test_all_sides_are_measured_over_every_case(cli: Cli) -> None:
    """One engine per side; the last context does not fit into the cache, which is no failure."""
    cli = ForkedCli(cli.environment, cli.folder)
    artifact = write_folder(cli.folder / "rotation", artifact_files())
    options = ["--batch=1,2", "--context=64,2000", "--new-tokens=8", "--repeats=2", "--json"]
    options += ["--job=3x300x8", "--turns=2", "--csv=a.csv", "--plot=a.png"]
    flags = [f"--max-total-tokens={ROOM}"]
    done = cli(
        "bench", "serve", str(artifact), "--model", str(MODEL), *options, "--", *flags, timeout=500
    )
    assert (done.code, done.err) == (0, ""), logs(cli)
    report = done.json
    assert (
        report["weights"] == "loaded"
        and report["device"] == "CPU"
        and report["artifact"]["digest"] != ""
    )
    engines = [side["engine"] for side in report["sides"]]
    backends = [engine["attention_backend"] for engine in engines]
    assert backends == ["torch_native", "torch_native", "oscar_int2"]
    assert [engine["kv_cache_dtype"] for engine in engines] == ["auto", "fp8_e4m3", "int2"]
    for side in report["sides"]:
        check_side(side)
    assert [case["int2_over_bf16"] for case in report["speedup"]] == [None] * 4
    assert set(report["capacity_ratio"].values()) == {None} and "a CPU" in report["not_compared"]
    rows = list(csv.DictReader((cli.folder / "a.csv").open()))
    assert len(rows) == 18 and sum(float(row["ms_per_token"] or 0) > 0 for row in rows) == 6
    check_turns(rows)
    assert report["job"]["requests"] == 3 and len(report["job"]["turn_ratios"]) == 2
    assert (cli.folder / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not list((cli.folder / "tmp").glob("oscar-zoo-*"))


def check_side(side: dict[str, Any]) -> None:
    assert side["error"] is None and side["capacity_tokens"] == ROOM and side["start_s"] > 0
    fits = [case for case in side["cases"] if case["note"] is None]
    assert [(case["batch"], case["context"]) for case in fits] == CASES
    for case in fits:
        assert 0 < case["ttft_median_s"] <= case["ttft_s"] and case["ms_per_token"] > 0
        # no token is generated faster than all at once
        assert 0 < case["tokens_per_second"] < 1e6
        low, high = case["spread"]["ms_per_token"]
        assert case["repeats"] == 2 and 0 < low <= case["ms_per_token"] <= high
    refused = [case["note"] for case in side["cases"] if case["note"] is not None]
    assert refused == [f"needs {n:,} tokens, the cache has {ROOM:,}" for n in (2008, 4016)]


def check_turns(rows: list[dict[str, str]]) -> None:
    """The prompts of the second turn begin with those of the first and their answers, and these are
    reused."""
    turns = [row for row in rows if row["job_turn"]]
    assert [(row["cache"], row["job_turn"], row["context"]) for row in turns] == [
        (cache, turn, context)
        for cache in ("bf16", "fp8", "int2")
        for turn, context in (("1", "300"), ("2", "372"))
    ]
    assert all(float(row["job_s"]) > 0 for row in turns)
    reused = {(row["cache"], row["job_turn"]): float(row["job_reused"]) for row in turns}
    assert reused["bf16", "1"] == reused["fp8", "1"] == reused["int2", "1"] == 0
    # An engine may stop before it caches the last token. With INT2 the ring of the first turn is
    # taken over, so its window is not prefilled again.
    assert all(307 / 372 <= reused[cache, "2"] <= 308 / 372 for cache in ("bf16", "fp8"))
    assert 306 / 372 <= reused["int2", "2"] <= 307 / 372


@pytest.mark.sglang
@needs_sglang
def test_ctrl_c_stops_at_once_and_leaves_nothing(cli: Cli) -> None:
    child = cli.start("bench", "serve", *DUMMY, "--batch=1", "--context=64")
    log = cli.folder / "state" / "logs" / "bench-bf16.log"
    try:
        deadline = time.monotonic() + 300
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=300)
    finally:
        child.kill()
    assert (child.returncode, out) == (130, "")
    assert "interrupted" in err and "Traceback" not in err
    assert not list((cli.folder / "tmp").glob("oscar-zoo-*"))
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(cli.folder) not in left


STAND_IN = """
import json, os, sys, time
job = json.loads(open(sys.argv[1]).read())
said = [{"up": 1.0, "sglang": "0.5.21", "capacity": 99, "engine": {}}]
done = {"case": job["cases"][0], "arrivals": [[[0.1 * (i + 1), i + 1] for i in range(9)]]}
said += [done] * (1 if "int2" in sys.argv[1] else job["repeats"])
said += [{"done": True}] if "int2" not in sys.argv[1] else []
open(job["news"], "a").write("".join(json.dumps(item) + "\\n" for item in said))
if "int2" in sys.argv[1]:
    os.kill(os.getppid(), int(sys.argv[2]))
time.sleep(60)
"""
"""In place of an engine: every side measures a case; that of INT2 sends a signal to its parent
after the first repeat."""


@needs_sglang
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_keeps_every_repeat_that_was_measured(
    number: signal.Signals,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(side: object, engines: object, place: Path, environ: dict[str, str]) -> LaunchPlan:
        program = (sys.executable, "-P", "-c", STAND_IN, str(place), str(int(number)))
        return LaunchPlan(program, dict(environ), "")

    monkeypatch.setattr(sides, "command", command)
    table = tmp_path / "a.csv"
    options = ["--cases=1x64,1X128", "--device=cpu", f"--csv={table}"]
    assert run(["bench", "serve", *DUMMY, *options]) == 128 + number
    out, err = capsys.readouterr()
    assert out.count("100.00 ms ±0.0 %") == 2 and out.count("100.00 ms") == 3
    assert "INT2 1 x 64: measured 1 of 3 times" in out
    told = f"stopped by {name} (INT2: the case 1 x 64, repeat 2 of 3 was interrupted); what was"
    assert told in err
    rows = list(csv.DictReader(table.open()))
    assert [(row["context"], bool(row["ms_per_token"])) for row in rows] == 3 * [
        ("64", True),
        ("128", False),
    ]
    assert [row["repeats"] for row in rows] == ["3", "0", "3", "0", "1", "0"]


REMOVES_ITS_FOLDER = STAND_IN.replace(
    'if "int2" not in sys.argv[1] else []', "; import shutil; shutil.rmtree(sys.argv[3], True)"
).replace("time.sleep(60)", "")


@needs_sglang
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_result_is_printed_before_it_cannot_be_saved(
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def command(side: object, engines: object, place: Path, environ: dict[str, str]) -> LaunchPlan:
        program = (sys.executable, "-P", "-c", REMOVES_ITS_FOLDER, str(place), "0", str(folder))
        return LaunchPlan(program, dict(environ), "")

    monkeypatch.setattr(sides, "command", command)
    files = [f"--csv={folder / 'a.csv'}", f"--plot={folder / 'a.png'}"]
    options = ["--batch=1", "--context=64", "--device=cpu", *files, *more]
    assert run(["bench", "serve", *DUMMY, *options]) == 1
    out, err = capsys.readouterr()
    if more:
        assert [len(side["cases"]) for side in parsed(out)["sides"]] == [1, 1, 1]
    else:
        assert out.count("100.00 ms") == 3
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and all("cannot write" in line for line in errors)


@pytest.mark.parametrize(
    ("arguments", "seen", "code"),
    [
        ([], "nothing to measure was named. Give an artifact, or --dummy-weights Qwen3-8B", 2),
        ([*DUMMY, "--model", "m"], "--model and --dummy-weights exclude each other", 2),
        ([*DUMMY, "--batch", "1,x"], "--batch '1,x' is not a list of whole numbers", 2),
        ([*DUMMY, "--context", ",".join(map(str, range(1, 40)))], "78 cases are more than 64", 2),
        ([*DUMMY, "--cases", "1x8", "--batch", "2"], "--cases takes the place of --batch", 2),
        ([*DUMMY, "--repeats", "0"], "--repeats", 2),
        ([*DUMMY, "--cases", "1x8,16"], "is not a list of batches and contexts", 2),
        ([*DUMMY, "--turns", "2"], "--turns needs a job.", 2),
        ([*DUMMY, "--caches", "bf16,fp4"], "--caches 'bf16,fp4' is not a list of caches", 2),
        ([*DUMMY, "--baseline", "fa3,"], "--baseline '' is not the name of an attention", 2),
        ([*DUMMY, "--", "--kv-cache-dtype=fp8_e4m3"], "use --caches", 2),
        ([*DUMMY, "--job", "64x30000"], "--job '64x30000' is not REQUESTSxPROMPTxANSWER", 2),
        ([*DUMMY, "--job", "200x9x9", "--turns", "2"], "200 conversations are more than 128", 2),
        ([*DUMMY, "--plot", "a.pdf"], "--plot a.pdf is not a PNG file", 2),
        ([*DUMMY, "--csv", "nowhere/a.csv"], "no such folder: nowhere", 3),
        ([*DUMMY, "--plot", "/proc/a.png"], "cannot write /proc/a.png", 8),
        ([*DUMMY, "--", "--tp", "2", "--host=0.0.0.0"], "--host is not allowed", 2),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], seen: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["bench", "serve", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and seen in err


@needs_sglang
@pytest.mark.parametrize(
    ("arguments", "seen", "code"),
    [
        (["--dummy-weights", "Qwen3-30B-A3B"], "does not know all shapes of Qwen3-30B-A3B", 2),
        (["--dummy-weights", "org/model"], "the shapes of org/model are not known here", 2),
        (["--dummy-weights", "./examples"], "examples has no config.json", 1),
        (
            ["FOLDER", "--model", str(MODEL)],
            "tiny-qwen3-hard reads up to 2,048 tokens, 30,096 are wanted",
            2,
        ),
        (["FOLDER", *DUMMY, "--dummy-weights", "Qwen3-8B", "--device=cpu"], "head_dim", 1),
    ],
)
def test_subjects_that_cannot_be_measured_are_one_line(
    arguments: list[str],
    seen: str,
    code: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(MODEL.parents[2])
    folder = write_folder(tmp_path / "rotation", artifact_files())
    assert (
        run(["bench", "serve", *[str(folder) if word == "FOLDER" else word for word in arguments]])
        == code
    )
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and seen in err


def logs(cli: Cli) -> str:
    return "\n".join(
        path.read_text()[-3000:] for path in (cli.folder / "state" / "logs").glob("*.log")
    )
