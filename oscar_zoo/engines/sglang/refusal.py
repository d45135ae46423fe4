"""One feature that the INT2 cache does not support, and how it is refused. Needs neither torch nor
sglang.

A row has the flag or model property, a test whether it is in use, the reason, and what to use
instead. Tests read the resolved configuration through plain attributes. An attribute that a SGLang
version does not have counts as unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from oscar_zoo.errors import OscarZooError

Uses = Callable[[Any], bool]
STOCK = "without INT2, python -P -m sglang.launch_server --model-path ... --kv-cache-dtype auto"
"""Advice for a model that cannot have an INT2 cache; `oscar-zoo serve` starts no other servers."""


@dataclass(frozen=True)
class Refusal:
    """One row: `uses` looks at the configuration, and the three texts make up the message."""

    name: str
    uses: Uses
    reason: str
    instead: str

    @property
    def sentence(self) -> str:
        """The message without the hint."""
        return f"{self.name} does not work with an INT2 KV cache: {self.reason}."


def is_set(name: str) -> Uses:
    """Whether the attribute `name` is there and true."""
    return lambda config: bool(getattr(config, name, None))


def other_than(name: str, *allowed: object) -> Uses:
    """Whether the attribute `name` has a value that is not `allowed`."""
    return lambda config: getattr(config, name, None) not in (None, *allowed)


def above(name: str, limit: float) -> Uses:
    """Whether the attribute `name` is larger than `limit`."""
    return lambda config: (getattr(config, name, None) or limit) > limit


def check_rows(config: Any, rows: Iterable[Refusal], error: type[OscarZooError]) -> None:
    """Raise `error` for the first row that `config` uses; it names the row, the reason and what to
    use in its place."""
    for row in rows:
        if row.uses(config):
            raise error(row.sentence, hint=f"instead: {row.instead}")
