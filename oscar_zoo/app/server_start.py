"""The start of a server, as news to an `Observer`, and what to do when it fails."""

from __future__ import annotations

import re
from pathlib import Path

from oscar_zoo.errors import ServerFailed
from oscar_zoo.observer import Note, Observer

NO_MODEL = re.compile(
    r"couldn't connect to|is not a local folder|RepositoryNotFound|LocalEntryNotFound"
)
"""What transformers and the hub's client say when no hub has a model, or none can be asked."""
NO_ACCESS = re.compile(
    r"GatedRepo|gated repo|401 Client Error|403 Client Error|Unauthorized|[Aa]ccess to model \S+ is"
)
"""What they say when a model needs a token: the environment of a server holds none."""


class StartObserver:
    """Passes the news of `own_server` on; see its `StartNews`."""

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


def with_next_step(error: ServerFailed, source: str, again: str) -> ServerFailed:
    """The same error; with the next step where the model `source` could not be fetched."""
    if Path(source).is_dir():
        return error
    if NO_ACCESS.search(error.message):
        step = (
            f"the server has no token of yours; fetch {source} with it: hf download {source},"
            " then serve it with --offline"
        )
    elif NO_MODEL.search(error.message):
        step = f"if {source} lies in a folder: {again}"
    else:
        return error
    return ServerFailed(error.message, hint=f"{step}; {error.hint}")
