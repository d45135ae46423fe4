"""`oscar-zoo eval` with several windows, clips and group sizes: the rows, the table, what is kept,
and what is refused before the model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_output import Cli, refused
from tiny_models import write_model

import oscar_zoo
from oscar_zoo.cli.render.evaluation import print_bits
from oscar_zoo.evaluate.outcome import EvalRow

TEXT = (Path(__file__).resolve().parents[2] / "examples/text/validation.txt").read_text("utf-8")


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


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


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
    head, base, *rows = cli(0, *measured, "-q", "--recent", "16,32", "--sink", "4").splitlines()
    assert " ".join(head.split()) == "CACHE SINK RECENT BITS BITS AT 128 PERPLEXITY vs BF16"
    assert base.split()[:3] == ["BF16", "16.00", "16.00"]
    assert [row.split()[:4] for row in rows[:2]] == [
        ["INT2", "4", "16", "4.00"],
        ["INT2", "4", "32", "4.00"],
    ]
    assert [row.split() for row in rows[2:5]] == [
        ["SINK", "RECENT", "BITS", "AT", "8k", "BITS", "AT", "32k", "BITS", "AT", "128k"],
        ["4", "16", "4.04", "4.01", "4.00"],
        ["4", "32", "4.07", "4.02", "4.00"],
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recent", "16,128"], "64 first and 128 last tokens in BF16, nothing of a sequence"),
        (["--group-size", "16,12"], "a group size of 12 does not go with tiny: "),
        (["--group-size", "2"], "8 groups per row; 1, 2 or 4 are supported. Use --group-size 16"),
        (["--clip", "0.9,0.9", "--clip", "1.2,1"], "--clip '1.2,1' is not two ratios"),
        (["--recent", "0,16"], "--recent '0,16' is not a list of whole numbers from 1 on"),
        (["--sink", "2000000"], "no recipe has sink 2000000. Windows have at most"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_no_weights_are_read(
    capsys: pytest.CaptureFixture[str],
    measured: list[str],
    tmp_path: Path,
    words: list[str],
    said: str,
) -> None:
    shape = tmp_path / "tiny"
    shape.mkdir()
    (shape / "config.json").write_bytes((Path(measured[3]) / "config.json").read_bytes())
    again = [str(shape) if word == measured[3] else word for word in measured]
    assert said in refused(capsys, 2, *again, *words)


def test_one_value_of_each_is_for_all_caches_and_python_takes_one_or_a_list(
    cli: Cli, measured: list[str]
) -> None:
    found = cli.json(0, *measured, "--recent", "16", "--sink", "0")
    assert (found["sink"], found["recent"]) == (0, 16)
    assert len(found["rows"]) == 5 and not any(row["changes"] for row in found["rows"])
    bits = {row["bits_per_element_with_windows"] for row in found["rows"][1:]}
    assert bits == {2 + 32 / 16 + 16 * 16 / 128}
    report = oscar_zoo.evaluate_artifact(
        measured[1], model=measured[3], data=measured[5], tasks=("perplexity",), windows=1,
        length=128, sink=0, recent=[16], clip=[(0.9, 0.9), (0.0, 0.0)],
    )  # fmt: skip
    same = {"sink": 0, "recent": 16}
    changes = [dict(row.changes) for row in report.rows]
    assert changes == [{}, {**same, "clip": "0.9,0.9"}, {**same, "clip": "0,0"}]


def test_the_bits_that_are_told_are_those_of_the_artifact(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bits = (("bf16", 16.0, 16.0), ("int2", 2.5, 3.125), ("artifact", 3.25, 3.875))
    rows = [
        EvalRow(
            cache=cache, perplexity=3.0, recall=None, changes={}, bits_per_element=stored,
            bits_per_element_with_windows=5.0, bits_per_element_at={"8192": long},
        )
        for cache, stored, long in bits
    ]  # fmt: skip
    print_bits(rows)
    assert "of it by tokens of a sequence, with windows: 3.88 at 8k" in capsys.readouterr().out
