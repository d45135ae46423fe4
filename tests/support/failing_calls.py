"""Disk failures and sudden death at the N-th system call of an operation."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

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
    """An action that fails as the operating system would."""

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
