"""The wording of notes and questions on a terminal, which may say more than their own sentence."""

from __future__ import annotations

from rich.console import RenderableType

from oscar_zoo.app.progress import Note
from oscar_zoo.cli.render import computing, terminal
from oscar_zoo.cli.render.choice import choice_lines


def lines_of(note: Note) -> list[RenderableType]:
    """What to print for `note`."""
    if note.code == "compute.choice":
        return choice_lines(note.facts["choice"])
    if note.code == "server.failed":
        return [terminal.error_line(note.text, note.facts["hint"])]
    text = note.text
    if note.code == "compute.start":
        text = f"{text.removesuffix('.')}: {computing.plan_sentence(note.facts)}"
    return [terminal.clean(text if note.kind == "step" else f"{note.kind}: {text}")]


def question_of(note: Note) -> str:
    """The question that `note` asks."""
    if note.code == "compute.question":
        about = computing.about(note.facts["seconds"])
        return f"{note.text.removesuffix('?')} ({about})?"
    return note.text
