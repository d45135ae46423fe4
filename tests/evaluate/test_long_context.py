"""Prompts of the families, and maps of them."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from oscar_zoo.cli.render.long_context import print_report
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.long_context.chart import render_png
from oscar_zoo.evaluate.long_context.families import FAMILIES
from oscar_zoo.evaluate.long_context.grid import (
    Cell,
    Measured,
    RulerReport,
    cells_of,
    length_rows,
    length_text,
    measure_cells,
    write_prompts,
)
from oscar_zoo.evaluate.long_context.page import render_html
from oscar_zoo.evaluate.long_context.run import Questions, measure_servers
from oscar_zoo.evaluate.tasks.base import TaskPrompt

LENGTH = 4000
FILLER = [ord(c) for c in "Plain words stand here, and say nothing. " * 200]


def encode(text: str) -> list[int]:
    """A token per character."""
    return [ord(c) for c in text]


def decode(prompt: TaskPrompt) -> str:
    return "".join(map(chr, prompt.ids.tolist()))


def prompts(family: str, *, depths: int = 3, samples: int = 2, seed: int = 0) -> list[TaskPrompt]:
    cells = cells_of([family], [LENGTH], depths)
    tasks = write_prompts(cells, FILLER, encode, samples=samples, depths=depths, seed=seed)
    return [prompt for task in tasks.values() for prompt in task.prompts]


def answers(prompt: TaskPrompt) -> list[str]:
    """What the scored positions predict."""
    said = [chr(token) for token in prompt.targets.tolist()]
    return ["".join(said[first:last]) for first, last in prompt.answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_its_length_and_ends_with_its_last_answer(family: str) -> None:
    found = prompts(family)
    assert len(found) == 6
    for prompt in found:
        text = decode(prompt)
        assert len(text) == LENGTH - 1  # a line break would follow
        assert text.endswith(answers(prompt)[-1])
        assert text.count("Question:") == len(re.findall(r"Answer: ", text)) >= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_prompts(family: str) -> None:
    one, same, other = (prompts(family, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a.ids, b.ids) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("family", ["single", "multi-key", "multi-value", "multi-query"])
def test_codes_stand_in_the_text_with_the_name_that_is_asked_for(family: str) -> None:
    for prompt in prompts(family):
        text = decode(prompt)
        codes = re.findall(r"access codes? of (\w+) is (\d+)\.", text)
        asked = re.findall(r"Question: What (?:is|are) the (?:4 )?access codes? of (\w+)", text)
        wanted = [code for name in asked for given, code in codes if given == name]
        assert answers(prompt) == wanted
        assert len(codes) == {"single": 1, "multi-value": 4}.get(family, 8)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.has_depth])
def test_the_fact_lies_at_its_depth(family: str) -> None:
    cells = cells_of([family], [LENGTH], 5)
    tasks = write_prompts(cells, FILLER, encode, samples=3, depths=5, seed=0)
    for cell, task in tasks.items():
        for prompt in task.prompts:
            text = decode(prompt)
            at, end = text.index(answers(prompt)[0]), text.index("\nQuestion:")
            assert cell.depth is not None
            assert abs(at / end - cell.depth) < 0.12, (cell, at, end)


def test_variables_are_followed_through_their_chain() -> None:
    for prompt in prompts("variables"):
        text = decode(prompt)
        given = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text))

        def value(name: str, given: dict[str, str] = given) -> str:
            return name if name.isdigit() else value(given[name])

        match = re.search(r"have the value (\d+)", text)
        assert match is not None
        asked = match[1]
        assert answers(prompt) == [name for name in given if value(name) == asked]


def test_common_words_are_the_most_common_ones() -> None:
    for prompt in prompts("common-words"):
        words = decode(prompt).split("\n")[1].split()
        most = sorted(set(words), key=words.count, reverse=True)
        assert answers(prompt) == sorted(most[:3])
        assert words.count(most[2]) > 2 * words.count(most[3])


def test_documents_answer_the_question_that_is_asked() -> None:
    for prompt in prompts("documents"):
        text = decode(prompt)
        match = re.search(r"Question: What is the (\w+) of (\w+)\?", text)
        assert match is not None
        assert answers(prompt) == re.findall(rf"The {match[1]} of {match[2]} is (\w+)\.", text)


def test_what_has_no_room_is_refused() -> None:
    with pytest.raises(UsageError, match="have no room"):
        write_prompts([Cell("multi-key", 200, 0.5)], FILLER, encode, samples=1, depths=1, seed=0)
    with pytest.raises(UsageError, match="the text has"):
        write_prompts([Cell("single", 20_000, 0.5)], FILLER, encode, samples=1, depths=1, seed=0)
    with pytest.raises(UsageError, match="no family is called"):
        cells_of(["needle"], [LENGTH], 1)


def report() -> RulerReport:
    """BF16 answers all, a broken cache what lies at the end."""
    cells = cells_of(["single", "variables"], [1024, 2000], 3)
    tasks = write_prompts(cells, FILLER, encode, samples=2, depths=3, seed=0)

    def right(task: object, share: object) -> int:
        cell = next(cell for cell, one in tasks.items() if one is task)
        whole = share == "all" or cell.depth == 1.0
        return sum(len(prompt.answers) for prompt in tasks[cell].prompts) if whole else 0

    found = measure_cells(tasks, {"bf16": "all", "<b>": "end"}, right)
    rows = length_rows(found, lambda cache, length: 16.0 if cache == "bf16" else 2.28)
    return RulerReport(found, rows, {"samples": 2, "depths": 3, "seed": 0})


def test_shares_are_counted_by_place_by_family_and_by_length() -> None:
    made = report()
    assert [made.place("<b>", 1024, depth) for depth in made.depths] == [0, 0, 1]
    assert made.family("bf16", "variables") == 1
    assert made.family("<b>", "single", 2000) == pytest.approx(1 / 3)
    shares = {(row.cache, row.length): row.share for row in made.rows}
    assert shares["bf16", 1024] == 1
    assert shares["<b>", 2000] == pytest.approx(1 / 6)  # the mean of one third and of nothing
    facts = json.loads(json.dumps(made.to_json()))
    assert facts["schema"] == "oscar-zoo.ruler/1"
    assert {cell["asked"] for cell in facts["cells"] if cell["family"] == "single"} == {2}
    assert Measured(Cell("single", 1024, 0.0), "bf16", 50, 50).stderr > 0


def test_prompts_are_counted_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    made = report()
    print_report(made)
    assert "Whole answers; 2 prompts for each family" in capsys.readouterr().out
    print_report(replace(made, facts={**made.facts, "samples": 1}))
    assert "Whole answers; 1 prompt for each family" in capsys.readouterr().out


def test_the_maps_are_a_picture_and_a_page_that_needs_nothing_else() -> None:
    made = report()
    picture = render_png(made, "A <title>")
    assert picture.startswith(b"\x89PNG")
    assert picture == render_png(made, "A <title>")
    page = render_html(made, "A <title>").decode()
    assert "A &lt;title&gt;" in page
    assert "<b>" not in page
    for word in ("<script", "http:", "https:", "src="):
        assert word not in page
    cells = Cells()
    cells.feed(page)
    assert cells.found[:6] == ["100", "100", "100", "100", "100", "100"]
    assert cells.found[6:12] == ["0", "0", "0", "0", "100", "100"]


class Cells(HTMLParser):
    """The text of table cells in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag == "td"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found.append(data)
        self.inside = False


def test_a_server_is_right_when_its_greedy_answer_is() -> None:
    """A server that answers what it was given: right where the fact lies in the first half."""
    questions = Questions(("single",), (900,), depths=4, samples=2)
    tasks = questions.tasks(FILLER, encode)
    known = {
        tuple(prompt.ids.tolist()[: int(prompt.scored[0]) + 1]): prompt.targets.tolist()
        for cell, task in tasks.items()
        for prompt in task.prompts
        if (cell.depth or 0) < 0.5
    }

    class Server(BaseHTTPRequestHandler):
        def answer(self, value: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def do_GET(self) -> None:
            names = ("version", "kv_cache_dtype", "dtype", "device", "disable_radix_cache")
            numbers = ("chunked_prefill_size", "max_total_num_tokens", "page_size", "tp_size")
            info = dict.fromkeys(names, "") | dict.fromkeys(numbers, 1000)
            self.answer(info | {"max_req_input_len": 1000})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = known.get(tuple(body["input_ids"]), [0] * 6)
            assert body["sampling_params"]["max_new_tokens"] == len(said)
            self.answer({"output_ids": said, "meta_info": {"cached_tokens": 0}})

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = ServerClient(f"http://127.0.0.1:{server.server_port}")
        found = measure_servers({"one": client}, tasks, questions)
        long = replace(questions, lengths=(1001,))
        with pytest.raises(UsageError, match="takes 1,000 tokens"):
            measure_servers({"one": client}, tasks, long)
        server.shutdown()
    assert [(one.right, one.asked) for one in found.cells] == [(2, 2), (2, 2), (0, 2), (0, 2)]


def test_lengths_are_named_as_people_name_them() -> None:
    assert [length_text(n) for n in (1024, 131_072, 2000, 500)] == ["1k", "128k", "2,000", "500"]
