"""`search`, and `list` with `--sort` and `--filter`: which artifacts are found, and in which
order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_output import Cli
from hub_uses import HARD, put_version
from measured_artifacts import SELECTION, measured_files
from tiny_artifacts import payload

import oscar_zoo
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.hubs.local import LocalHub

BETTER, BARE = "Qwen3-8B/seq512_prompt3_group64-wush", "Some-Model/seq512_prompt4_group64"
QWEN = "Qwen3-8B/seq20000_prompt83_group128"
SMALL = SELECTION["chosen"] | {"change_percent": -0.1, "recall": 0.9}


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def hub(tmp_path: Path) -> str:
    """A hub of three: two with figures, of which one is for a model of the zoo, and one without a
    manifest."""
    made = LocalHub(tmp_path / "hub", must_exist=False)
    put_version(made, HARD, measured_files())
    better = measured_files(SELECTION | {"chosen": SMALL}, artifact=BETTER, seed=1)
    put_version(made, BETTER, better)
    put_version(made, BARE, payload(seed=2))
    return made.name


def ids(cli: Cli, *words: str) -> list[str]:
    return [row["id"] for row in cli.json(0, *words)["artifacts"]]


def test_the_best_comes_first_and_the_unknown_last(cli: Cli, hub: str) -> None:
    assert ids(cli, "list", "--hub", hub) == [BETTER, BARE, str(HARD)]
    assert ids(cli, "list", "--hub", hub, "--sort", "perplexity") == [BETTER, str(HARD), BARE]
    assert ids(cli, "list", "--hub", hub, "--sort", "recall") == [str(HARD), BETTER, BARE]
    size = cli.json(0, "list", "--hub", hub, "--sort", "size")["artifacts"]
    known = [row["bytes"] for row in size if row["bytes"] is not None]
    assert known == sorted(known) and len(known) == 2 and size[-1]["id"] == BARE
    upstream = ids(cli, "list", "--offline", "--sort", "gpqa")
    assert upstream[0].startswith("GLM-4.7-FP8/") and upstream.index(QWEN) < len(upstream) - 1
    first = cli(0, "list", "--hub", hub, "--sort", "perplexity").splitlines()[1]
    assert first.startswith("Qwen3-8B ") and "-0.10 %" in first


def test_filters_choose_and_all_of_them_have_to_fit(cli: Cli, hub: str) -> None:
    def chosen(*filters: str) -> list[str]:
        words = [word for text in filters for word in ("--filter", text)]
        return ids(cli, "list", "--hub", hub, *words)

    assert chosen("family=qwen3") == [BETTER]
    assert chosen("tag=*WUSH") == [BETTER]
    assert chosen("model=[qs]*") == [BETTER, BARE]
    assert chosen("method=oscar", "model=tiny*") == [str(HARD)]
    assert chosen("format=1") == [BETTER, str(HARD)]
    assert chosen("bits=2.?") == [BETTER, str(HARD)]
    assert chosen("status=local", "state=active") == [BETTER, BARE, str(HARD)]
    assert chosen("method=oscar", "family=Gemma*") == []
    assert cli(0, "list", "--hub", hub, "--filter", "family=Gemma") == ""
    assert cli.err == "No artifacts that fit family=Gemma. See all: oscar-zoo list\n"
    assert "Recipes without" not in cli(0, "list", "--offline", "--filter", "family=Qwen3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("famly=Qwen3", "--filter has no key 'famly'. Did you mean family?"),
        ("xyz=1", "--filter has no key 'xyz'. Keys are model, tag, family"),
        ("family", "--filter 'family' is not KEY=PATTERN. Write, for example, --filter family="),
        ("family=", "--filter 'family=' is not KEY=PATTERN."),
        ("tag=[a", "the pattern '[a' has a [ or ] without the other. Write, for example"),
    ],
)
def test_a_wrong_filter_is_one_line_with_a_way_on(cli: Cli, text: str, said: str) -> None:
    assert cli(2, "list", "--offline", "--filter", text) == ""
    assert cli.err.startswith(f"error: {said}") and cli.err.count("\n") == 1
    assert cli.json(2, "list", "--offline", "--filter", text)["error"]["code"] == "usage"


def test_search_wants_every_word_somewhere(cli: Cli, hub: str) -> None:
    assert ids(cli, "search", "qwen/qwen3-8b", "WUSH", "--hub", hub) == [BETTER]
    assert ids(cli, "search", "oscar prompt2", "--hub", hub) == [str(HARD)]
    assert ids(cli, "list", "oscar", "prompt2", "--hub", hub) == [str(HARD)]
    digest = cli.json(0, "list", "--hub", hub)["artifacts"][0]["digest"]
    assert ids(cli, "search", digest[7:19], "--hub", hub) == [BETTER]
    assert "seq512_prompt3_group64-wush" in cli(0, "search", "wush", "--hub", hub)
    assert QWEN in ids(cli, "search", "gpqa_diamond", "--offline")
    found = cli.json(0, "search", "gemma-3", "--offline")
    assert found["artifacts"] == [] and "gemma-3-4b-it" in found["recipes_without_artifact"]
    assert "gemma-3-4b-it" in cli(0, "search", "gemma-3", "--offline")


def test_a_size_is_found_by_its_number_and_not_by_its_letters(cli: Cli, hub: str) -> None:
    found = cli.json(0, "search", "7b", "--offline")["recipes_without_artifact"]
    assert found and all(re.search(r"(?<![\d.])([67]\.\d|7)B", name) for name in found), found
    assert QWEN in ids(cli, "search", "qwen3", "8b", "--offline")


def test_a_size_is_that_of_a_model_and_not_of_a_tag(cli: Cli, tmp_path: Path) -> None:
    made = LocalHub(tmp_path / "hub", must_exist=False)
    for name in ("Some-Model/seq512_prompt4_group64-7b", "My-7B/seq512_prompt4_group64"):
        put_version(made, name, payload(seed=2))
    assert ids(cli, "search", "7b", "--hub", made.name) == ["My-7B/seq512_prompt4_group64"]
    assert len(ids(cli, "search", "group64-7b", "--hub", made.name)) == 1


def test_words_without_an_end_are_refused(cli: Cli) -> None:
    assert cli.json(2, "search", "a" * 100_000)["error"]["code"] == "usage"


def test_search_that_finds_nothing_says_so_and_what_may_be_meant(cli: Cli, hub: str) -> None:
    assert cli(0, "search", "tiny-qwen3-hart", "--hub", hub) == ""
    assert cli.err.startswith("Nothing has all of the words tiny-qwen3-hart. Did you mean tiny-q")
    assert cli.json(2, "search", " ", "--hub", hub)["error"]["hint"] == "oscar-zoo search qwen3"


def test_the_calls_of_the_library(hub: str) -> None:
    rows = oscar_zoo.list_artifacts(hubs=hub, filters=["method=oscar"], sort="recall").rows
    assert [row["id"] for row in rows] == [str(HARD), BETTER]
    assert [row["id"] for row in oscar_zoo.search("some-model", hubs=hub).rows] == [BARE]
    with pytest.raises(UsageError):
        oscar_zoo.list_artifacts(hubs=hub, sort="best")
