"""`oscar-zoo eval --against` from end to end: rows, table, charts, the same from Python, and what
is refused before a model is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli, parsed
from tiny_artifacts import artifact_files, write_folder
from tiny_models import EXAMPLE

import oscar_zoo
from oscar_zoo.evaluate.against_table import ALL, TABLE

TEXT = EXAMPLE.parents[1] / "text/validation.txt"
SIZE = ("--windows", 2, "--length", 600, "--answers", 2, "--recent", 64, "--sink", 16)
NAMES = "fp8,kivi:2,int2"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Any artifact of the example model, with a text beside it."""
    folder = tmp_path_factory.mktemp("against")
    (folder / "text.txt").write_text(TEXT.read_text("utf-8")[:30_000])
    return write_folder(folder / "made", artifact_files())


@pytest.fixture
def words(artifact: Path) -> list[Any]:
    text = artifact.parent / "text.txt"
    return ["eval", artifact, "--model", EXAMPLE, "--dtype", "float32", "--data", text, *SIZE]


def test_rows_charts_and_the_python_call_say_the_same(
    cli: Cli, artifact: Path, words: list[Any], tmp_path: Path
) -> None:
    files = [tmp_path / f"loss.{kind}" for kind in ("svg", "png", "html")]
    plots = [word for file in files for word in ("--plot", file)]
    found = parsed(cli(0, *words, "--against", NAMES, *plots, "--json"))
    rows = {row["cache"]: row for row in found["rows"]}
    assert set(rows) == {"bf16", "fp8", "kivi:2", "int2", "oscar"}
    bits = [row["bits_per_element_with_windows"] for row in found["rows"]]
    assert bits == sorted(bits) and rows["bf16"]["divergence"] == 0
    assert (
        rows["fp8"]["divergence"] < 0.05 < rows["oscar"]["divergence"] < rows["int2"]["divergence"]
    )
    assert rows["fp8"]["pareto"] and rows["bf16"]["pareto"] and not rows["int2"]["pareto"]
    assert rows["oscar"]["bits_per_element"] == 2.5
    assert rows["oscar"]["bits_per_element_with_windows"] == 2.5 + 16 * 80 / 600
    assert found["tasks"]["divergence"] == {"windows": 2, "positions": 2 * (599 - 80)}
    svg, png, page = (file.read_bytes() for file in files)
    assert b"Pareto front" in svg and b"INT2" in svg
    assert png.startswith(b"\x89PNG") and b"<svg" in page and b">KIVI<" in page
    again = oscar_zoo.evaluate_against(
        artifact,
        NAMES,
        model=EXAMPLE,
        dtype="float32",
        data=str(artifact.parent / "text.txt"),
        windows=2,
        length=600,
        answers=2,
        recent=64,
        sink=16,
    )
    assert again.to_json() == found
    assert not (artifact / "scores.json").exists()


def test_the_table_marks_the_front(cli: Cli, words: list[Any]) -> None:
    head, *rows = cli(0, *words, "-q", "--against", "fp8").splitlines()
    assert head.split()[:6] == ["CACHE", "BITS", "AT", "600", "AT", "32k"]
    assert [row.split()[:4] for row in rows[:3]] == [
        ["oscar", "2.50", "4.63*", "2.54*"],
        ["fp8", "8.00", "8.00*", "8.00*"],
        ["bf16", "16.00", "16.00*", "16.00*"],
    ]
    assert rows[3].startswith("* no cache has fewer bits and less KL")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--against", "kivy"], "no alternative is called 'kivy'."),
        (["--against", "kivi:3"], "kivi:3 is not known."),
        (["--against", ","], "--against names nothing."),
        (["--plot", "a.svg"], "--plot needs --against."),
        (["--against", "all", "--plot", "a.txt"], "a.txt is neither a page nor a picture."),
        (["--against", "all", "--task", "recall"], "--against measures divergence"),
        (["--against", "all", "--engine", "sglang"], "--against simulates caches"),
        (["--against", "all", "--url", "http://127.0.0.1:1"], "--url"),
        (["--against", "all", "--recent", "32,64"], "--against compares methods under one recipe"),
        (["--against", "all", "--length", "80"], "nothing of a sequence of 80 tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    cli: Cli, words: list[Any], given: list[str], said: str
) -> None:
    cli(2, *words, *given)
    assert cli.err.count("\n") <= 2 and said in cli.err


def test_the_next_step_keeps_the_alternatives(cli: Cli, artifact: Path) -> None:
    """No hub has the checkpoint of the example model, so the command line needs its folder."""
    cli(2, "eval", artifact, "--windows", 2, "--against", "fp8,kivi:2")
    again = f"oscar-zoo eval {artifact} --model FOLDER --windows 2 --against fp8,kivi:2"
    assert again in " ".join(cli.err.split())


def test_the_help_has_every_name(cli: Cli) -> None:
    words = set(cli(0, "eval", "--help").replace(",", " ").replace(".", " ").split())
    assert {*TABLE, ALL} <= words
