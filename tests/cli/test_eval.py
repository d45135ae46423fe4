"""`oscar-zoo eval` and `ruler` in this process: what options mean, rows for several windows, clips
and alternatives, and the same from Python."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli, check, parsed
from tiny_models import EXAMPLE, write_model

import oscar_zoo
from oscar_zoo.artifact.specs import Clip
from oscar_zoo.cli.commands.eval import TEXT_TASKS
from oscar_zoo.cli.main import run
from oscar_zoo.cli.render.evaluation import print_bits
from oscar_zoo.engines.sglang.launch.variants import ServerVariant
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate import in_process, servers
from oscar_zoo.evaluate.against_table import ALL, TABLE
from oscar_zoo.evaluate.benchmarks import suite
from oscar_zoo.evaluate.benchmarks.tasks import NAMES
from oscar_zoo.evaluate.outcome import EvalRow
from oscar_zoo.evaluate.params import CACHES, EvalParams, again

TEXT = (EXAMPLE.parents[1] / "text/validation.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of a random model with 256 positions and 16 channels, with model and text."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text(TEXT[:6000])
    model = write_model(folder / "tiny")
    text = str(folder / "text.txt")
    oscar_zoo.compute_artifact(model, method="hadamard", calib_data=text, output=folder / "made")
    return folder


@pytest.fixture
def measured(made: Path, tmp_path: Path) -> list[str]:
    """The words that measure a copy of that artifact, in which no test has kept scores."""
    artifact = shutil.copytree(made / "made", tmp_path / "made")
    words = ["eval", str(artifact), "--model", str(made / "tiny"), "--data", str(made / "text.txt")]
    return [*words, "--task", "perplexity", "--windows", "1", "--length", "128"]


def test_every_combination_is_a_row_with_its_bits(cli: Cli, measured: list[str]) -> None:
    lists = ("--sink", "0,4", "--recent", "16", "--clip", "0,0", "--clip", "0.9,0.9")
    found = cli.json(0, *measured, *lists, "--group-size", "8")
    assert (found["sink"], found["recent"], found["group_size"]) == (64, 256, 16), "the recipe's"
    base, *rows = found["rows"]
    assert (base["cache"], base["changes"]) == ("bf16", {})
    same = {"recent": 16, "group_size": 8}
    assert [row["changes"] for row in rows] == [
        {"sink": sink, "clip": clip, **same} for sink in (0, 4) for clip in ("0,0", "0.9,0.9")
    ]
    assert len({row["perplexity"] for row in found["rows"]}) == 5
    for row in rows:
        exact = row["changes"]["sink"] + 16
        assert row["bits_per_element"] == 6, "2 bits, and 32 for 8 channels"
        assert row["bits_per_element_with_windows"] == 6 + 16 * exact / 128
        assert row["bits_per_element_at"]["8192"] == 6 + 16 * exact / 8192
    assert found["record"] is None
    assert not (Path(measured[1]) / "scores.json").exists(), "they are not those of the recipe"


def test_the_tables_have_a_column_for_each_list(cli: Cli, measured: list[str]) -> None:
    lines = cli(0, *measured, "-q", "--recent", "16,32", "--sink", "4").splitlines()
    head, base, *rows = [line.split() for line in lines]
    assert " ".join(head) == "CACHE SINK RECENT BITS BITS AT 128 PERPLEXITY vs BF16"
    assert base[:3] == ["BF16", "16.00", "16.00"]
    assert [row[:4] for row in rows[:2]] == [["INT2", "4", size, "4.00"] for size in ("16", "32")]
    assert " ".join(rows[2]) == "SINK RECENT BITS AT 8k BITS AT 32k BITS AT 128k"
    assert rows[3:5] == [["4", "16", "4.04", "4.01", "4.00"], ["4", "32", "4.07", "4.02", "4.00"]]


def test_one_value_is_for_all_caches_and_python_takes_lists(cli: Cli, measured: list[str]) -> None:
    found = cli.json(0, *measured, "--recent", "16", "--sink", "0")
    assert (found["sink"], found["recent"]) == (0, 16)
    assert len(found["rows"]) == 5 and not any(row["changes"] for row in found["rows"])
    bits = {row["bits_per_element_with_windows"] for row in found["rows"][1:]}
    assert bits == {2 + 32 / 16 + 16 * 16 / 128}
    same: dict[str, Any] = {"sink": 0, "recent": [16], "clip": [(0.9, 0.9), (0.0, 0.0)]}
    size: dict[str, Any] = {"tasks": ("perplexity",), "windows": 1, "length": 128}
    report = oscar_zoo.evaluate_artifact(
        measured[1], model=measured[3], data=measured[5], **size, **same
    )
    changes = [dict(row.changes) for row in report.rows]
    assert changes == [
        {},
        *({"sink": 0, "recent": 16, "clip": clip} for clip in ("0.9,0.9", "0,0")),
    ]


def test_the_bits_that_are_told_are_those_of_the_artifact(cli: Cli) -> None:
    bits = (("bf16", 16.0, 16.0), ("int2", 2.5, 3.125), ("artifact", 3.25, 3.875))
    rows = [
        EvalRow(
            cache=cache, perplexity=3.0, recall=None, changes={}, bits_per_element=stored,
            bits_per_element_with_windows=5.0, bits_per_element_at={"8192": long},
        )
        for cache, stored, long in bits
    ]  # fmt: skip
    print_bits(rows)
    assert "of it by tokens of a sequence, with windows: 3.88 at 8k" in cli.capsys.readouterr().out


@pytest.fixture
def against(artifact: Path) -> list[Any]:
    """The words that measure it on a text beside it."""
    text = artifact.parent / "text.txt"
    text.write_text(TEXT[:30_000])
    size = ("--windows", 2, "--length", 600, "--answers", 2, "--recent", 64, "--sink", 16)
    return ["eval", artifact, "--model", EXAMPLE, "--dtype", "float32", "--data", text, *size]


def test_alternatives_in_a_table_charts_and_the_report_of_python(
    cli: Cli, artifact: Path, against: list[Any], tmp_path: Path
) -> None:
    names = "fp8,fp8-scaled,kivi:2,int2"
    size: dict[str, Any] = {"windows": 2, "length": 600, "answers": 2, "recent": 64, "sink": 16}
    size |= {"model": EXAMPLE, "dtype": "float32", "data": str(artifact.parent / "text.txt")}
    found = oscar_zoo.evaluate_against(artifact, names, **size).to_json()
    check(found)
    rows = {row["cache"]: row for row in found["rows"]}
    assert set(rows) == {"bf16", "fp8", "fp8-scaled", "kivi:2", "int2", "artifact"}
    assert [row["title"] for row in rows.values() if row["own"]] == ["oscar:2"]
    assert found["context"] == 2048
    lent = {name: row["windows"] for name, row in rows.items()}
    assert lent == dict.fromkeys(rows, "own") | {
        "bf16": None, "fp8": "none", "fp8-scaled": "none", "int2": "lent"
    }  # fmt: skip
    bits = [row["bits_per_element_with_windows"] for row in found["rows"]]
    assert bits == sorted(bits) and rows["bf16"]["divergence"] == 0
    fp8, oscar, int2 = (rows[name]["divergence"] for name in ("fp8", "artifact", "int2"))
    assert fp8 < 0.05 < oscar < int2
    assert rows["fp8"]["pareto"] or rows["fp8-scaled"]["pareto"]  # as many bits
    assert rows["bf16"]["pareto"] and not rows["int2"]["pareto"]
    assert 0 < rows["fp8-scaled"]["divergence"] < 0.05 and rows["fp8-scaled"]["divergence"] != fp8
    assert rows["artifact"]["bits_per_element"] == 2.5
    assert rows["artifact"]["bits_per_element_with_windows"] == 2.5 + 16 * 80 / 600
    each = 4 * 2 * (64 + 64) * (2.5 + 16 * 80 / 2048) / 8  # layers, heads, and both sides
    assert rows["artifact"]["tokens_per_gb"] == int(1e9 / each)
    assert found["tasks"]["divergence"] == {"windows": 2, "positions": 2 * (599 - 80)}
    files = [tmp_path / f"loss.{kind}" for kind in ("svg", "png", "html")]
    plots = [word for file in files for word in ("--plot", file)]
    head, *lines = cli(0, *against, "-q", "--against", names, *plots).splitlines()
    assert head.split()[:6] == ["CACHE", "BITS", "AT", "600", "AT", "32k"]
    shown = {line.split()[0]: line.split()[1:5] for line in lines if line.strip()}
    assert [bits.rstrip("*") for bits in shown["fp8‡"][:3]] == ["8.00"] * 3
    assert shown["oscar:2"][0] == "2.50"
    assert shown["oscar:2"][3] == f"{rows['artifact']['tokens_per_gb']:,}"
    assert {"oscar:2", "kivi:2", "int2†", "fp8‡", "fp8-scaled‡", "bf16"} <= {*shown}
    svg, png, page = (file.read_bytes() for file in files)
    assert b"Pareto front" in svg and b"INT2" in svg
    assert png.startswith(b"\x89PNG") and b"<svg" in page and b">KIVI<" in page
    assert not (artifact / "scores.json").exists()


def test_the_help_has_every_name(cli: Cli) -> None:
    words = set(re.findall(r"[\w:-]+", cli(0, "eval", "--help").replace(",", " ")))
    assert {*TABLE, ALL, *NAMES, *TEXT_TASKS} <= words


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parameters of use cases that do nothing."""
    found: list[Any] = []

    def take(params: object, observer: object) -> None:
        found.append(params)
        raise KeyboardInterrupt

    for module, name in ((in_process, "evaluate"), (servers, "evaluate")):
        monkeypatch.setattr(module, name, take)
    monkeypatch.setattr(suite, "run_benchmarks", take)
    return found


def test_options_reach_the_parameters(asked: list[Any]) -> None:
    common = ["--task", "recall", "--clip", "0.5,0.6", "--answers", "3", "--hub", "file:x"]
    run(["eval", "Name"])
    run(["eval", "Name", *common])
    flags = ["--engine", "sglang", "--chunk", "64,128", "--radix", "off", "--timeout", "7"]
    run(["eval", "Name", *common, *flags, "--", "--max-running-requests=2"])
    run(["eval", "Name", "--task", "gsm8k", "--fp8", "--no-thinking", "--limit", "3"])
    plain, here, there, questions = asked
    assert plain == EvalParams("Name")
    given: dict[str, Any] = {"tasks": ("recall",), "answers": 3, "hubs": ("file:x",)}
    given |= {"clips": ("0.5,0.6",)}
    assert here == EvalParams("Name", **given)
    given |= {"engine": "sglang", "chunk": "64,128", "radix": "off", "timeout": 7}
    assert there == EvalParams("Name", **given, engine_flags=("--max-running-requests=2",))
    wanted = tuple(ServerVariant(chunk=chunk, radix=False) for chunk in (64, 128))
    assert servers.variants_of(there) == wanted
    assert questions == EvalParams("Name", tasks=("gsm8k",), fp8=True, thinking=False, limit=3)


def test_lists_are_the_values_to_measure_with(asked: list[Any]) -> None:
    run(["eval", "Name", "--sink", "0,64,0", "--recent", "128", "--group-size", "32,64"])
    run(["eval", "Name", "--clip", "0.9,0.8", "--clip", "0,0"])
    values = {"sink": (0, 64), "recent": (128,), "group_size": (32, 64)}
    clips = {"clip": (Clip(k=0.9, v=0.8), Clip(k=0.0, v=0.0))}
    assert [in_process.values_of(params) for params in asked] == [values, clips]


def test_the_command_line_again_means_the_same_with_a_folder(asked: list[Any]) -> None:
    words = ["--task", "recall", "--clip", "0.5,0.6", "--no-stream-weights", "--hub", "file:a b"]
    run(["eval", "A name", "--model", "m", *words, "--engine", "sglang", "--", "--page-size=2"])
    run(shlex.split(again("eval", asked[0]))[1:])
    assert asked[1] == replace(asked[0], model="FOLDER")


def test_the_example_recalls_not_with_plain_int2(cli: Cli, artifact: Path, tmp_path: Path) -> None:
    page = tmp_path / "map.html"
    asked = ("--family", "single", "--depths", 2, "--samples", 1, "--lengths", 600)
    caches = ("--cache", "bf16", "--cache", "int2")
    words = ("ruler", artifact, "--model", EXAMPLE, *asked, *caches, "--plot", page)
    found = parsed(cli(0, *words, "--json"))
    right = [(c["cache"], c["depth"], c["right"], c["asked"]) for c in found["cells"]]
    cells = [("bf16", 0.0, 1, 1), ("bf16", 1.0, 1, 1), ("int2", 0.0, 0, 1), ("int2", 1.0, 0, 1)]
    assert sorted(right) == cells
    bits = {row["cache"]: row["bits_per_element"] for row in found["lengths"]}
    assert bits["bf16"] == 16 > bits["int2"] > 8  # 600 tokens lie in the windows, mostly
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_sessions_are_the_same_from_the_command_and_from_python(cli: Cli, artifact: Path) -> None:
    words = ("eval", artifact, "--model", EXAMPLE, "--task", "sessions", "--windows", 1)
    found = cli.json(0, *words, "--length", 1900)
    assert (found["schema"], found["length"]) == ("oscar-zoo.eval-sessions/1", 1900)
    assert [row["cache"] for row in found["rows"]] == list(CACHES)
    size: dict[str, Any] = {"model": EXAMPLE, "windows": 1, "length": 1900}
    assert oscar_zoo.evaluate_sessions(artifact, **size).to_json() == found
    with pytest.raises(UsageError):
        oscar_zoo.evaluate_sessions(artifact, **size | {"length": 400})
    with pytest.raises(UsageError):
        oscar_zoo.evaluate_artifact(artifact, **size, tasks=["recall", "sessions"])
