"""Sessions of an agent under several caches: how far each moves what the model says next, by
position, and what becomes of calls of tools and of names from earlier turns.

All sessions are teacher-forced: a call is what the model finds most likely at each of its tokens,
given the true ones before it, so no text is generated, and every cache sees the same tokens.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import eq
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate import measure
from oscar_zoo.evaluate.caches import SEED, Artifact, bit_facts, caches_of, encoder, facts_of
from oscar_zoo.evaluate.outcome import SessionsReport, SessionsRow
from oscar_zoo.evaluate.questions import Encode
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

    prompt: measure.TaskPrompt
    calls: tuple[Stretch, ...]
    recalls: tuple[Stretch, ...]
    sampled: Tensor
    text: str

    @classmethod
    def write(
        cls, files: Mapping[str, str], encode: Encode, length: int, seed: str, room: int
    ) -> Session:
        """It scores `room` positions at most, half of them for calls and recalls."""
        ids, text, spans = list[int](), "", dict[str, list[Stretch]](call=[], recall=[])
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
            measure.TaskPrompt(torch.tensor(ids[:length], device="cpu"), scored),
            places(calls),
            places(recalls),
            torch.tensor([at in even for at in scored.tolist()], device="cpu"),
            text,
        )


class _Said(NamedTuple):
    """Of one session, at its scored positions: the most likely tokens, and the divergence from the
    exact cache in nats; `[n]` int64 and float64."""

    tokens: Tensor
    divergence: Tensor

    def at(self, stretch: Stretch) -> Any:
        return self.tokens[slice(*stretch)].tolist()


def measure_sessions(
    model: LoadedModel,
    *,
    artifact: Artifact | None,
    recipe: ServingRecipe,
    number: int,
    length: int,
    max_bytes: int = measure.MAX_BYTES,
    progress: Progress = lambda done, total, unit: None,
) -> SessionsReport:
    """Measure `number` sessions of `length` tokens under BF16, data-free INT2 caches and that of an
    artifact. Positions are thinned out evenly until what the model says with the exact cache takes
    `max_bytes`."""
    encode, caches = encoder(model.tokenizer), caches_of(model.block, artifact, recipe)
    files = {one["source"]: one["text"] for one in mixed("validation") if one["kind"] == "code"}
    room = measure.room_for(model, max_bytes) // number
    sessions = [Session.write(files, encode, length, f"{SEED} {at}", room) for at in range(number)]
    prompts = [one.prompt for one in sessions]
    tick = ticking(progress, (1 + len(caches)) * number, "sessions")
    exact = measure.exact_predictions(model, prompts, max_bytes=max_bytes, tick=tick)
    edges = [length >> at for at in reversed(range(BINS))]
    base, rows = list[list[int]](), []
    for cache, spec in caches.items():
        said = []
        with measure.simulating(model, spec):
            for at, logits in enumerate(measure.all_logits(model, prompts)):
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
    values = []
    for session, one in zip(sessions, said, strict=True):
        scored = session.prompt.scored
        values += one.divergence[session.sampled & (scored >= start) & (scored < end)].tolist()
    return math.fsum(values) / len(values) if values else math.nan


def _share(holds: Iterable[bool]) -> float:
    found = list(holds)
    return sum(found) / len(found)


Kind = Literal["", "call", "recall"]
Piece = tuple[str, Kind]
"""A stretch of a session: a call of a tool as one JSON object, an answer that an earlier turn has,
or anything else."""
_TOOLS = {
    "read_file": ("Return lines of a file with their numbers.", ("path",), ("first", "last")),
    "search": ("Find a word in all files; at most 12 lines are returned.", ("word",), ()),
    "edit_file": ("Replace a text that occurs once by another.", ("path", "old", "new"), ()),
    "rename": ("Rename an identifier everywhere in a file.", ("path", "name", "to"), ()),
    "run_tests": ("Run the tests of a file.", ("path",), ("seconds",)),
}
"""What each tool does, and its arguments: texts, then whole numbers."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{4,}")
_PARTS = (
    "amber basin cedar delta ember fjord grove heron inlet jetty kiosk lumen maple north".split()
)
_PEOPLE = "Amara Bjorn Chidi Dolores Emeka Farah Gustav Hiroko Ines Jamal Katya Liu".split()
_ROWS, _HITS = 18, 12


def schemas() -> list[dict[str, Any]]:
    found = []
    for name, (says, texts, numbers) in _TOOLS.items():
        types = dict.fromkeys(texts, "string") | dict.fromkeys(numbers, "integer")
        properties = {one: {"type": kind} for one, kind in types.items()}
        parameters = {"type": "object", "properties": properties, "required": list(texts)}
        found.append({"name": name, "description": says, "parameters": parameters})
    return found


def is_call(text: str) -> bool:
    """Whether it is a call of one of the tools, with every argument that it needs."""
    try:
        found = json.loads(text)
        needed = _TOOLS[found["name"]][1]
        return bool(set(needed) <= found["arguments"].keys())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def write_session(files: Mapping[str, str], seed: str) -> Iterator[Piece]:
    """The pieces of a session without an end; `files` are code by path."""
    return _Session(files, random.Random(seed)).pieces()


class _Session:
    def __init__(self, files: Mapping[str, str], rng: random.Random) -> None:
        self.rng = rng
        self.files = {path: text.split("\n") for path, text in files.items()}
        self.facts: list[tuple[str, str]] = []

    def pieces(self) -> Iterator[Piece]:
        tools = "\n".join(map(json.dumps, schemas()))
        yield f"system\nYou work on the files of a project with these tools:\n{tools}\n", ""
        turns = [self.read, self.read, self.search, self.edit, self.rename, self.test, self.note]
        yield from self.read()
        yield from self.note()
        while True:
            yield from self.rng.choice(turns)()
            if self.rng.random() < 0.6:
                yield from self.ask()

    def read(self) -> Iterator[Piece]:
        path, lines = self.some_file()
        first = self.rng.randint(1, max(1, len(lines) - _ROWS // 2))
        last = min(len(lines), first + self.rng.randint(_ROWS // 3, _ROWS))
        said = (
            f"Show me lines {first} to {last} of {path}.",
            f"What is in {path}, lines {first}-{last}?",
            f"I need to see {path} from line {first} up to line {last}.",
            f"open {path} {first}:{last}",
        )
        yield from self.call(said, "read_file", path=path, first=first, last=last)
        yield self.result(self.numbered(lines, range(first, last + 1)))
        names = dict.fromkeys(_WORD.findall("\n".join(lines[first - 1 : last])))
        seen = self.rng.sample(list(names), min(3, len(names)))
        used = ", ".join(f"`{name}`" for name in seen) or "nothing with a name"
        size = f"{last - first + 1} of {len(lines)}"
        yield f"assistant\nThese are {size} lines; they use {used}.\n", ""

    def search(self) -> Iterator[Piece]:
        _, lines = self.some_file()
        word = self.some_word(lines)
        said = (
            f"Where is `{word}` used?",
            f"Find every place with `{word}`.",
            f"grep {word} please, over everything",
            f"Before I touch it: which lines mention `{word}`?",
        )
        yield from self.call(said, "search", word=word)
        hits = [
            f"{path}:{at}: {line.strip()}"
            for path, lines in self.files.items()
            for at, line in enumerate(lines, 1)
            if word in line
        ]
        yield self.result("\n".join(hits[:_HITS]))
        where = len({hit.split(":")[0] for hit in hits})
        yield f"assistant\n{len(hits)} lines in {where} file(s) have `{word}`.\n", ""

    def edit(self) -> Iterator[Piece]:
        path, lines = self.some_file()
        once = [at for at, line in enumerate(lines) if len(line) > 12 and lines.count(line) == 1]
        at = self.rng.choice(once or [0])
        old, name = lines[at], self.new_name(self.some_word(lines))
        indent = old[: len(old) - len(old.lstrip())]
        new = f"{indent}{name}();\n{old}" if ";" in old else f"{indent}{name}()\n{old}"
        said = (
            f"Call `{name}()` right before line {at + 1} of {path}, which is `{old.strip()}`.",
            f"In {path}, put a call of `{name}` in front of this line:\n{old}",
        )
        yield from self.call(said, "edit_file", path=path, old=old, new=new)
        lines[at : at + 1] = new.split("\n")
        yield self.result(self.numbered(lines, range(max(1, at - 1), min(len(lines), at + 4) + 1)))
        yield f"assistant\n`{name}` is called at line {at + 1} of {path} now.\n", ""
        self.facts.append((f"Which function did I have you call first in `{old.strip()}`?", name))

    def rename(self) -> Iterator[Piece]:
        path, lines = self.some_file()
        name = self.some_word(lines)
        to = self.new_name(name)
        said = (
            f"Rename `{name}` to `{to}` in {path}.",
            f"`{name}` in {path} is a bad name, make it `{to}` everywhere in that file.",
            f"{path}: {name} -> {to}",
        )
        yield from self.call(said, "rename", path=path, name=name, to=to)
        changed = []
        for at, line in enumerate(lines, 1):
            lines[at - 1] = re.sub(rf"\b{name}\b", to, line)
            changed += [at] if lines[at - 1] != line else []
        yield self.result(self.numbered(lines, changed[:_HITS]))
        yield f"assistant\nDone: {len(changed)} line(s) of {path} have `{to}`.\n", ""
        self.facts.append((f"What is `{name}` of {path} called now?", to))

    def test(self) -> Iterator[Piece]:
        path, lines = self.some_file()
        limit = self.rng.randint(5, 300)
        said = f"Run the tests of {path}, {limit} s at most.", f"test {path} (limit {limit} s)"
        yield from self.call(said, "run_tests", path=path, seconds=limit)
        passed, took = self.rng.randint(3, 160), self.rng.uniform(0.02, 0.9) * limit
        at = self.rng.randint(1, len(lines))
        if self.rng.random() < 0.5:
            yield self.result(f"{passed} passed in {took:.2f}s")
            yield f"assistant\nAll {passed} tests pass.\n", ""
            return
        what = self.some_word(lines)
        yield self.result(
            f"{path}:{at}: in test_{what}\n    {lines[at - 1].strip()}\n"
            f"expected {self.rng.randint(-9, 999)}, got {self.rng.randint(-9, 999)}\n"
            f"1 failed, {passed} passed in {took:.2f}s"
        )
        yield f"assistant\n`test_{what}` fails at line {at}; {passed} others pass.\n", ""
        self.facts.append((f"Which test failed in {path} at line {at}?", f"test_{what}"))

    def note(self) -> Iterator[Piece]:
        path, _ = self.some_file()
        who, ticket = self.rng.choice(_PEOPLE), f"{self.rng.randrange(10**5, 10**6)}"
        told = f"{who} looks after {path}; changes go to ticket {ticket}."
        yield f"user\n{told}\nassistant\nNoted.\n", ""
        self.facts.append((f"Which ticket did I name with {who} for {path}?", ticket))

    def ask(self) -> Iterator[Piece]:
        """About any earlier turn, so often one far back."""
        if self.facts:
            question, answer = self.rng.choice(self.facts)
            yield f"user\n{question}\nassistant\n", ""
            yield answer, "recall"
            yield "\n", ""

    def call(self, said: Sequence[str], tool: str, /, **arguments: str | int) -> Iterator[Piece]:
        """In one of the ways in which it may be said."""
        yield f"user\n{self.rng.choice(said)}\nassistant\n<tool_call>\n", ""
        yield json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False), "call"
        yield "\n</tool_call>\n", ""

    def result(self, text: str) -> Piece:
        return f"tool\n<tool_response>\n{text}\n</tool_response>\n", ""

    def numbered(self, lines: list[str], which: range | list[int]) -> str:
        return "\n".join(f"{at}\t{lines[at - 1]}" for at in which)

    def some_file(self) -> tuple[str, list[str]]:
        return self.rng.choice(list(self.files.items()))

    def some_word(self, lines: list[str]) -> str:
        words: list[str] = sorted(set(_WORD.findall("\n".join(lines))))
        return self.rng.choice(words or ["value"])

    def new_name(self, name: str) -> str:
        return "_".join([name[:12].strip("_"), *self.rng.sample(_PARTS, 2)])
