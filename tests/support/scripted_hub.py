"""A real folder hub that behaves like a remote one: tags, proposals, and events in the order a test
gives."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oscar_zoo import errors
from oscar_zoo.registry.hubs.base import Change, Commit
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index

Event = Callable[["ScriptedHub", Change], Commit]


class ScriptedHub:
    """Every answer is that of a `LocalHub`; each commit runs the next of `events` in its place, if
    there is one."""

    def __init__(
        self, root: Path, *events: Event, name: str = "hf:org/zoo", exists: bool = True
    ) -> None:
        self.folder = LocalHub(root, must_exist=False)
        self.name, self.title = name, f"Hugging Face {name.partition(':')[2]}"
        self.events, self.exists = list(events), exists
        self.commits: list[Change] = []
        self.tags: dict[str, str | None] = {}
        self.refuse_tag: Exception | None = None
        self.down: errors.NetworkError | None = None
        self.created = 0

    def __getattr__(self, name: str) -> Any:
        if self.down is not None:
            raise self.down
        if not self.exists:
            raise errors.RepositoryNotFound.for_hub(self.title)
        return getattr(self.folder, name)

    def refresh(self) -> None:
        self.folder.refresh()

    def create(self) -> None:
        self.created += 1
        self.exists = True

    def at(self, revision: str) -> Any:
        """A tag names the present content here, whatever it stood on: versions do not change."""
        if revision not in self.tags and revision != self.folder.revision:
            raise errors.RevisionNotFound.for_hub(self.title, revision)
        return self.folder

    def commit(self, change: Change) -> Commit:
        event = self.events.pop(0) if self.events else ScriptedHub.write
        return event(self, change)

    def write(self, change: Change) -> Commit:
        """Take the change; a proposal is kept aside."""
        self.commits.append(change)
        if change.propose:
            return Commit(None, "https://hub.example/org/zoo/discussions/1")
        return self.folder.commit(change)

    def tag(self, name: str, revision: str | None, message: str) -> None:
        if self.refuse_tag is not None:
            raise self.refuse_tag
        if self.tags.setdefault(name, revision) != revision:
            raise errors.ConflictError(f"the tag {name} exists.")


def lose_reply(hub: ScriptedHub, change: Change) -> Commit:
    """The change arrives, the answer does not."""
    hub.write(change)
    raise errors.HubUnreachable.for_hub(hub.title, "connection reset")


def lose_request(hub: ScriptedHub, change: Change) -> Commit:
    """Nothing arrives."""
    raise errors.HubUnreachable.for_hub(hub.title, "connection reset")


def lose_reply_and_die(hub: ScriptedHub, change: Change) -> Commit:
    """The change arrives, and nothing answers after that."""
    hub.write(change)
    hub.down = errors.HubUnreachable.for_hub(hub.title, "connection refused")
    raise hub.down


def after(action: Callable[[], object]) -> Event:
    """Somebody else acts between the list and the commit."""

    def event(hub: ScriptedHub, change: Change) -> Commit:
        action()
        return hub.write(change)

    return event


def index_of(hub: LocalHub | ScriptedHub) -> Index:
    hub.refresh()
    data = hub.root_file("index.json")
    return Index.empty() if data is None else Index.from_bytes(data)


CALLS = ("open", "write", "fsync", "fchmod", "mkdir", "link", "rename", "replace")


class Injection:
    """Counts calls; at number `at` (and from then on, when `stays`) runs `act` instead of the
    call."""

    def __init__(self, at: int, act: Callable[[], None], *, stays: bool = False) -> None:
        self.at, self.act, self.stays, self.count = at, act, stays, 0

    @property
    def fired(self) -> bool:
        """Whether the operation got as far as call number `at`."""
        return self.count >= self.at

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Patch the calls of `os` while the block runs."""
        real = {name: getattr(os, name) for name in CALLS}

        def patched(name: str) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                self.count += 1
                if self.count == self.at or (self.stays and self.count > self.at):
                    self.act()
                return real[name](*args, **kwargs)

            return call

        try:
            for name in CALLS:
                setattr(os, name, patched(name))
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)


def raise_error(code: int = errno.ENOSPC) -> Callable[[], None]:
    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


def killed_at(number: int, operation: Callable[[], object]) -> bool:
    """Run `operation` in a forked child that dies at call `number`, as by SIGKILL; False when it
    ended before that."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with Injection(number, lambda: os._exit(137)).active():
                operation()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 137), f"the child failed with {code}"
    return code == 137
