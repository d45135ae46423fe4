"""Sessions of an agent under several caches: how far each moves what the model says next, by
position, and what becomes of calls of tools and of names from earlier turns.

All sessions are teacher-forced: a call is what the model finds most likely at each of its tokens,
given the true ones before it, so no text is generated, and every cache sees the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import eq

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.caches import bit_facts, caches_of, encoder, facts_of
from oscar_zoo.evaluate.measure import (
    MAX_BYTES,
    TaskPrompt,
    all_logits,
    exact_predictions,
    room_for,
    simulating,
)
from oscar_zoo.evaluate.outcome import SessionsReport, SessionsRow
from oscar_zoo.evaluate.questions import Encode
from oscar_zoo.evaluate.run import SEED, Artifact
from oscar_zoo.evaluate.session_text import is_call, write_session
from oscar_zoo.evaluate.shared import Progress, mixed, ticking
from oscar_zoo.models.loading import LoadedModel

BINS = 4
"""Stretches of positions, each as long as all before it; the first two are of one length."""
Stretch = tuple[int, int]


@dataclass(frozen=True)
class Session:
    """One session of exactly as many tokens as asked for. `calls` and `recalls` are stretches of
    its scored positions; `sampled`, `[n]` bool, marks those that are spread evenly, whose
    divergence counts."""

    prompt: TaskPrompt
    calls: tuple[Stretch, ...]
    recalls: tuple[Stretch, ...]
    sampled: Tensor
    text: str

    @classmethod
    def write(
        cls, files: Mapping[str, str], encode: Encode, length: int, seed: str, room: int
    ) -> Session:
        """A session that scores `room` positions at most, half of them for calls and recalls."""
        ids: list[int] = []
        text, spans = "", dict[str, list[Stretch]](call=[], recall=[])
        for piece, kind in write_session(files, seed):
            start = len(ids)
            ids += encode(piece)
            if len(ids) > length:
                break
            text += piece
            if kind:
                spans[kind].append((start - 1, len(ids) - 1))  # the token before predicts one
        calls = _thinned(spans["call"], room * 3 // 8)
        recalls = _thinned(spans["recall"], room // 8)
        if not calls or not recalls:
            raise UsageError(
                f"a session of {length:,} tokens has no call or no question.",
                hint="give a larger --length",
            )
        wanted = {at for span in calls + recalls for at in range(*span)}
        number = min(length - 1, room - len(wanted))
        even = {at * (length - 1) // number for at in range(number)}
        scored = torch.tensor(sorted(wanted | even), device="cpu")

        def places(spans: list[Stretch]) -> tuple[Stretch, ...]:
            found = torch.searchsorted(scored, torch.tensor(spans, device="cpu")).tolist()
            return tuple((first, last) for first, last in found)

        return cls(
            TaskPrompt(torch.tensor(ids[:length], device="cpu"), scored),
            places(calls),
            places(recalls),
            torch.tensor([at in even for at in scored.tolist()], device="cpu"),
            text,
        )


@dataclass(frozen=True)
class _Said:
    """Of one session, at its scored positions: the most likely tokens, and the divergence from the
    exact cache in nats; `[n]` int64 and float64."""

    tokens: Tensor
    divergence: Tensor

    def at(self, stretch: Stretch) -> list[int]:
        found: list[int] = self.tokens[slice(*stretch)].tolist()
        return found


def measure_sessions(
    model: LoadedModel,
    *,
    artifact: Artifact | None,
    recipe: ServingRecipe,
    number: int,
    length: int,
    max_bytes: int = MAX_BYTES,
    progress: Progress = lambda done, total, unit: None,
) -> SessionsReport:
    """Measure `number` sessions of `length` tokens under BF16, data-free INT2 caches and that of an
    artifact. What the model says with the exact cache takes `max_bytes`, for which positions are
    thinned out evenly."""
    encode, caches = encoder(model.tokenizer), caches_of(model.block, artifact, recipe)
    files = {one["source"]: one["text"] for one in mixed("validation") if one["kind"] == "code"}
    room = room_for(model, max_bytes) // number
    sessions = [Session.write(files, encode, length, f"{SEED} {at}", room) for at in range(number)]
    prompts = [one.prompt for one in sessions]
    tick = ticking(progress, (1 + len(caches)) * number, "sessions")
    exact = exact_predictions(model, prompts, max_bytes=max_bytes, tick=tick)
    edges = [length >> at for at in reversed(range(BINS))]
    base: list[list[int]] = []
    rows = []
    for cache, spec in caches.items():
        said = []
        with simulating(model, spec):
            for at, logits in enumerate(all_logits(model, prompts)):
                said.append(_Said(logits.argmax(-1).cpu(), exact.divergences(at, logits)))
                tick()
        calls = [one.at(call) for one, of in zip(said, sessions, strict=True) for call in of.calls]
        base = base or calls
        row = SessionsRow(
            cache=cache,  # type: ignore[arg-type]
            # BF16 has none by definition.
            divergence=_divergence(sessions, said, 0, length) if spec else 0.0,
            divergence_to={
                str(end): _divergence(sessions, said, start, end) if spec else 0.0
                for start, end in zip([0, *edges], edges, strict=False)
            },
            calls_valid=_share(is_call(str(model.tokenizer.decode(call))) for call in calls),
            calls_same=_share(map(eq, calls, base)),
            call_tokens_same=_share(map(eq, chain(*calls), chain(*base))),
            recall=_share(
                one.at(answer) == of.prompt.targets[slice(*answer)].tolist()
                for one, of in zip(said, sessions, strict=True)
                for answer in of.recalls
            ),
            **bit_facts(spec, model.block, length),
        )
        rows.append(row)
    asked = {
        "sessions": number,
        "calls": sum(len(one.calls) for one in sessions),
        "recalls": sum(len(one.recalls) for one in sessions),
        "positions": sum(int(one.sampled.sum()) for one in sessions),
        "seed": SEED,
    }
    return SessionsReport(
        **facts_of(model, "".join(one.text for one in sessions), recipe),
        tokens=number * length,
        length=length,
        tasks={"sessions": asked},
        rows=tuple(rows),
    )


def _thinned(spans: list[Stretch], room: int) -> list[Stretch]:
    """Spans of the whole session that together have `room` tokens at most, about evenly spaced."""
    total = sum(end - start for start, end in spans)
    kept, used, passed = list[Stretch](), 0, 0
    for start, end in spans:
        passed += end - start
        if used + end - start <= room * min(1.0, passed / total):
            kept.append((start, end))
            used += end - start
    return kept


def _divergence(sessions: Sequence[Session], said: Sequence[_Said], start: int, end: int) -> float:
    """Mean over the evenly spread positions from `start` to `end - 1`."""
    values = []
    for session, one in zip(sessions, said, strict=True):
        scored = session.prompt.scored
        values += one.divergence[session.sampled & (scored >= start) & (scored < end)].tolist()
    return math.fsum(values) / len(values) if values else math.nan


def _share(holds: Iterable[bool]) -> float:
    found = list(holds)
    return sum(found) / len(found)
