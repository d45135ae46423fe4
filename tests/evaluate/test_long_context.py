"""Prompts of the families, and maps of them."""

import hashlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
from cli_output import check

from oscar_zoo.engines.server_client import Answer, ServerFacts
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.charts import recall_maps
from oscar_zoo.evaluate.measure import TaskPrompt
from oscar_zoo.evaluate.outcome import Cell, RulerReport
from oscar_zoo.evaluate.questions import Recall
from oscar_zoo.evaluate.ruler import count_cells, length_rows, measure_servers
from oscar_zoo.evaluate.ruler_prompts import FAMILIES, Place, places_of, write_prompts

LENGTH = 4000
FILLER = [ord(c) for c in "Plain words stand here, and say nothing. " * 200]
DIGEST = "a6cc13c98e634bbaedcba7dab3651170529005a78be21ea26825e6ff2657b9dd"
"""Of all prompts of one seed: they are the same for everybody."""


def encode(text: str) -> list[int]:
    """A token per character."""
    return [ord(c) for c in text]


def written(
    *families: str, depths: int = 3, samples: int = 2, seed: int = 0
) -> dict[Place, Recall]:
    places = places_of(families, [LENGTH], depths)
    return write_prompts(places, FILLER, encode, samples=samples, depths=depths, seed=seed)


def prompts(family: str) -> list[tuple[TaskPrompt, str]]:
    """With their text."""
    found = [prompt for task in written(family).values() for prompt in task.prompts]
    return [(prompt, "".join(map(chr, prompt.ids.tolist()))) for prompt in found]


def answers(prompt: TaskPrompt) -> list[str]:
    """What the scored positions predict."""
    said = [chr(token) for token in prompt.targets.tolist()]
    return ["".join(said[first:last]) for first, last in prompt.answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_its_length_and_ends_with_its_last_answer(family: str) -> None:
    found = prompts(family)
    assert len(found) == 6
    for prompt, text in found:
        assert len(text) == LENGTH - 1  # a line break would follow
        assert text.endswith(answers(prompt)[-1])
        assert text.count("Question:") == len(re.findall(r"Answer: ", text)) >= 1


def test_a_seed_gives_the_same_prompts_everywhere() -> None:
    def digest(seed: int) -> str:
        found = hashlib.sha256()
        for task in written(*FAMILIES, seed=seed).values():
            for prompt in task.prompts:
                found.update(repr((prompt.ids.tolist(), prompt.answers)).encode())
        return found.hexdigest()

    assert digest(0) == DIGEST != digest(1)


@pytest.mark.parametrize("family", ["single", "multi-key", "multi-value", "multi-query"])
def test_codes_stand_in_the_text_with_the_name_that_is_asked_for(family: str) -> None:
    for prompt, text in prompts(family):
        codes = re.findall(r"access codes? of (\w+) is (\d+)\.", text)
        asked = re.findall(r"Question: What (?:is|are) the (?:4 )?access codes? of (\w+)", text)
        wanted = [code for name in asked for given, code in codes if given == name]
        assert answers(prompt) == wanted
        assert len(codes) == {"single": 1, "multi-value": 4}.get(family, 8)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.has_depth])
def test_the_fact_lies_at_its_depth(family: str) -> None:
    for (_, _, depth), task in written(family, depths=5, samples=3).items():
        for prompt in task.prompts:
            text = "".join(map(chr, prompt.ids.tolist()))
            at, end = text.index(answers(prompt)[0]), text.index("\nQuestion:")
            assert depth is not None and abs(at / end - depth) < 0.12


def test_variables_are_followed_through_their_chain() -> None:
    for prompt, text in prompts("variables"):
        given = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text))

        def value(name: str, given: dict[str, str] = given) -> str:
            return name if name.isdigit() else value(given[name])

        (asked,) = re.findall(r"have the value (\d+)", text)
        assert answers(prompt) == [name for name in given if value(name) == asked]


def test_common_words_are_the_most_common_ones() -> None:
    for prompt, text in prompts("common-words"):
        words = text.split("\n")[1].split()
        most = sorted(set(words), key=words.count, reverse=True)
        assert answers(prompt) == sorted(most[:3])
        assert words.count(most[2]) > 2 * words.count(most[3])


def test_documents_answer_the_question_that_is_asked() -> None:
    for prompt, text in prompts("documents"):
        ((kind, place),) = re.findall(r"Question: What is the (\w+) of (\w+)\?", text)
        assert answers(prompt) == re.findall(rf"The {kind} of {place} is (\w+)\.", text)


@pytest.mark.parametrize(
    ("family", "length", "said"),
    [("multi-key", 200, "have no room"), ("single", 20_000, "the text has")],
)
def test_what_has_no_room_is_refused(family: str, length: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        places = places_of([family], [length], 1)  # type: ignore[list-item]
        write_prompts(places, FILLER, encode, samples=1, depths=1, seed=0)


def report() -> RulerReport:
    """BF16 answers all, a broken cache what lies at the end."""
    places = places_of(["single", "variables"], [1024, 2000], 3)
    tasks = write_prompts(places, FILLER, encode, samples=2, depths=3, seed=0)

    def right(task: Recall, share: str) -> int:
        (depth,) = [depth for (_, _, depth), one in tasks.items() if one is task]
        whole = share == "all" or depth == 1.0
        return sum(len(prompt.answers) for prompt in task.prompts) if whole else 0

    found = count_cells(tasks, {"bf16": "all", "<b>": "end"}, right)
    rows = length_rows(found, lambda cache, length: 16.0 if cache == "bf16" else 2.28)
    return RulerReport(cells=found, rows=rows, samples=2, depths=3, seed=0, servers={})


def test_shares_are_counted_by_place_by_family_and_by_length() -> None:
    made = report()
    assert [made.share("<b>", length=1024, depth=depth) for depth in made.places] == [0, 0, 1]
    assert made.share("bf16", family="variables") == 1
    assert made.share("<b>", family="single", length=2000) == pytest.approx(1 / 3)
    shares = {(row.cache, row.length): row.share for row in made.rows}
    assert shares["bf16", 1024] == 1
    assert shares["<b>", 2000] == pytest.approx(1 / 6)  # the mean of one third and of nothing
    facts = made.to_json()
    check(facts)
    assert {cell["asked"] for cell in facts["cells"] if cell["family"] == "single"} == {2}
    assert Cell("single", 1024, 0.0, "bf16", 50, 50).stderr > 0


def test_the_maps_are_a_picture_and_a_page_that_needs_nothing_else() -> None:
    made = report()
    picture = recall_maps(made, "A <title>")
    assert picture.startswith(b"\x89PNG") and picture == recall_maps(made, "A <title>")
    page = recall_maps(made, "A <title>", "html").decode()
    assert "<title>A &lt;title&gt;</title>" in page and "<svg" in page
    assert not any(word in page for word in ("<script", 'href="http', "src="))


def test_a_server_is_right_when_its_greedy_answer_is() -> None:
    """A server that answers what it was given: right where the fact lies in the first half."""
    size = {"depths": 4, "samples": 2, "seed": 0}
    tasks = write_prompts(places_of(["single"], [900], 4), FILLER, encode, **size)
    known = {
        tuple(prompt.ids.tolist()[: int(prompt.scored[0]) + 1]): prompt.targets.tolist()
        for (_, _, depth), task in tasks.items()
        for prompt in task.prompts
        if (depth or 0) < 0.5
    }

    def generate(ids: list[int], number: int) -> Answer:
        said = known.get(tuple(ids), [0] * 6)
        assert number == len(said)
        return Answer(tuple(said), 0)

    facts = ServerFacts("0.5.21", "int2", "float32", "cpu", 16, 4, True, 1, 1000, 1000)
    client: Any = SimpleNamespace(url="http://one", facts=lambda: facts, generate=generate)
    found = measure_servers({"one": client}, tasks, size)
    assert [(one.right, one.asked) for one in found.cells] == [(2, 2), (2, 2), (0, 2), (0, 2)]
    with pytest.raises(UsageError, match="takes 1,000 tokens"):
        measure_servers({"one": client}, {("single", 1001, 0.5): tasks["single", 900, 0.0]}, size)
