"""Values of a serving recipe to try in place of its own: windows, clip ratios and group sizes, in
every combination. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from oscar_zoo.errors import UsageError

if TYPE_CHECKING:
    from oscar_zoo.artifact.manifest import ModelBlock
    from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows


@dataclass(frozen=True)
class Setting:
    """A recipe to measure with, and what was given in place of its own values, as plain JSON
    values: `sink`, `recent` and `group_size` as numbers, `clip` as `K,V`."""

    recipe: ServingRecipe
    changes: Mapping[str, Any]

    def differences(self, recipe: ServingRecipe) -> dict[str, str]:
        """The changes in which this setting differs from `recipe`, as text."""
        own = _values_of(recipe)
        return {name: str(value) for name, value in self.changes.items() if value != own[name]}


@dataclass(frozen=True)
class Values:
    """Values to try; an empty tuple leaves what the recipe says."""

    sink: tuple[int, ...] = ()
    recent: tuple[int, ...] = ()
    clip: tuple[Clip, ...] = ()
    group_size: tuple[int, ...] = ()

    def settings(self, recipe: ServingRecipe) -> tuple[Setting, ...]:
        """Every combination of the values over `recipe`; the last of them change fastest."""
        lists = {
            "sink": self.sink,
            "recent": self.recent,
            "clip": self.clip,
            "group_size": self.group_size,
        }
        given = {name: tuple(dict.fromkeys(values)) for name, values in lists.items() if values}
        combinations = (
            dict(zip(given, values, strict=True)) for values in product(*given.values())
        )
        return tuple(_setting(recipe, values) for values in combinations)


def check_settings(settings: Sequence[Setting], model: ModelBlock, length: int) -> None:
    """Refuse what cannot be measured on sequences of `length` tokens, before a model is loaded."""
    from oscar_zoo.artifact.specs import check_groups

    for setting in settings:
        group, windows = setting.recipe.group_size, setting.recipe.windows
        if "group_size" in setting.changes:
            check_groups(model.head_dims, group, model.id, option="--group-size {}")
        if not {"sink", "recent"}.isdisjoint(setting.changes) and (
            windows.sink + windows.recent >= length
        ):
            raise UsageError(
                f"with {windows.sink:,} first and {windows.recent:,} last tokens in BF16, nothing"
                f" of a sequence of {length:,} tokens is INT2.",
                hint="give smaller --sink and --recent, or a larger --length",
            )


def widest_windows(recipes: Sequence[ServingRecipe]) -> Windows:
    """Windows that hold those of all recipes."""
    windows = [recipe.windows for recipe in recipes]
    return windows[0].model_copy(
        update={
            "sink": max(one.sink for one in windows),
            "recent": max(one.recent for one in windows),
        }
    )


class TimeLeft:
    """How long the other combinations will take, from what BF16 and the first one took; `caches`
    are BF16 and the combinations, and of one alone nothing is told."""

    def __init__(self, caches: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._caches, self._clock = caches, clock
        self._began: float | None = None

    def after(self, done: int, total: int) -> float:
        """Seconds left when the first combination has just been measured, else 0."""
        each = total // self._caches
        if done == each:
            self._began = self._clock()
        if done != 2 * each or self._began is None:
            return 0.0
        return (self._caches - 2) * (self._clock() - self._began)


def _setting(recipe: ServingRecipe, values: Mapping[str, Any]) -> Setting:
    try:
        changed = recipe.override(**values)
    except UsageError:
        raise
    except ValueError:
        said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
        raise UsageError(
            f"no recipe has {said}.", hint="windows have at most 1,048,576 tokens"
        ) from None
    own = _values_of(changed)
    return Setting(changed, {name: own[name] for name in values})


def _values_of(recipe: ServingRecipe) -> dict[str, Any]:
    return {
        "sink": recipe.windows.sink,
        "recent": recipe.windows.recent,
        "clip": f"{recipe.clip.k:g},{recipe.clip.v:g}",
        "group_size": recipe.group_size,
    }
