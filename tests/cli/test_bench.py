"""`oscar-zoo bench serve` and `bench load`: all sides and a loaded server in stock SGLang on the
CPU, signals, the device, and subjects that cannot be measured."""

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cli_output import Cli, parsed
from engines import MODEL, environment, needs_sglang
from forked_commands import ForkedCli, running_in

from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan
from oscar_zoo.errors import ServerFailed
from oscar_zoo.evaluate.bench import measuring, sides
from oscar_zoo.evaluate.bench.load import FreeTokens, Load, LoadReport
from oscar_zoo.models import hardware

CASES = [(batch, context) for batch in (1, 2) for context in (64,)]
ROOM = 1500
DUMMY = ("--dummy-weights", "tiny-qwen3-hard")


@pytest.fixture
def forked(tmp_path: Path) -> ForkedCli:
    """Commands whose processes have a folder of their own for temporary files."""
    (tmp_path / "tmp").mkdir()
    return ForkedCli(environment(TMPDIR=str(tmp_path / "tmp"), HF_HUB_OFFLINE="1"), tmp_path)


def left_in(cli: ForkedCli) -> list[Path]:
    return list((cli.folder / "tmp").glob("oscar-zoo-*"))


@pytest.mark.sglang
@needs_sglang
def test_all_sides_are_measured_over_every_case(forked: ForkedCli, artifact: Path) -> None:
    """One engine per side; the last context does not fit into the cache, which is no failure."""
    cli = forked
    options = ["--batch=1,2", "--context=64,2000", "--new-tokens=8", "--repeats=2", "--json"]
    options += ["--job=3x300x8", "--turns=2", "--csv=a.csv", "--plot=a.png"]
    flags = [f"--max-total-tokens={ROOM}"]
    done = cli(
        "bench", "serve", str(artifact), "--model", str(MODEL), *options, "--", *flags, timeout=500
    )
    assert (done.code, done.err) == (0, ""), done.out
    report = done.json
    assert report["weights"] == "loaded" and report["device"] == "CPU"
    assert report["artifact"]["digest"] != ""
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
    assert left_in(cli) == []


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
def test_ctrl_c_stops_at_once_and_leaves_nothing(forked: ForkedCli) -> None:
    cli = forked
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
    assert left_in(cli) == []
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


REMOVES_ITS_FOLDER = STAND_IN.replace(
    'if "int2" not in sys.argv[1] else []', "; import shutil; shutil.rmtree(sys.argv[3], True)"
).replace("time.sleep(60)", "")
Stand = Callable[..., None]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Puts a program in place of every engine."""

    def put(program: str, *words: object) -> None:
        def command(side: object, engines: object, place: Path, env: dict[str, str]) -> LaunchPlan:
            argv = (sys.executable, "-P", "-c", program, str(place), *map(str, words))
            return LaunchPlan(argv, dict(env), "")

        monkeypatch.setattr(sides, "command", command)

    return put


@needs_sglang
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_keeps_every_repeat_that_was_measured(
    number: signal.Signals, name: str, tmp_path: Path, stand_in: Stand, cli: Cli
) -> None:
    stand_in(STAND_IN, int(number))
    table = tmp_path / "a.csv"
    options = ["--cases=1x64,1X128", "--device=cpu", f"--csv={table}"]
    out = cli(128 + number, "bench", "serve", *DUMMY, *options)
    assert out.count("100.00 ms ±0.0 %") == 2 and out.count("100.00 ms") == 3
    assert "INT2 1 x 64: measured 1 of 3 times" in out
    assert f"stopped by {name} (INT2: the case 1 x 64, repeat 2 of 3 was interrupted)" in cli.err
    rows = list(csv.DictReader(table.open()))
    cases = [(row["context"], bool(row["ms_per_token"])) for row in rows]
    assert cases == 3 * [("64", True), ("128", False)]
    assert [row["repeats"] for row in rows] == ["3", "0", "3", "0", "1", "0"]


@needs_sglang
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_result_is_printed_before_it_cannot_be_saved(
    more: list[str], tmp_path: Path, stand_in: Stand, cli: Cli
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    stand_in(REMOVES_ITS_FOLDER, 0, folder)
    files = [f"--csv={folder / 'a.csv'}", f"--plot={folder / 'a.png'}"]
    options = ["--batch=1", "--context=64", "--device=cpu", *files, *more]
    out = cli(1, "bench", "serve", *DUMMY, *options)
    if more:
        assert [len(side["cases"]) for side in parsed(out)["sides"]] == [1, 1, 1]
    else:
        assert out.count("100.00 ms") == 3
    errors = [line for line in cli.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and all("cannot write" in line for line in errors)


@needs_sglang
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--dummy-weights", "Qwen3-30B-A3B"], 2),
        (["--dummy-weights", "org/model"], 2),
        (["--dummy-weights", "./examples"], 3),
        (["ARTIFACT", "--model", MODEL], 2),
        (["ARTIFACT", "--dummy-weights", "Qwen3-8B", "--device=cpu"], 1),
    ],
)
def test_subjects_that_cannot_be_measured_are_one_line(
    words: list[str], code: int, cli: Cli, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MODEL.parents[2])
    cli.refused(code, "bench", "serve", *[artifact if x == "ARTIFACT" else x for x in words])


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(hardware, "default_device", lambda: "cpu")
    monkeypatch.setattr(hardware, "available_ram", lambda: 32 * 10**9)
    monkeypatch.setattr(server, "_start", started)
    monkeypatch.setattr(measuring, "require_serve", lambda: None)


@pytest.mark.parametrize(
    "command", [("bench", "serve", "--cases", "1x64"), ("bench", "load", "--clients", "2")]
)
@pytest.mark.usefixtures("without_gpu")
def test_a_large_model_needs_a_named_device_and_room(command: tuple[str, ...], cli: Cli) -> None:
    large = (*command, "--dummy-weights", "Qwen3-8B")
    assert "--device cpu" in cli.refused(1, *large)
    assert "Qwen3-8B needs" in cli.refused(1, *large, "--device", "cpu")


@pytest.mark.parametrize(("device", "told"), [([], True), (["--device", "cpu"], False)])
@pytest.mark.usefixtures("without_gpu")
def test_a_model_without_weights_on_a_cpu_nobody_named_is_remarked_on(
    device: list[str], told: bool, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def measured(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "_measure_all", measured)
    cli(130, "bench", "serve", *DUMMY, *device)
    assert ("no GPU was found" in cli.err) == told


@pytest.mark.sglang
@needs_sglang
def test_a_server_holds_under_load_and_cuts_nobody_off(forked: ForkedCli, artifact: Path) -> None:
    # Short windows, so that prompts of 200 tokens reach INT2, and few slots, so that prefixes are
    # evicted.
    flags = ["--oscar-sink-size=16", "--oscar-recent-size=32", "--max-total-tokens=1500"]
    flags += ["--max-running-requests=4"]
    sizes = ["--clients=8", "--seconds=3", "--context=200", "--new-tokens=16", "--aborts=0.4"]
    words = ("bench", "load", str(artifact), "--model", str(MODEL), *sizes, "--json", "--", *flags)
    done = forked(*words, timeout=800)
    report = done.json
    assert (done.code, report.get("violations"), report.get("errors")) == (0, [], {}), done.err
    assert report["finished"] > 0 and report["aborted"] > 0
    assert report["new_tokens"] > report["finished"]
    assert report["free_tokens"] == {"before": [1500], "after": [1500]}
    assert report["same_answers"] and report["host_memory"]["peak"] > 100e6
    drain = report["drain"]
    assert drain["running"] == drain["finished"] == 8 and drain["ended"]
    assert not running_in(forked.folder) and left_in(forked) == []


@pytest.mark.parametrize(("name", "called"), [("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM")])
def test_what_a_signal_left_is_shown(
    name: Any, called: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    left = LoadReport(Load(8, 600, 200, 16, 0.4), "m", 41.0, 1, new_tokens=5, stopped=name)
    left.free_tokens = FreeTokens((1500,))
    monkeypatch.setattr(measuring, "load", lambda *_: left)
    code = 128 + signal.Signals[name]
    facts = parsed(cli(code, "bench", "load", "any", "--json"))
    line = cli.err
    assert (facts["stopped"], facts["finished"]) == (name, 1)
    assert line.startswith(f"error: stopped by {called} after 41 s") and line.count("\n") == 1
    assert "1 finished, 0 hung up" in cli(code, "bench", "load", "any") and cli.err == line


SIZES = ("ARTIFACT", "--model", str(MODEL), "--context=200", "--new-tokens=16")
COMMANDS = {
    "eval": ["eval", "ARTIFACT", "--model", str(MODEL), "--engine", "sglang", "--windows=1"],
    "load": ["bench", "load", *SIZES],
    "serve": ["bench", "serve", *SIZES],
}


@pytest.mark.sglang
@needs_sglang
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("device", "number"), [("cuda", None), ("cuda:3", "3")])
def test_the_engine_starts_on_the_gpu_that_was_named(
    name: str,
    device: str,
    number: str | None,
    cli: Cli,
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []

    def running(plan: Any, log: Path) -> NoReturn:
        job = Path(plan.argv[-1])  # the flags of `bench serve` are in a file
        started.append(json.loads(job.read_text())["arguments"] if job.is_file() else plan.argv)
        raise ServerFailed("this machine has no such GPU")

    monkeypatch.setattr(hardware, "check_gpu", lambda number: None)
    monkeypatch.setattr(server, "running", running)
    words = [artifact if word == "ARTIFACT" else word for word in COMMANDS[name]]
    cli(1, *words, "--device", device)
    assert len(started) == (3 if name == "serve" else 1)
    for flags in started:
        given = dict(x.split("=", 1) for x in flags if x.startswith("--") and "=" in x)
        assert given.get("--base-gpu-id") == number
        if name == "eval":
            assert 0 < int(given["--max-total-tokens"]) < 1_000_000, "it must not take a whole GPU"
