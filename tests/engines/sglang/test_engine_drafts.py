"""Speculative decoding inside stock SGLang on the CPU: greedy tokens are those of a server without
it, through chunked prefill, prefix hits, second turns, ten requests at once and requests that are
given up.

In lossless mode the slots hold float32 rows, so every difference is a bug of the plumbing. With
codes alone, rows that left the window are read as codes, so also the tiers must be the same. Runs
with a bug show that each comparison can fail.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_oracle import general_set
from engines import (
    INSTALLED,
    Engines,
    needs_sglang,
    plumbing_groups,
    text_tokens,
)
from tiny_artifacts import write_folder

from oscar_zoo.artifact.writer import rotation_bytes

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

COUNT = 6
PLAIN = {"kv_cache_dtype": "int2", "disable_overlap_schedule": True}
DRAFTS = {
    **PLAIN,
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": COUNT,
    "speculative_ngram_max_bfs_breadth": 4,
}
WINDOWS = {"OSCAR_INT2_SINK_SIZE": "16", "OSCAR_INT2_RECENT_SIZE": "32"}
LOSSLESS = {**WINDOWS, "INT2_TEST_MODE": "lossless"}
"""Variables of a mode of `int2_test_plugin`."""
MUTANTS = (
    "small_ring",
    "window_of_the_first_draft",
    "without_tree",
    "rings_not_committed",
    "sinks_not_committed",
)


def given_groups() -> list[dict[str, Any]]:
    groups = plumbing_groups(text_tokens())
    ids = text_tokens()
    short = {"name": "short", "prompts": [ids[:3], ids[40:49]], "new": 40}
    alone = [{"name": f"alone{i}", "prompts": [ids[at : at + n]], "new": 48}
             for i, (at, n) in enumerate([(0, 5), (200, 80), (1000, 150)])]  # fmt: skip
    return [short, *alone, *groups]


class Runs:
    """A server without drafts, and servers with drafts from its answers."""

    def __init__(self, folder: Path, release: str) -> None:
        self.engines = Engines(folder, None if release == INSTALLED else release)
        rotations = {
            f"{s}.pt": rotation_bytes(general_set(s, 4, 2, 64, seed=i)) for i, s in enumerate("kv")
        }
        self.artifact = write_folder(folder / "general", rotations)
        self.groups, self.folder = given_groups(), folder

    def plain(self, name: str, env: dict[str, str]) -> None:
        """Start a server without drafts."""
        self._start(name, PLAIN, env)

    def drafts(
        self, name: str, env: dict[str, str], *, of: str, shape: str = "tree", **job: Any
    ) -> None:
        """Start a server whose drafts are from the answers of the server `of`."""
        answers = [
            [*prompt, *tokens]
            for group in self.engines.result(of)["groups"].values()
            for prompt, tokens in zip(group["prompts"], group["tokens"], strict=True)
        ]
        counts = str(self.folder / f"{name}.counts")
        stand_in = {"answers": answers, "shape": shape, "counts": counts}
        self._start(name, DRAFTS, env, drafts=stand_in, **job)

    def counts(self, name: str) -> dict[str, int]:
        """Steps, accepted and moved tokens of a server with drafts."""
        self.engines.result(name)
        counted: dict[str, int] = json.loads((self.folder / f"{name}.counts").read_text())
        return counted

    def _start(self, name: str, engine: dict[str, Any], env: dict[str, str], **job: Any) -> None:
        env = {**env, "OSCAR_INT2_ROTATION_PATH": str(self.artifact)}
        self.engines.start(name, env=env, job={"engine": engine, "groups": self.groups, **job})


def different(runs: Runs, name: str, of: str) -> list[str]:
    """Groups with other tokens."""
    got, want = (runs.engines.result(one)["groups"] for one in (name, of))
    return [group for group in want if got[group]["tokens"] != want[group]["tokens"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("drafts"), INSTALLED)
    made.plain("lossless", LOSSLESS)
    made.plain("int2", WINDOWS)
    made.drafts("tree", LOSSLESS, of="lossless")
    made.drafts("chain", LOSSLESS, of="lossless", shape="chain")
    made.drafts("int2_tree", WINDOWS, of="int2")
    yield made
    made.engines.close()


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_lossless_tokens_are_those_of_plain_greedy_decoding(runs: Runs, shape: str) -> None:
    assert different(runs, shape, "lossless") == []
    counts = runs.counts(shape)
    assert counts["accepted"] > 1.5 * counts["steps"]
    assert (counts["moved"] > 100) == (shape == "tree")


def test_int2_tokens_of_one_request_at_a_time_are_those_of_plain_decoding(runs: Runs) -> None:
    assert not {"alone0", "alone1", "alone2"} & {*different(runs, "int2_tree", "int2")}
