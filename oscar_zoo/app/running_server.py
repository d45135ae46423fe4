"""A server that runs, in the hands of the process that started it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from oscar_zoo.app.server_records import Entry
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.front.middleware import PATH
from oscar_zoo.engines.sglang.launch.ready import ReadyFacts
from oscar_zoo.engines.sglang.launch.server import Server
from oscar_zoo.errors import ServerFailed

COUNT_SECONDS = 2.0
"""Seconds that a server may take to say how many requests it answers."""


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready. Use it as a context manager, or call `stop`.

    Attributes:
        url: its API, `http://HOST:PORT/v1`.
        log: everything that the engine printed.
        pid: the process that supervises the server, which is this one.
        artifact: label of the artifact.
        digest: digest of the artifact.
        level: how thoroughly the artifact was verified.
        model: the model as it was loaded: a folder or a hub id.
        recipe: serving recipe in force.
        device: `cpu` or `cuda`.
        tensor_parallel: ranks that share the model, each on a GPU or a part of the CPU.
        ranks: of the whole server: `tensor_parallel` times the groups that share the layers, times
            the replicas.
        drafts: what `drafts` chose for speculative decoding, in words; `None` without it.
        facts: what the server says of itself.
        key_file: private file with the key that requests need while the server runs; `None` when
            they need none.
        seconds: how long the start took.
        warnings: codes of verification, and sentences about the status of the artifact.
    """

    url: str
    log: Path
    pid: int
    artifact: str
    digest: str
    level: str
    model: str
    recipe: ServingRecipe
    device: str
    tensor_parallel: int
    ranks: int
    drafts: str | None
    facts: ReadyFacts
    key_file: Path | None
    seconds: float
    warnings: tuple[str, ...]
    _child: Server = field(repr=False)
    _client: ServerClient = field(repr=False)
    _entry: Entry = field(repr=False)
    _ends: ExitStack = field(repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.__exit__(kind, error, trace)

    def wait(self, draining: Callable[[int | None], None] = lambda requests: None) -> None:
        """Block until the server ends by itself; SIGTERM lets running requests finish, and
        `draining` is called before they do, with their number where the server tells it.

        Raises:
            ServerFailed: the server ended, with the cause from its log.
            SystemExit: SIGTERM to this process; the server has drained.
            KeyboardInterrupt: Ctrl-C.
        """
        status = self._child.wait(lambda: draining(self._requests()))
        self._entry.ended(self._child.cause().text, status)
        raise self._child.failure("the server ended")

    def _requests(self) -> int | None:
        """How many requests are being answered."""
        try:
            return int(self._client.get(PATH)["requests"])
        except (ServerFailed, KeyError):
            return None

    def stop(self) -> None:
        """End the server and everything that it started; nothing happens the second time."""
        self._ends.close()
