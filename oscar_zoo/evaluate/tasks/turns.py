"""Conversations: a long text with facts, then questions, each followed by its own answer.

More text than the recent window stands between two questions, as a user may paste it. A server that
reuses its cache therefore reads the context, the questions and its own answers as INT2.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.tasks.base import TaskPrompt
from oscar_zoo.evaluate.tasks.recall import Encode, Recall

ROOM = 64
"""Tokens between two questions beyond the recent window, so that whole pages of the last answer are
behind it."""


@dataclass(frozen=True)
class Conversation:
    """The user's messages of a conversation, and the right answers.

    Attributes:
        says: token ids of every turn; the first holds the context.
        answers: the right answer to each.
    """

    says: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]


def conversations(
    ids: Tensor,
    encode: Encode,
    *,
    windows: Windows,
    number: int,
    turns: int = 3,
    length: int = 2000,
    seed: int = 0,
) -> tuple[Conversation, ...]:
    """Make conversations from a text.

    Args:
        ids: `[N]` int64, the text.
        encode: a tokenizer without special tokens.
        length: tokens of a whole conversation, at most.
    """
    between = windows.recent + ROOM
    least = windows.sink + windows.recent + between * (turns - 1)
    if length < 2 * least:
        raise UsageError(
            f"{length} tokens are too few for a conversation of {turns} turns with windows of"
            f" {windows.sink} first and {windows.recent} last tokens.",
            hint=f"--length of at least {2 * least}",
        )
    recall = Recall.from_tokens(
        ids,
        encode,
        windows=windows,
        answers=number * turns,
        per_prompt=turns,
        length=length - between * (turns - 1),
        seed=seed,
    )
    rng = random.Random(seed)
    starts = [[rng.randrange(len(ids) - between) for _ in range(turns - 1)] for _ in recall.prompts]
    return tuple(
        _conversation(prompt, [tuple(ids[a : a + between].tolist()) for a in places])
        for prompt, places in zip(recall.prompts, starts, strict=True)
    )


def _conversation(prompt: TaskPrompt, between: Sequence[tuple[int, ...]]) -> Conversation:
    ids: tuple[int, ...] = tuple(prompt.ids.tolist())
    # A token is predicted at the position before it.
    places = [(int(prompt.scored[a]) + 1, int(prompt.scored[b - 1]) + 2) for a, b in prompt.answers]
    says, end = [], 0
    for (first, last), filler in zip(places, [(), *between], strict=True):
        says.append(filler + ids[end:first])
        end = last
    return Conversation(tuple(says), tuple(ids[first:last] for first, last in places))
