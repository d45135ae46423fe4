"""What a shell offers for names and paths: asks no hub, loads no torch, and never fails.

Commands give these functions to their arguments; `BashComplete` is click's, with names that hold a
colon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from click import Context, Parameter
from click import shell_completion as click_completion
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from oscar_zoo.artifact.names import ArtifactId

Items = list[CompletionItem[str]]


def names(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """What a hub may have: models; versions once a colon or a slash is typed."""
    from oscar_zoo.registry import known_names

    return _named(incomplete, known_names.known_versions(), known_names.known_models())


def versions(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """Versions by their full name, `NAME:TAG`, for commands that change one."""
    from oscar_zoo.registry import known_names

    return _starting(incomplete, [version.reference for version in known_names.known_versions()])


def stored(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """What the local store holds."""
    from oscar_zoo.registry import known_names

    ids = known_names.stored_versions()
    return _named(incomplete, ids, [version.model for version in ids])


def families(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """Families of models with a recipe."""
    from oscar_zoo.registry.catalog import Catalog

    return _starting(incomplete, Catalog.packaged().families())


def alternatives(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """What `eval --against` knows, behind the names that are typed already."""
    from oscar_zoo.evaluate.against_table import ALL, TABLE

    typed, comma, last = incomplete.rpartition(",")
    found = [name for name in (*TABLE, ALL) if name.startswith(last)]
    return [CompletionItem(f"{typed}{comma}{name}") for name in found]


def tasks(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """Benchmarks that `eval` asks, and the tasks that it answers by itself."""
    from oscar_zoo.cli.commands.eval import TEXT_TASKS
    from oscar_zoo.evaluate.benchmarks.tasks import NAMES

    return _starting(incomplete, [*TEXT_TASKS, *NAMES[:-1]])


def models(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """Names of the zoo and hub ids of models, or a folder."""
    from oscar_zoo.registry.catalog import Catalog

    names = {name for recipe in Catalog.packaged().recipes() for name in recipe.names}
    found = [name for name in names if ("/" in name) == ("/" in incomplete)]
    return _or_path(incomplete, lambda: _starting(incomplete, sorted(found, key=str.casefold)))


def names_or_paths(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """`names`, or a path when the word begins like one or no name fits."""
    return _or_path(incomplete, lambda: names(context, parameter, incomplete))


def stored_or_paths(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """`stored`, or a path when the word begins like one or no name fits."""
    return _or_path(incomplete, lambda: stored(context, parameter, incomplete))


class BashComplete(click_completion.BashComplete):
    """Bash breaks words at colons: they are put together again, and only what follows the colon is
    offered."""

    name = "bash"
    _typed = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in (*args, incomplete):
            if words and (word == ":" or words[-1].endswith(":")) and not words[-1].startswith("-"):
                words[-1] += word
            else:
                words.append(word)
        *args, incomplete = words
        self._typed = incomplete
        return args, incomplete

    def format_completion(self, item: CompletionItem[str]) -> str:
        before = self._typed[: self._typed.rfind(":") + 1]
        if before and item.type == "plain" and item.value.casefold().startswith(before.casefold()):
            return f"{item.type},{item.value[len(before) :]}"
        return super().format_completion(item)


def register() -> None:
    """Let click use `BashComplete`."""
    click_completion.add_completion_class(BashComplete)


def _named(incomplete: str, ids: Sequence[ArtifactId], models: Iterable[str]) -> Items:
    if ":" in incomplete:
        return _starting(incomplete, [version.reference for version in ids])
    if "/" in incomplete:
        return _starting(incomplete, [*map(str, ids), *models])
    return _starting(incomplete, [model for model in dict.fromkeys(models) if "/" not in model])


def _starting(incomplete: str, found: Iterable[str]) -> Items:
    wanted = incomplete.casefold()
    return [CompletionItem(name) for name in found if name.casefold().startswith(wanted)]


def _or_path(incomplete: str, found: Callable[[], Items]) -> Items:
    """What was found, or a path that the shell completes, where the word begins like one or nothing
    else fits."""
    path = [CompletionItem(incomplete, type="file")]
    if incomplete.startswith((".", "/", "~")):
        return path
    return found() or (path if incomplete else [])
