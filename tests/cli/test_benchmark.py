"""`oscar-zoo eval` by servers: benchmarks with both caches, a killed command, what is refused, and
the perplexity of a server beside the reference."""

import csv
import gzip
import json
import math
import os
import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_child import Cli as Child
from cli_output import Cli
from engines import MODEL, environment, needs_sglang
from forked_commands import ForkedCli
from scripted_chat import ScriptedChat

from oscar_zoo.errors import ServerFailed
from oscar_zoo.evaluate.benchmarks import suite
from oscar_zoo.registry.score_file import ScoreFile

needs_harness = pytest.mark.usefixtures("harness")
LETTERS = "oats"
QUESTIONS = 4
SAME = 0.0005
"""What float32 leaves between a server and the reference."""


@pytest.fixture
def harness() -> None:
    pytest.importorskip("lm_eval", reason="make install puts it there")


@pytest.fixture
def forked(tmp_path: Path) -> ForkedCli:
    (tmp_path / "tmp").mkdir()
    return ForkedCli(environment(TMPDIR=str(tmp_path / "tmp"), HF_HUB_OFFLINE="1"), tmp_path)


def letter_rows(number: int) -> list[dict[str, str]]:
    """Questions whose choices are letters, which any text holds; the last one counts."""
    rows = []
    for at in range(number):
        right, *wrong = LETTERS[at % 4 :] + LETTERS[: at % 4]
        row = {"Question": f"Name letter {at}.", "Correct Answer": right}
        rows.append(row | {f"Incorrect Answer {i}": one for i, one in enumerate(wrong, 1)})
    return rows


def judged(rows: list[dict[str, str]], texts: list[str]) -> list[float]:
    """Right or wrong, by what the harness documents for `flexible-extract`.

    The last `(X)` counts, else the last choice that the text mentions. Choices are in the order in
    which GPQA's task shuffles them.
    """
    random.seed(0)
    found = []
    for row, text in zip(rows, texts, strict=True):
        choices = [row[f"Incorrect Answer {i}"] for i in (1, 2, 3)] + [row["Correct Answer"]]
        random.shuffle(choices)
        right = "ABCD"[choices.index(row["Correct Answer"])]
        letters = re.findall(r"\(([A-Z])\)", text)
        mentioned = re.findall(f"[{LETTERS}]", text.lower())
        said = letters[-1] if letters else None
        if not letters and mentioned:
            said = "ABCD"[choices.index(mentioned[-1])]
        found.append(float(said == right))
    return found


def kept_texts(path: Path, arm: str, seed: int, questions: list[str]) -> list[str]:
    """The kept texts of one repeat in the order of the questions, which the answers do not name:
    they are in the order in which one question at a time was asked."""
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[1:]]
    texts = [
        line["answer"]["text"]
        for line in lines
        if (line["key"]["arm"], line["key"]["seed"]) == (arm, seed)
    ]
    assert len(texts) == len(questions)
    return texts


@pytest.mark.sglang
@needs_sglang
@needs_harness
def test_two_servers_are_compared(forked: ForkedCli, artifact: Path, tmp_path: Path) -> None:
    """Stock SGLang with both caches; the record is recomputed from the kept answers."""
    rows = letter_rows(QUESTIONS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--seeds=2", "--temperature=0.8", "--max-new-tokens=4", "--concurrency=1"]
    done = forked(
        *("eval", str(artifact), "--model", str(MODEL), "--task", "gpqa_main"),
        *("--data=rows.jsonl", "--output=scores.json", "--json", *options),
        timeout=800,
    )
    assert done.code == 0, done.err
    (task,) = done.json["tasks"]
    record = ScoreFile.from_bytes((tmp_path / "scores.json").read_bytes())
    (score,) = record.scores
    assert task["scores"] == [score.model_dump(mode="json")]
    assert score.kv_dtype == "int2" and score.task == "gpqa_main" and score.n == QUESTIONS
    assert score.seeds == (0, 1)
    assert score.tokens is not None and 0 < score.tokens.completion <= 4 * 2 * QUESTIONS
    assert score.exhausted_rate is not None and score.baseline is not None
    assert score.baseline.kv_dtype == "bf16" and score.paired is not None
    kept = Path(task["answers"])
    means: dict[str, list[float]] = {}
    for arm, one in (("int2", score), ("bf16", score.baseline)):
        repeats = [
            judged(rows, kept_texts(kept, arm, seed, [row["Question"] for row in rows]))
            for seed in (0, 1)
        ]
        means[arm] = [sum(pair) / 2 for pair in zip(*repeats, strict=True)]
        p = sum(means[arm]) / QUESTIONS
        spread = sum((m - p) ** 2 for m in means[arm]) / (QUESTIONS * (QUESTIONS - 1))
        error = max(math.sqrt(spread), math.sqrt(p * (1 - p) / (2 * QUESTIONS)))
        assert one.value == pytest.approx(100 * p, abs=1e-3)
        assert one.stderr == pytest.approx(100 * error, abs=1e-3)
        assert one.values == pytest.approx([100 * sum(r) / QUESTIONS for r in repeats], abs=1e-3)
    difference = (sum(means["int2"]) - sum(means["bf16"])) / QUESTIONS
    assert score.paired.difference == pytest.approx(100 * difference, abs=1e-3)
    assert not list((tmp_path / "tmp").glob("oscar-zoo-*")), "private folders are gone"


@needs_harness
def test_a_killed_command_goes_on_where_it_stopped(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The record is that of a command that was not killed, and no question is asked twice."""

    def finish(state: Path) -> bytes:
        monkeypatch.setenv("OSCAR_ZOO_STATE", str(state))
        return Path(json.loads(cli(0, *command))["file"]).read_bytes()

    with ScriptedChat("int2") as int2, ScriptedChat("auto") as bf16:
        command = [
            *("eval", str(artifact), "--model", str(MODEL), "--task", "sample", "--limit", "8"),
            *("--temperature", "0.6", "--seeds", "2", "--concurrency", "2", "--json"),
            *("--url", int2.url, "--base-url", bf16.url),
        ]
        whole = finish(tmp_path / "whole")
        assert (len(int2.asked), len(bf16.asked)) == (16, 16)
        bf16.silent_after = 16 + 5
        child = Child(dict(os.environ), tmp_path).start(*command)
        while len(bf16.asked) <= bf16.silent_after and child.poll() is None:
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.communicate()
        bf16.silent_after = math.inf
        assert finish(tmp_path / "state") == whole
        again = len(bf16.asked) - 2 * 16
        assert len(int2.asked) == 2 * 16 and 0 <= again <= 2, "those that were on their way"
    assert json.loads(whole)["scores"][0]["exhausted_rate"] > 0


@needs_harness
def test_the_table_and_the_remarks(artifact: Path, tmp_path: Path, cli: Cli) -> None:
    with ScriptedChat("int2") as int2, ScriptedChat("auto") as bf16:
        given = ["--url", int2.url, "--base-url", bf16.url, "--output", str(tmp_path / "s.json")]
        ask = ["--task", "sample", "--temperature", "0.6", "--top-p", "0.9", "--no-thinking"]
        out = cli(0, "eval", artifact, "--model", MODEL, *ask, *given)
        body = int2.asked[0]
    assert re.search(r"sample +40 x 3 +\d+\.\d ± \d+\.\d +INT2 +\d+\.\d ± \d+\.\d", out)
    assert re.search(r"INT2 is at most \d+\.\d points\s+worse than BF16, with 95 %", out)
    assert f"Scores: {tmp_path / 's.json'}" in out
    assert "the generation cap cut" in cli.err
    assert (body["temperature"], body["top_p"], body["seed"]) == (0.6, 0.9, 0)
    assert body["chat_template_kwargs"]["enable_thinking"] is False
    assert body["max_tokens"] == int(0.8 * 2048), "four fifths of the model's context"
    (score,) = ScoreFile.from_bytes((tmp_path / "s.json").read_bytes()).scores
    assert score.thinking is False and score.hardware is None


@needs_harness
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--task", "sample", "--seeds", "2"], 2),
        (["--task", "gsm8k", "--data", "none.jsonl"], 3),
        (["--task", "sample", "--url", "http://127.0.0.1:9"], 1),
    ],
)
def test_what_cannot_be_asked_is_refused(
    words: list[str], code: int, artifact: Path, cli: Cli
) -> None:
    cli.refused(code, "eval", artifact, "--model", MODEL, *words)


@needs_harness
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), ServerFailed("it died.")])
def test_an_early_end_keeps_answers(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    from oscar_zoo.evaluate.benchmarks import harness

    def ended(*_: object, **__: object) -> Any:
        raise error

    notes: list[str] = []
    observer: Any = SimpleNamespace(advance=lambda *_: None, note=lambda n: notes.append(n.text))
    monkeypatch.setattr(harness, "run_arm", ended)
    given = dict.fromkeys(("task", "settings", "answers"))
    one: Any = SimpleNamespace(**given, place=Path("a"), requests=1)
    with pytest.raises(type(error)) as raised:
        suite.ask_one("int2", one, None, "label", observer)  # type: ignore[arg-type]
    (said,) = notes or raised.value.__notes__
    assert said.startswith("answers until now are kept")


@needs_harness
def test_servers_with_the_wrong_cache_are_refused(artifact: Path, cli: Cli) -> None:
    ask = ["eval", artifact, "--model", MODEL, "--task", "sample"]
    with ScriptedChat("auto") as server:
        assert "has a cache of auto, not of INT2" in cli.refused(2, *ask, "--url", server.url)


@pytest.mark.sglang
@needs_sglang
def test_a_server_agrees_with_this_process(forked: ForkedCli, artifact: Path) -> None:
    """One server with pages and a prefix cache: perplexity cold and after a hit, and conversations
    that reuse it. What it differs by without quantization, and without sinks, would be noticed."""
    engine = ["--engine", "sglang", "--windows=1", "--answers=3", "--page-size=16", "--csv=a.csv"]
    done = forked("eval", str(artifact), "--model", str(MODEL), *engine, "--json", timeout=800)
    report = done.json
    assert report.get("schema") == "oscar-zoo.eval-server/1" and report["failures"] == [], report
    (row,) = report["servers"]
    told = [row[name] for name in ("chunk", "page_size", "radix", "tensor_parallel")]
    assert told == [512, 16, True, 1]
    cold, warm = row["perplexity"], row["perplexity_after_hit"]
    assert max(abs(cold["deviation"]), abs(warm["deviation"])) < SAME
    assert abs(cold["server"] / cold["exact"] - 1) > 10 * SAME
    assert abs(warm["server"] / row["perplexity_after_hit_without_sinks"] - 1) > SAME
    assert row["reused_tokens"] == [report["shared_tokens"]]
    assert row["recall"]["answers"] == 3
    assert (done.code, row["violations"]) == (0, [])
    (line,) = csv.DictReader((forked.folder / "a.csv").open())
    assert float(line["perplexity_server"]) == cold["server"] and line["radix"] == "True"
    assert not list((forked.folder / "tmp").glob("oscar-zoo-*"))
