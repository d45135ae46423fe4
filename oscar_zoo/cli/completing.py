"""What a shell offers for names and paths: asks no hub, loads no torch, and never fails.

Commands give these functions to their arguments; `BashComplete` is click's, with names that hold a
colon.
"""

from __future__ import annotations

from click import Context, Parameter
from click import shell_completion as click_completion
from click.shell_completion import CompletionItem

Items = list[CompletionItem[str]]


def names(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """What a hub may have: models; versions once a colon or a slash is typed."""
    from oscar_zoo.registry import known_names

    if ":" in incomplete:
        return _starting(
            incomplete, [version.reference for version in known_names.known_versions()]
        )
    found = known_names.known_models()
    if "/" in incomplete:
        return _starting(incomplete, [*map(str, known_names.known_versions()), *found])
    return _starting(incomplete, [name for name in found if "/" not in name])


def versions(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """Versions by their full name, `NAME:TAG`, for commands that change one."""
    from oscar_zoo.registry import known_names

    return _starting(incomplete, [version.reference for version in known_names.known_versions()])


def stored(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """What the local store holds."""
    from oscar_zoo.registry import known_names

    ids = known_names.stored_versions()
    if ":" in incomplete:
        return _starting(incomplete, [version.reference for version in ids])
    if "/" in incomplete:
        return _starting(incomplete, [str(version) for version in ids])
    return _starting(incomplete, list(dict.fromkeys(version.model for version in ids)))


def families(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """Families of models with a recipe."""
    from oscar_zoo.registry.catalog import Catalog

    return _starting(incomplete, list(Catalog.packaged().families()))


def alternatives(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """What `eval --against` knows, behind the names that are typed already."""
    from oscar_zoo.evaluate.against_table import ALL, TABLE

    typed, comma, last = incomplete.rpartition(",")
    return [
        CompletionItem(f"{typed}{comma}{name}") for name in (*TABLE, ALL) if name.startswith(last)
    ]


def tasks(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """Benchmarks that `eval` asks, and the tasks that it answers by itself."""
    from oscar_zoo.cli.commands.eval import TEXT_TASKS
    from oscar_zoo.evaluate.benchmarks.tasks import NAMES

    return _starting(incomplete, [*TEXT_TASKS, *NAMES[:-1]])


def models(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """Names of the zoo and hub ids of models, or a folder."""
    from oscar_zoo.registry.catalog import Catalog

    recipes = Catalog.packaged().recipes()
    found = [
        name for recipe in recipes for name in recipe.names if ("/" in name) == ("/" in incomplete)
    ]
    return (
        _path(incomplete)
        or _starting(incomplete, sorted(set(found), key=str.casefold))
        or _any(incomplete)
    )


def names_or_paths(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """`names`, or a path when the word begins like one or no name fits."""
    return _path(incomplete) or names(context, parameter, incomplete) or _any(incomplete)


def stored_or_paths(context: Context, parameter: Parameter, incomplete: str) -> Items:
    """`stored`, or a path when the word begins like one or no name fits."""
    return _path(incomplete) or stored(context, parameter, incomplete) or _any(incomplete)


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
        before, colon, _ = self._typed.rpartition(":")
        if (
            colon
            and item.type == "plain"
            and item.value.casefold().startswith(f"{before}:".casefold())
        ):
            return f"{item.type},{item.value[len(before) + 1 :]}"
        return super().format_completion(item)


def register() -> None:
    """Let click use `BashComplete`."""
    click_completion.add_completion_class(BashComplete)


def _starting(incomplete: str, found: list[str]) -> Items:
    wanted = incomplete.casefold()
    return [CompletionItem(name) for name in found if name.casefold().startswith(wanted)]


def _path(incomplete: str) -> Items:
    """Let the shell complete a path, where `incomplete` begins like one."""
    return (
        [CompletionItem(incomplete, type="file")] if incomplete.startswith((".", "/", "~")) else []
    )


def _any(incomplete: str) -> Items:
    return [CompletionItem(incomplete, type="file")] if incomplete else []
