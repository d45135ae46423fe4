"""Questions of an evaluation set are found in calibration text however they are written, and only
they."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tokenizers import ChatLetters, Letters, write

from oscar_zoo.compute.data import (
    CalibrationData,
    EvaluationSet,
    check_overlap,
    evaluation_set,
    load_calibration,
    measure_overlap,
    sets_on_this_machine,
)
from oscar_zoo.errors import PathNotFound, UsageError

QUESTION = (
    "A train leaves the station at noon; its speed, 80 km/h, is constant. When does it arrive 200"
    " km away?"
)
SHORT = "Name the seven colours of rainbows."
TRIVIAL = "What is 2 + 2?"
OTHER = (
    "The quick brown fox jumps over the lazy dog while seventeen owls watch from their branches in"
    " the old oak."
)


@pytest.fixture(autouse=True)
def empty_hub_cache(own_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have evaluation sets in theirs."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(own_state / "hf"))


def data(*texts: str, overlaps_with: Sequence[str] = ()) -> CalibrationData:
    return CalibrationData(((1,),), 1, "text.txt", texts=texts, overlaps_with=tuple(overlaps_with))


def found(text: str, *items: str) -> tuple[int, int, int]:
    result = measure_overlap([text], EvaluationSet("set", items))
    return result.compared, result.partial, result.whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OTHER, (1, 0, 0)),
        (f"{OTHER} {QUESTION} {OTHER}", (1, 1, 1)),
        (QUESTION.upper().replace(" ", "\n\t").replace(";", " -- "), (1, 1, 1)),
        (" ".join(QUESTION.split()[:13]), (1, 1, 0)),
        (" ".join(QUESTION.split()[2:11]), (1, 0, 0)),
    ],
)
def test_thirteen_words_in_a_row_are_an_overlap(text: str, expected: tuple[int, int, int]) -> None:
    assert found(text, QUESTION) == expected


def test_short_questions_must_be_there_whole_and_trivial_ones_are_not_compared() -> None:
    assert found(f"Now: {SHORT.lower()} {TRIVIAL}", SHORT, TRIVIAL) == (1, 1, 1)
    assert found("Name the seven colours of a rainbow.", SHORT, TRIVIAL) == (1, 0, 0)


def test_scripts_without_spaces_are_compared_by_character() -> None:
    question = "一列火车中午从车站出发速度恒定什么时候到达"
    assert found(f"题目：{question}？答案是三点。", question) == (1, 1, 1)
    assert found("一列火车下午从机场出发速度不定，谁也不知道。", question) == (1, 0, 0)


def test_words_in_a_row_do_not_reach_over_two_texts() -> None:
    words = QUESTION.split()
    halves = [" ".join(words[:10]), " ".join(words[10:])]
    assert measure_overlap(halves, EvaluationSet("set", (QUESTION,))).partial == 0


vocabulary = st.lists(st.sampled_from([f"w{n}" for n in range(60)]), min_size=0, max_size=80)


@settings(deadline=None, max_examples=60)
@given(before=vocabulary, question=vocabulary, after=vocabulary, cut=st.integers(0, 80))
def test_the_measure_is_that_of_a_search_word_by_word(
    before: list[str], question: list[str], after: list[str], cut: int
) -> None:
    text = [*before, *question[:cut], *after]
    length = min(13, len(question))
    runs = {tuple(text[at : at + length]) for at in range(len(text))}
    expected = [
        tuple(question[at : at + length]) in runs
        for at in range(max(1, len(question) - length + 1))
    ]
    compared, partial, whole = found(" ".join(text), " ".join(question) or "?")
    assert compared == (len(question) >= 6)
    assert partial == (len(question) >= 6 and any(expected))
    assert whole == (compared and f" {' '.join(question)} " in f" {' '.join(text)} ")


def test_disjoint_sets_are_recorded_with_the_method() -> None:
    checked = check_overlap(
        data(OTHER), [EvaluationSet("a", (QUESTION, TRIVIAL)), EvaluationSet("b", (SHORT,))]
    )
    facts = checked.facts()
    assert facts.disjoint_from is not None
    assert [(d.dataset, d.method) for d in facts.disjoint_from] == [
        ("a", "exact+13-gram/1, 1 of 2 items"),
        ("b", "exact+13-gram/1, 1 of 1 items"),
    ]
    assert facts.overlaps_with == ()
    assert checked.notes == ()


def test_an_overlap_is_refused_with_its_numbers() -> None:
    sets = [EvaluationSet("quiz", (OTHER, QUESTION, SHORT))]
    text = f"{SHORT} {' '.join(QUESTION.split()[:15])}"
    with pytest.raises(UsageError) as caught:
        check_overlap(data(text), sets)
    assert (
        caught.value.message
        == "text.txt holds 2 of 3 questions of quiz (1 whole, the others by 13 words in a row; the"
        " first is number 2)."
    )
    assert "--allow-overlap" in str(caught.value.hint)
    allowed = check_overlap(data(text), sets, allow_overlap=True)
    assert (allowed.overlaps_with, allowed.disjoint_from) == (("quiz",), ())
    assert "2 of 3 questions of quiz" in allowed.notes[0]


def test_nothing_compared_is_nothing_claimed() -> None:
    assert check_overlap(data(OTHER), []).disjoint_from is None
    assert check_overlap(data(OTHER)).disjoint_from is None
    assert check_overlap(data(OTHER), [EvaluationSet("trivia", (TRIVIAL,))]).disjoint_from == ()


def test_a_set_chosen_by_name_needs_no_allowance_and_is_never_called_disjoint() -> None:
    chosen = data(QUESTION, overlaps_with=["quiz"])
    assert check_overlap(chosen, [EvaluationSet("quiz", (QUESTION,))]).overlaps_with == ("quiz",)
    elsewhere = check_overlap(chosen, [EvaluationSet("quiz", (OTHER,))])
    assert (elsewhere.overlaps_with, elsewhere.disjoint_from) == (("quiz",), ())


def test_held_out_text_is_compared_too(tmp_path: Path) -> None:
    path = write(tmp_path, f"{OTHER}<|endoftext|>{QUESTION}")
    load = {"tokens": len(OTHER), "seq_len": 16}
    apart = load_calibration(path, Letters(), **load)  # type: ignore[arg-type]
    assert check_overlap(apart, [EvaluationSet("quiz", (QUESTION,))]).disjoint_from
    held = load_calibration(path, Letters(), **load, heldout_tokens=16)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="1 of 1 questions of quiz"):
        check_overlap(held, [EvaluationSet("quiz", (QUESTION,))])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.txt", f"{QUESTION}<|endoftext|>\n{SHORT}"),
        ("q.jsonl", f'{{"id": 1, "Question": "{QUESTION}"}}\n{{"question": "{SHORT}"}}'),
        (
            "q.jsonl",
            f'{{"text": "{QUESTION}"}}\n{{"messages": [{{"role": "user", "content": "{SHORT}"}}]}}',
        ),
        ("q.csv", f'Answer,Question\n1,"{QUESTION}"\n2,{SHORT}\n'),
    ],
)
def test_a_set_is_read_from_a_file(tmp_path: Path, name: str, content: str) -> None:
    assert evaluation_set(write(tmp_path, content, name)) == EvaluationSet(name, (QUESTION, SHORT))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("q.jsonl", '{"question": "a"}\n{"answer": "b"}', "line 2 of .* has no question"),
        ("q.jsonl", '{"question": "a"}\n[]', "line 2 of .* has no question"),
        ("q.jsonl", "a", "line 1 of .* is not JSON"),
        ("q.csv", "a,b\n1,2\n", "row 1 of .* has no question"),
        ("q.csv", 'question\n"' + "x" * 200_000, "is not a CSV file"),
        ("q.csv", b"question\n\xff\n", "line 2 of .* is not UTF-8 text"),
        ("q.txt", " \n", "is empty"),
    ],
)
def test_a_set_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: Any, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        evaluation_set(write(tmp_path, content, name))


def test_names_that_mean_no_set_here() -> None:
    with pytest.raises(PathNotFound, match="no such evaluation set: gpqa") as caught:
        evaluation_set("gpqa")
    assert "gpqa_diamond" in str(caught.value.hint)
    with pytest.raises(PathNotFound, match="gpqa_diamond is not on this machine") as caught:
        evaluation_set("gpqa_diamond")
    assert "evaluation/gpqa_diamond.jsonl" in str(caught.value.hint)
    assert sets_on_this_machine() == ()


@pytest.fixture
def hub_cache(own_state: Path) -> Path:
    """The cache of the Hugging Face client with two known sets in it, one of them broken."""
    gpqa = own_state / "hf/hub/datasets--Idavidrein--gpqa/snapshots/abc"
    write(gpqa, f'Question,Answer\n"{QUESTION}",1\n', "gpqa_diamond.csv")
    write(gpqa, "Question\nanother set\n", "gpqa_main.csv")
    write(
        own_state / "hf/hub/datasets--HuggingFaceH4--MATH-500/snapshots/abc",
        '{"x": 1}',
        "test.jsonl",
    )
    return own_state


@pytest.mark.usefixtures("hub_cache")
def test_sets_are_found_in_the_cache_of_the_hub_client() -> None:
    assert sets_on_this_machine() == (EvaluationSet("gpqa_diamond", (QUESTION,)),)
    with pytest.raises(UsageError, match="1 of 1 questions of gpqa_diamond"):
        check_overlap(data(QUESTION))


def test_a_copy_of_the_user_comes_first(hub_cache: Path) -> None:
    write(hub_cache / "data/evaluation", json.dumps({"problem": SHORT}), "gpqa_diamond.jsonl")
    assert sets_on_this_machine() == (EvaluationSet("gpqa_diamond", (SHORT,)),)


@pytest.mark.usefixtures("hub_cache")
def test_an_evaluation_set_can_be_calibrated_on_and_says_so() -> None:
    loaded = load_calibration("gpqa_diamond", ChatLetters(), tokens=500, seq_len=64)
    checked = check_overlap(loaded)
    assert (checked.source, checked.chat_template, checked.overlaps_with) == (
        "gpqa_diamond",
        True,
        ("gpqa_diamond",),
    )
    assert checked.disjoint_from == ()
    assert "is an evaluation set" in checked.notes[0]


def test_a_parquet_copy_is_read_where_the_library_is(
    own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("HF_HUB_CACHE", str(own_state / "hub"))
    folder = own_state / "hub/datasets--openai--openai_humaneval/snapshots/abc/openai_humaneval"
    folder.mkdir(parents=True)
    parquet.write_table(
        arrow.table({"task_id": ["1"], "prompt": [QUESTION]}), folder / "test-0.parquet"
    )
    assert sets_on_this_machine() == (EvaluationSet("humaneval", (QUESTION,)),)
