"""`oscar-zoo ruler` over the example model in this process, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_output import Cli, parsed
from tiny_artifacts import artifact_files, write_folder
from tiny_models import EXAMPLE

ASKED = ("--family", "single", "--depths", 2, "--samples", 1, "--lengths", 600)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "rotation", artifact_files())


def test_the_example_recalls_with_bf16_and_not_with_plain_int2(
    cli: Cli, artifact: Path, tmp_path: Path
) -> None:
    page = tmp_path / "map.html"
    caches = ("--cache", "bf16", "--cache", "int2")
    words = ("ruler", artifact, "--model", EXAMPLE, *ASKED, *caches, "--plot", page)
    found = parsed(cli(0, *words, "--json"))
    assert found["schema"] == "oscar-zoo.ruler/1"
    right = {(c["cache"], c["depth"]): (c["right"], c["asked"]) for c in found["cells"]}
    assert right == {
        ("bf16", 0.0): (1, 1),
        ("bf16", 1.0): (1, 1),
        ("int2", 0.0): (0, 1),
        ("int2", 1.0): (0, 1),
    }
    bits = {row["cache"]: row["bits_per_element"] for row in found["lengths"]}
    assert bits["bf16"] == 16 > bits["int2"] > 8  # 600 tokens lie in the windows, mostly
    assert page.read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lengths", "600,4096"], "takes 2,048 tokens, and prompts of 4,096 are wanted"),
        (["--plot", "map.svg"], "map.svg is neither a page nor a picture"),
        (["--plot", "nowhere/map.png"], "nowhere"),
        (["--lengths", "x"], "--lengths"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_read(
    cli: Cli, artifact: Path, words: list[str], said: str
) -> None:
    cli(3 if "nowhere" in said else 2, "ruler", artifact, "--model", EXAMPLE, *words)
    assert said in cli.err
