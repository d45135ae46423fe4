"""Tasks: windows are cut as documented, facts lie where every cache reads INT2, and scores mean
what they say."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from tiny_models import EXAMPLE

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.measure import TaskPrompt, measure
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.models.loading import LoadedModel

VOCABULARY = 2048


@pytest.fixture(scope="module")
def encode(model: LoadedModel) -> Callable[[str], list[int]]:
    return lambda text: list(
        model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    )


@pytest.fixture(scope="module")
def ids(encode: Callable[[str], list[int]]) -> torch.Tensor:
    return torch.tensor(
        encode((EXAMPLE.parents[1] / "text/validation.txt").read_text("utf-8")[:30_000])
    )


def test_windows_are_evenly_taken_and_fewer_of_a_short_text() -> None:
    task = Perplexity.from_tokens(torch.arange(1000), windows=3, length=100)
    assert [int(p.ids[0]) for p in task.prompts] == [0, 300, 600]
    assert task.describe() == {"windows": 3, "length": 100, "predictions": 297}
    assert len(Perplexity.from_tokens(torch.arange(250), windows=6, length=100).prompts) == 2
    with pytest.raises(UsageError, match="99 tokens"):
        Perplexity.from_tokens(torch.arange(99), length=100)


@pytest.mark.parametrize("skip", [0, 40])
def test_perplexity_is_the_model_s_loss(model: LoadedModel, ids: torch.Tensor, skip: int) -> None:
    task = Perplexity.from_tokens(ids, windows=2, length=200, skip=skip)
    losses = []
    with torch.inference_mode():
        for prompt in task.prompts:
            labels = prompt.ids.clone()
            labels[: skip + 1] = -100
            losses.append(float(model.model(prompt.ids[None], labels=labels[None]).loss))
    result = measure(model, task)
    assert result.value == pytest.approx(math.exp(sum(losses) / 2), rel=1e-4)
    assert [n for _, n in result.parts] == [199 - skip, 199 - skip]


def test_uniform_logits_have_the_perplexity_of_the_vocabulary() -> None:
    task = Perplexity.from_tokens(torch.arange(600), windows=1, length=600)
    total, number = task.count(task.prompts[0], torch.zeros(599, VOCABULARY))
    assert task.result(total, number) == pytest.approx(VOCABULARY, rel=1e-6)
    assert task.result(1e6, 1) == math.inf


def oracle_logits(prompt: TaskPrompt) -> torch.Tensor:
    return torch.nn.functional.one_hot(prompt.ids[prompt.scored + 1], VOCABULARY).float()


def make(ids: torch.Tensor, encode: Callable[[str], list[int]], **options: object) -> Recall:
    return Recall.from_tokens(ids, encode, **({"windows": Windows(), "answers": 32} | options))  # type: ignore[arg-type]


ASKED = ((r"access code of (\w+)\?\nAnswer: (\d+)", " {} is {}"), (r"\n (\w+) = (\d+)", " {} = {}"))


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))


@pytest.mark.parametrize("windows", [Windows(), Windows(sink=300, recent=400)])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_fact_asked_for_lies_in_the_int2_region_of_every_question(
    model: LoadedModel,
    ids: torch.Tensor,
    encode: Callable[[str], list[int]],
    windows: Windows,
    seed: int,
) -> None:
    for i, prompt in enumerate(make(ids, encode, windows=windows, seed=seed).prompts):
        pattern, fact = ASKED[i % 2]
        assert len(prompt.ids) == 2048
        asked = re.findall(pattern, model.tokenizer.decode(prompt.ids))[-8:]
        codes = [
            model.tokenizer.decode(prompt.ids[prompt.scored[a:b] + 1]) for a, b in prompt.answers
        ]
        assert [code for _, code in asked] == codes
        quantized = prompt.ids[windows.sink : int(prompt.scored[0]) - windows.recent + 1].tolist()
        assert all(contains(quantized, encode(fact.format(name, code))) for name, code in asked)


def test_recall_is_one_for_a_perfect_model_and_falls_by_answer_or_token(
    ids: torch.Tensor, encode: Callable[[str], list[int]]
) -> None:
    by_answer, by_token = make(ids, encode), make(ids, encode, unit="token")
    prompt = by_answer.prompts[0]
    logits = oracle_logits(prompt)
    assert by_answer.count(prompt, logits) == (8.0, 8)
    logits[2] = 0.0
    logits[2, 7] = 1.0
    assert by_answer.count(prompt, logits) == (7.0, 8)
    assert by_token.count(prompt, logits) == (47.0, 48)


@pytest.mark.parametrize(
    "options", [{"length": 512}, {"windows": Windows(sink=64, recent=1900)}, {"answers": 0}]
)
def test_prompts_without_room_are_refused(
    ids: torch.Tensor, encode: Callable[[str], list[int]], options: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        make(ids, encode, **options)
    with pytest.raises(UsageError, match="filler"):
        make(torch.arange(100), encode)
