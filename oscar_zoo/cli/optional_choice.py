"""An option with a choice that may stand alone, as `--drafts` in front of a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


class OptionalChoice(click.Option):
    """A choice that means `usual` where no value stands behind it.

    A word behind it is its value only where it is one of the choices. click alone takes any word
    that is no option.
    """

    def __init__(
        self, names: Sequence[str], *, choices: Sequence[str], usual: str, **others: Any
    ) -> None:
        super().__init__(names, **(others | {"type": click.Choice(choices)}))
        self.choices, self.usual = tuple(choices), usual

    def spelled_out(self, words: Sequence[str]) -> list[str]:
        """`words` with `usual` behind this option where it stands alone; nothing behind `--`
        changes."""
        cut = words.index("--") if "--" in words else len(words)
        spelled = list[str]()
        for place, word in enumerate(words[:cut]):
            valued = place + 1 < cut and words[place + 1] in self.choices
            spelled += [word, self.usual] if word in self.opts and not valued else [word]
        return [*spelled, *words[cut:]]
