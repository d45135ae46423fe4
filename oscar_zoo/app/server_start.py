"""The start of a server, as news to an `Observer`."""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.app.progress import Note, Observer


class StartObserver:
    """Passes the news of `own_server` on; see its `StartNews`.

    Args:
        label: what to call the server.
        observer: hears the news.
    """

    def __init__(self, label: str, observer: Observer) -> None:
        self._label, self._observer = label, observer

    def starting(self, log: Path) -> None:
        """See `StartNews`."""
        text = f"Starting SGLang for {self._label} (log: {log})"
        self._observer.note(Note("server.starting", text, {"log": str(log)}, kind="step"))

    def phase(self, name: str, seconds: float) -> None:
        """See `StartNews`."""
        self._observer.advance(name, int(seconds), 0, "s")

    def warn(self, text: str) -> None:
        """See `StartNews`."""
        self._observer.note(Note("server.environment", text))
