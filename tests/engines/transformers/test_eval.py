"""`oscar-zoo eval --engine transformers`: an `OscarCache` beside the simulated cache."""

import math
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli

from oscar_zoo.engines.transformers.layer import OscarLayer
from oscar_zoo.evaluate.in_process import evaluate_artifact


def words(world: Path, *more: object) -> tuple[object, ...]:
    where = ("--model", world / "model", "--windows", 2, "--length", 600, "--dtype", "float32")
    return ("eval", world / "artifact", *where, "--engine", "transformers", *more)


@pytest.mark.parametrize("recent", [256, 40, 20])
def test_both_caches_read_the_same(world: Path, cli: Cli, recent: int) -> None:
    told = cli.json(0, *words(world, "--recent", recent))
    (row,) = told["servers"]
    found = row["perplexity"]
    alone = evaluate_artifact(
        world / "artifact", model=world / "model", tasks=["perplexity"], windows=2, length=600,
        dtype="float32", recent=recent,
    )  # fmt: skip
    by_cache = {one.cache: one.perplexity for one in alone.rows}
    assert math.isclose(found["reference"], by_cache["artifact"], rel_tol=1e-6)
    assert math.isclose(found["exact"], by_cache["bf16"], rel_tol=1e-6)
    assert math.isclose(found["server"], found["reference"], rel_tol=1e-4)
    assert found["reference"] > 1.1 * found["exact"]
    assert 0 < row["largest_difference"] < 0.1 and row["chunk"] == min(32, recent)
    assert (row["engine"], row["capacity_tokens"], row["recall"]) == (None, None, None)
    assert (told["texts"], told["length"], told["failures"]) == (2, 600, [])


def test_a_cache_that_reads_something_else_fails(
    world: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend: Any = OscarLayer.attend

    def wrong(layer: Any, *given: Any) -> Any:
        out = attend(layer, *given)
        return out * (1.5 if layer.rows.length > 300 else 1)

    monkeypatch.setattr(OscarLayer, "attend", wrong)
    text = cli(1, *words(world))
    assert "limit 0.5 %" in text


def test_what_does_not_go_with_it(world: Path, cli: Cli) -> None:
    for more in (
        ("--task", "recall"),
        ("--task", "sessions"),
        ("--against", "fp8"),
        ("--sink", "0,4"),
        ("--chunk", "64"),
    ):
        cli.refused(2, *words(world, *more))
