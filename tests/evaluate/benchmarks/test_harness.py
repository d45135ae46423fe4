"""The harness's own tasks with rows made here, in the format of each: asked, judged and kept."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="make install puts it there")

from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.benchmarks.answers import Answer, Generation, open_answers
from oscar_zoo.evaluate.benchmarks.harness import ArmResult, Settings, load_task, run_arm
from oscar_zoo.evaluate.benchmarks.tasks import Rows, benchmark, read_rows

Say = Callable[[str], str]
WRONG = "I do not know."
GENERATION = Generation(max_new_tokens=99, temperature=0.5)


def four_choices(number: int) -> list[dict[str, Any]]:
    return [
        {
            "Question": f"What is {at} + 1?",
            "Correct Answer": f"the number {at + 1}",
            **{f"Incorrect Answer {i}": f"the number {at + 100 * i}" for i in (1, 2, 3)},
        }
        for at in range(number)
    ]


def run(
    folder: Path, name: str, rows: list[dict[str, Any]], say: Say, *, seeds: tuple[int, ...] = (0,)
) -> ArmResult:
    """One cache whose server answers to the text of a question with `say`."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(benchmark(name), read_rows(path))

    def ask(request: Mapping[str, Any]) -> Answer:
        (message,) = request["messages"]
        assert message["role"] == "user" and request["max_tokens"] == 99
        return Answer(say(message["content"]), "stop", 10, 5)

    settings = Settings(GENERATION, seeds, concurrency=4, run_code=True)
    with open_answers(folder / "answers.gz", {"task": name}) as answers:
        found = run_arm("int2", task, settings, answers, ask=ask)
        again = run_arm("int2", task, settings, answers, ask=None)
    assert again.used == found.used
    assert (again.values == found.values).all()
    return found


def letter_of(question: str, choice: str) -> str:
    (letter,) = re.findall(rf"\(([A-D])\) {re.escape(choice)}$", question, re.MULTILINE)
    return str(letter)


@pytest.mark.parametrize("name", ["gpqa_diamond", "sample"])
def test_four_choices(name: str, tmp_path: Path) -> None:
    """The order of the choices is that of the prompt, at every look and in every repeat."""
    orders: dict[str, set[str]] = {}

    def say(question: str) -> str:
        number = int(re.findall(r"What is (\d+)", question)[0])
        orders.setdefault(f"{number}", set()).add(question)
        right = letter_of(question, f"the number {number + 1}")
        other = "ABCD".replace(right, "")[0]
        return f"Not (A). The answer is ({right if number % 2 else other})."

    found = run(tmp_path, name, four_choices(6), say, seeds=(3, 4))
    assert found.values.tolist() == [[at % 2] * 2 for at in range(6)]
    assert {len(texts) for texts in orders.values()} == {1}
    letters = {letter_of(*texts, f"the number {int(at) + 1}") for at, texts in orders.items()}
    assert len(letters) > 1, "the right answer is not always at the same place"


@pytest.mark.parametrize(
    ("name", "rows", "right"),
    [
        ("aime25", [{"problem": "What is 6 * 7?", "answer": "42"}], "So it is \\boxed{42}."),
        ("aime24", [{"Problem": "What is 6 * 7?", "Answer": 42}], "So it is \\boxed{42}."),
        (
            "math500",
            [{"problem": "Halve 1.", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "answer": "x"}],
            "We have $1 : 2$, so \\boxed{\\frac12}.",
        ),
        ("gsm8k", [{"question": "6 * 7?", "answer": "6 * 7 = 42\n#### 42"}], "It is 42."),
    ],
)
def test_answers_in_text(name: str, rows: list[dict[str, Any]], right: str, tmp_path: Path) -> None:
    asked = iter((right, WRONG))
    found = run(tmp_path, name, rows, lambda _: next(asked), seeds=(0, 1))
    assert sorted(found.values[0]) == [0, 1]


def test_instructions_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("langdetect")
    (tmp_path / "nltk" / "tokenizers" / "punkt_tab").mkdir(parents=True)
    monkeypatch.setattr("nltk.data.path", [str(tmp_path / "nltk")])  # else it would be fetched
    rows = [
        {
            "key": at,
            "prompt": f"Say {word} without commas.",
            "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
            "kwargs": [{"keywords": None}, {"keywords": [word]}],
        }
        for at, word in enumerate(("yes", "no", "maybe"))
    ]
    replies = {"yes": "yes it is", "no": "no, it is not", "maybe": "perhaps"}

    def say(question: str) -> str:
        return next(reply for word, reply in replies.items() if f"Say {word} " in question)

    assert run(tmp_path, "ifeval", rows, say).values.tolist() == [[1], [0], [0]]


def test_programs_are_run(tmp_path: Path) -> None:
    """Also one that ends Python before its tests, and one that is no code at all."""
    rows = [
        {
            "task_id": f"here/{at}",
            "prompt": f'from math import prod\n\ndef add{at}(a, b):\n    """The sum."""\n',
            "entry_point": f"add{at}",
            "test": f"def check(f):\n    assert f(2, {at}) == {2 + at}\n",
            "canonical_solution": "",
        }
        for at in range(5)
    ]
    replies = [
        "Here:\n```python\ndef add0(a, b):\n    return prod((a, 1)) + b\n```\nDone.",
        "    return a + b\n",
        "```python\ndef add2(a, b):\n    return a - b\n```",
        "```python\ndef add3(a, b):\n    raise SystemExit(0)\n```",
        WRONG,
    ]

    def say(question: str) -> str:
        return replies[int(re.findall(r"def add(\d)", question)[0])]

    assert run(tmp_path, "humaneval", rows, say).values[:, 0].tolist() == [1, 1, 0, 0, 0]


def test_choices_are_compared_by_log_probability(tmp_path: Path) -> None:
    rows = [
        {"question": f"Pick {at}.", "choices": list("wxyz"), "answer": at, "subject": "anatomy"}
        for at in range(4)
    ]
    task = load_task(benchmark("mmlu"), Rows({"": rows}, "sha256:0"))
    assert task.requests == 16

    def ask(request: Mapping[str, Any]) -> Answer:
        """Likes D, and A for the first question."""
        assert request["context"].endswith("\nAnswer:") and "anatomy" not in request["context"]
        liked = "A" if "Pick 0." in request["context"] else "D"
        value = -0.5 if request["continuation"].strip() == liked else -2.0
        return Answer("", "scored", 20, 0, log_probability=value)

    with open_answers(tmp_path / "answers.gz", {}) as answers:
        found = run_arm("int2", task, Settings(GENERATION, (0,)), answers, ask=ask)
    assert found.values.tolist() == [[1], [0], [0], [1]]
    assert (found.exhausted_rate, len(found.used)) == (0, 16)


def test_a_limit_takes_the_first_questions(tmp_path: Path) -> None:
    task = load_task(benchmark("sample"), None, limit=3)
    assert (task.requests, str(task.revision)[:7]) == (3, "sha256:")
    settings = Settings(GENERATION, (0,), limit=3)
    with open_answers(tmp_path / "answers.gz", {}) as answers:
        said = Answer(WRONG, "length", 10, 99)
        found = run_arm("int2", task, settings, answers, ask=lambda _: said)
    assert (len(found.values), found.exhausted_rate) == (3, 1)


@pytest.mark.parametrize("name", ["gpqa_diamond", "aime25", "mmlu", "humaneval"])
def test_rows_of_another_format_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"the rows are not in the format of {name}"):
        load_task(benchmark(name), Rows({"": [{"something": "else"}]}, None))


def test_unknown_names_are_told_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no such task: livecodebench") as told:
        benchmark("livecodebench")
    assert "gpqa_diamond" in str(told.value.hint) and "mmlu_SUBJECT" in str(told.value.hint)
    with pytest.raises(UsageError, match="the harness has no task mmlu_alchemy"):
        load_task(benchmark("mmlu_alchemy"), Rows({"": [{}]}, None))
