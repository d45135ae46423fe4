"""Options of `eval --against`, and what does not go with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from oscar_zoo.errors import UsageError

if TYPE_CHECKING:
    from oscar_zoo.app.evaluate_against import AgainstRequest

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = (".html", ".png", ".svg")


def against_options(function: F) -> F:
    """Caches of other methods, and a chart of them."""
    from oscar_zoo.cli import completing

    given = (
        click.option(
            "--against",
            metavar="NAME[:BITS],...",
            shell_complete=completing.alternatives,
            help="Measure caches of other methods too, such as fp8,kivi:2, or all.",
        ),
        click.option(
            "--plot",
            "plots",
            type=click.Path(path_type=Path),
            metavar="FILE",
            multiple=True,
            help=(
                "Of --against: draw loss against bits, an .html, .png or .svg file. Can be"
                " repeated."
            ),
        ),
    )
    for option in reversed(given):
        function = option(function)
    return function


def against_request(
    given: Mapping[str, Any], engine: str, flags: tuple[str, ...]
) -> AgainstRequest | None:
    """The request of `--against`, or `None` without it.

    Args:
        given: options of `eval` by field, with `against` and `plots` where they were given.
    """
    from oscar_zoo.app.evaluate import EvaluateRequest
    from oscar_zoo.app.evaluate_against import AgainstRequest
    from oscar_zoo.evaluate.alternatives.table import choices

    if "against" not in given:
        if "plots" in given:
            raise UsageError("--plot needs --against.", hint="for example --against all")
        return None
    if "tasks" in given:
        raise UsageError(
            "--against measures divergence, perplexity and recall together.",
            hint="leave out --task",
        )
    if engine != "transformers" or flags:
        raise UsageError(
            "--against simulates caches in this process.", hint="leave out --engine and its flags"
        )
    names = tuple(given["against"].split(","))
    choices(names)
    rest = {name: value for name, value in given.items() if name not in ("against", "plots")}
    return AgainstRequest(EvaluateRequest(**rest), names)


def check_plots(files: tuple[Path, ...]) -> None:
    """Refuse files that could not be drawn; raises `UsageError`, `PathNotFound`."""
    from oscar_zoo.artifact.output_files import check_file

    for file in files:
        if file.suffix.lower() not in FORMATS:
            raise UsageError(
                f"{file} is neither a page nor a picture.",
                hint="name an .html, .png or .svg file",
            )
        check_file(file)
