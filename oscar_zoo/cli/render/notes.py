"""The wording of notes and questions, where a terminal says more than the note's own sentence."""

from __future__ import annotations

from oscar_zoo.app.progress import Note


def text_of(note: Note) -> str:
    """The line that shows `note`."""
    return note.text if note.kind == "step" else f"note: {note.text}"


def question_of(note: Note) -> str:
    """The question that `note` asks."""
    return note.text
