"""What a hub is: artifacts `<Model>/<tag>`, each a flat folder of files, beside an index and a
model card.

A hub moves bytes and lists them; it verifies nothing. The caller hashes the bytes that arrive. An
opened hub is one view: the first question pins a commit, and every later answer comes from that
commit until `refresh`.

Calls of hubs run on daemon threads: several at a time, or one that has to end in time. An abandoned
call goes on unobserved, must do no harm later, and cannot keep the process from ending. Whoever
waits here can be interrupted at once.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeVar

from oscar_zoo.artifact.names import ArtifactId

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Called with a file's path, the bytes fetched so far and the bytes in total."""

INDEX_NAME = "index.json"
TIMESTAMP_NAME = "timestamp.json"
CARD_NAME = "README.md"
MAX_ROOT_BYTES = 8 << 20
"""Largest index or card that is read."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE = frozenset(("1", "true", "yes", "on"))


def is_commit(value: object) -> bool:
    return isinstance(value, str) and _COMMIT.fullmatch(value) is not None


def is_true(variable: str) -> bool:
    return os.environ.get(variable, "").strip().casefold() in _TRUE


@dataclass(frozen=True)
class Limits:
    """How long a hub may take: seconds to connect and without a byte, bytes per second that a whole
    answer must reach beside a minute, and how often a request is sent that breaks off or meets a
    busy server."""

    connect: float = 10.0
    read: float = 30.0
    min_rate: int = 100_000
    tries: int = 3

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self) -> None:
        most = {"connect": 3600.0, "read": 3600.0, "min_rate": math.inf, "tries": 20}
        for name, limit in most.items():
            if not 0 < getattr(self, name) <= limit:
                raise ValueError(f"{name} is more than 0, and at most {limit:g}")


@dataclass(frozen=True, order=True)
class HubFile:
    """One file as a hub lists it; `git_oid` is the sha1 of its git blob, if that is all it has."""

    path: str
    size: int
    sha256: str | None
    git_oid: str | None = None


@dataclass(frozen=True)
class Change:
    """What one publish, yank or mirror writes, all of it in one commit: the files of a new version
    by plain name, none of which may exist before, and files of the root to create or replace.
    `parent` is the `revision` of the view that the change was made from."""

    artifact: ArtifactId | None
    files: Mapping[str, bytes]
    root: Mapping[str, bytes]
    parent: str | None
    message: str
    propose: bool = False

    @property
    def paths(self) -> dict[str, bytes]:
        return {f"{self.artifact}/{name}": data for name, data in self.files.items()} | dict(
            self.root
        )


@dataclass(frozen=True)
class Commit:
    """A change that a hub took; `proposal` is the address of a pull request that still has to be
    merged."""

    revision: str | None
    proposal: str | None = None


class Hub(Protocol):
    """A place to read artifacts from and to publish them to. Who asks one over the network may get
    a `NetworkError` (it did not answer; another hub may be asked), an `AccessError` (it refused; no
    other hub may be asked) or `RepositoryNotFound`."""

    @property
    def name(self) -> str:
        """As people write it and commands take it: `file:/srv/zoo`, `hf:org/name`."""

    @property
    def title(self) -> str:
        """The hub in a sentence: `Hugging Face org/name`."""

    @property
    def revision(self) -> str | None:
        """What all answers refer to: a 40-hex commit, or another token that changes with the
        content, or `None`."""

    def at(self, revision: str) -> Self:
        """The same hub as it was at `revision`."""

    def refresh(self) -> None:
        """Forget the pinned commit; the next question asks the hub again."""

    def artifacts(self) -> tuple[ArtifactId, ...]:
        """Every artifact the hub has, sorted."""

    def files(self, artifact: ArtifactId) -> tuple[HubFile, ...]:
        """The files of `artifact`, sorted by path."""

    def fetch(
        self, artifact: ArtifactId, path: str, *, limit: int, progress: Progress | None = None
    ) -> bytes:
        """The bytes of one file, as they are; more than `limit` are refused."""

    def root_file(self, path: str) -> bytes | None:
        """`index.json` or `README.md` of the hub, or `None` when it has none."""

    def commit(self, change: Change) -> Commit:
        """Write `change`, all of it at once."""

    def tag(self, name: str, revision: str | None, message: str) -> None:
        """Put the tag `name` (no slash) on `revision`; an equal tag is success. A hub without tags
        does nothing."""


def within(seconds: float, call: Callable[[], T], *, error: Callable[[], Exception]) -> T:
    """What `call` returns or raises, unless it takes longer than `seconds`; nothing is called
    where there are none."""
    if seconds <= 0:
        raise error()
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(call, future), daemon=True).start()
    if not wait([future], seconds).done:
        raise error()
    return future.result()


def in_parallel(calls: Sequence[Callable[[], T]], *, workers: int = 4) -> list[T]:
    """The results of `calls`, at most `workers` at a time. The first exception, or an interrupt of
    the thread that waits, is raised at once; calls that run then go on unobserved."""
    futures: list[Future[T]] = [Future() for _ in calls]
    waiting = iter(list(zip(calls, futures, strict=True)))
    taking, stopped = threading.Lock(), threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with taking:
                task = next(waiting, None)
            if task is None:
                return
            _run(*task)
            if task[1].exception() is not None:
                stopped.set()

    try:
        for _ in range(min(workers, len(futures))):
            threading.Thread(target=work, daemon=True).start()
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
    finally:
        stopped.set()
    return [future.result() for future in futures]


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised again in the thread that waits
        future.set_exception(error)
