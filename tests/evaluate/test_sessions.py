"""Sessions of an agent: what is written, and what is measured on them."""

import json
from itertools import islice

import pytest
from cli_output import check
from tiny_models import EXAMPLE

from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.sessions import Session, is_call, measure_sessions, schemas, write_session
from oscar_zoo.models.loading import load_model

FILES = {
    "a/store.py": "\n".join(f"def fetch_{n}(number):\n    return table[{n}]\n" for n in range(40)),
    "b/main.c": "\n".join(f"static int value_{n} = {n * n};" for n in range(60)),
}


def encode(text: str) -> list[int]:
    """A token per character."""
    return [ord(c) for c in text]


def written(length: int = 30_000, room: int = 10**6, seed: str = "0") -> Session:
    return Session.write(FILES, encode, length, seed, room)


def said(session: Session, stretches: tuple[tuple[int, int], ...]) -> list[str]:
    tokens = [chr(token) for token in session.prompt.targets.tolist()]
    return ["".join(tokens[first:last]) for first, last in stretches]


def test_a_session_has_its_length_and_its_calls_and_answers_are_in_it() -> None:
    session = written()
    assert len(session.prompt.ids) == 30_000
    assert session.prompt.scored.tolist() == list(range(29_999)) and bool(session.sampled.all())
    calls, answers = said(session, session.calls), said(session, session.recalls)
    assert len(calls) > 10 and all(map(is_call, calls))
    assert {json.loads(call)["name"] for call in calls} == {one["name"] for one in schemas()}
    assert len(answers) > 5
    text = "".join(map(chr, session.prompt.ids.tolist()))
    assert all(text.index(answer) < text.index(f"assistant\n{answer}\n") for answer in answers)


def test_a_seed_gives_the_same_session_and_another_one_another() -> None:
    assert written().prompt.ids.tolist() == written().prompt.ids.tolist()
    assert written(seed="1").text != written().text


def test_what_tools_return_is_what_the_files_have_after_all_edits() -> None:
    pieces = [piece for piece, _ in islice(write_session(FILES, "7"), 4000)]
    for at, piece in enumerate(pieces):
        if not piece.startswith('{"name": "rename"'):
            continue
        given = json.loads(piece)["arguments"]
        result = next(one for one in pieces[at:] if one.startswith("tool\n"))
        lines = result.split("\n")[2:-2]
        assert lines and all(given["to"] in line for line in lines)


@pytest.mark.parametrize("room", [2000, 8000])
def test_scored_positions_keep_to_the_room(room: int) -> None:
    session = written(room=room)
    assert len(session.prompt.scored) <= room
    assert session.calls and session.recalls
    assert all(map(is_call, said(session, session.calls)))
    places = session.prompt.scored[session.sampled].tolist()
    assert places[0] == 0 and places[-1] > 29_000


def test_a_session_without_a_call_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        written(length=200)
    assert "--length" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"name": "search"}',
        '{"name": "search", "arguments": {}}',
        '{"name": "search", "arguments": ["word"]}',
        '{"name": ["search"], "arguments": {"word": "x"}}',
        '{"name": "sleep", "arguments": {"word": "x"}}',
    ],
)
def test_what_is_no_call(text: str) -> None:
    assert not is_call(text)
    assert is_call('{"name": "search", "arguments": {"word": "x"}}')


def test_caches_are_measured_by_position() -> None:
    model = load_model(str(EXAMPLE), dtype="float32")
    recipe = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))
    width = model.model.get_output_embeddings().weight.shape[0]
    seen: list[tuple[int, int]] = []
    report = measure_sessions(
        model,
        artifact=None,
        recipe=recipe,
        number=1,
        length=2048,
        max_bytes=2 * width * 1600,
        progress=lambda done, total, unit: seen.append((done, total)),
    )
    check(report.to_json())
    assert seen[-1] == (5, 5)
    assert 1000 < report.tasks["sessions"]["positions"] <= 1600
    exact, plain, *_ = report.rows
    assert (exact.cache, exact.divergence) == ("bf16", 0.0)
    assert (exact.calls_same, exact.call_tokens_same) == (1.0, 1.0)
    assert list(plain.divergence_to) == ["256", "512", "1024", "2048"]
    assert plain.divergence_to["256"] < 1e-5, "the windows hold these"
    assert plain.divergence_to["512"] < plain.divergence_to["2048"]
    assert plain.call_tokens_same < 1.0
