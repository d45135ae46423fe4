"""Options of `eval` alone: values of the recipe, and those for `--engine sglang` with the servers
that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from oscar_zoo.cli.parsing import numbers, parse_clip
from oscar_zoo.errors import UsageError

if TYPE_CHECKING:
    from oscar_zoo.app.evaluate_server import ServerEvaluateRequest
    from oscar_zoo.engines.sglang.launch.variants import ServerVariant
    from oscar_zoo.evaluate.ablation import Values

F = TypeVar("F", bound=Callable[..., Any])

SERVER_OPTIONS: Mapping[str, Any] = {
    "url": None,
    "chunk": "512",
    "page_size": "1",
    "radix": "on",
    "tp": "1",
    "sweep": False,
    "full": False,
    "csv": None,
    "timeout": 1800.0,
}
"""Options that only `--engine sglang` has, with their defaults."""


def recipe_options(function: F) -> F:
    """Values of the recipe to measure with in place of its own."""
    given = (
        click.option(
            "--sink",
            metavar="N,...",
            help="First tokens kept in BF16. [default: the recipe's]",
        ),
        click.option(
            "--recent",
            metavar="N,...",
            help="Last tokens kept in BF16. [default: the recipe's]",
        ),
        click.option(
            "--clip",
            "clips",
            metavar="K,V",
            multiple=True,
            help="Clip ratios; can be repeated. [default: the recipe's]",
        ),
        click.option(
            "--group-size", metavar="N,...", help="Channels per scale. [default: the recipe's]"
        ),
    )
    for option in reversed(given):
        function = option(function)
    return function


def take_values(given: dict[str, Any]) -> Values:
    """The values of the options of `recipe_options`, which are taken out of `given`; raises
    `UsageError`."""
    from oscar_zoo.evaluate.ablation import Values

    clips = tuple(filter(None, map(parse_clip, given.pop("clips", ()))))
    lists = {
        name: numbers(written(name), given.pop(name), least=0 if name == "sink" else 1)
        for name in ("sink", "recent", "group_size")
        if name in given
    }
    return Values(**lists, clip=clips)


def without_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` for a server, which takes other clip ratios and no other values of the recipe."""
    rest = dict(given)
    values: Values = rest.pop("values")
    refused = [written(n) for n in ("sink", "recent", "group_size") if getattr(values, n)]
    if len(values.clip) > 1:
        refused.append("a list of --clip")
    if refused:
        raise UsageError(
            f"{refused[0]} is for the model in this process, and a server is asked here.",
            hint="leave it out, or leave out --engine and benchmarks",
        )
    return rest | {"clip": values.clip[0] if values.clip else None}


def server_eval_options(function: F) -> F:
    """What `eval --engine sglang` starts, or where it looks."""
    default = SERVER_OPTIONS
    given = (
        click.option("--url", metavar="URL", help="Measure this server instead of starting one."),
        click.option(
            "--chunk",
            default=default["chunk"],
            metavar="N,...",
            help="Prefill chunks. [default: 512]",
        ),
        click.option(
            "--page-size",
            default=default["page_size"],
            metavar="N,...",
            help="Page sizes. [default: 1]",
        ),
        click.option(
            "--radix",
            default=default["radix"],
            metavar="on,off",
            help="Prefix cache. [default: on]",
        ),
        click.option(
            "--tp",
            default=default["tp"],
            metavar="N,...",
            help="Tensor-parallel ranks. [default: 1]",
        ),
        click.option(
            "--sweep",
            is_flag=True,
            help=(
                "--chunk 512,8192 --page-size 1,16 --radix on,off, and --tp 1,2 where there are two"
                " GPUs."
            ),
        ),
        click.option(
            "--full", is_flag=True, help="Start every combination, not every pair of values."
        ),
        click.option(
            "--csv",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Also write a line per server to this file.",
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(1),
            default=default["timeout"],
            metavar="SECONDS",
            help="How long the start of a server may take, and one answer. [default: 1800]",
        ),
    )
    for option in reversed(given):
        function = option(function)
    return function


def refuse_server_options(given: Mapping[str, Any], flags: tuple[str, ...]) -> None:
    """Raise `UsageError` when an option or a flag was given that needs `--engine sglang`."""
    for name, default in SERVER_OPTIONS.items():
        if given[name] != default:
            raise UsageError(
                f"{written(name)} needs --engine sglang.",
                hint="try: oscar-zoo eval --help",
            )
    if flags:
        raise UsageError(
            f"{flags[0]} is for an engine.", hint="add --engine sglang, or leave it out"
        )


def server_request(
    given: Mapping[str, Any], server: Mapping[str, Any], flags: tuple[str, ...]
) -> ServerEvaluateRequest:
    """The request of `eval --engine sglang`."""
    from oscar_zoo.app.evaluate_server import ServerEvaluateRequest
    from oscar_zoo.cli.pasting import typed_again

    wanted = _variants(server, flags, given.get("device"))
    return ServerEvaluateRequest(
        **without_values(given),
        url=server["url"],
        timeout=server["timeout"],
        variants=wanted,
        extra=flags,
        again=typed_again("--model", "FOLDER"),
    )


def _variants(
    server: Mapping[str, Any], flags: tuple[str, ...], device: str | None
) -> tuple[ServerVariant, ...]:
    """The servers to start; none with `--url`."""
    from oscar_zoo.app.evaluate_server import sweep
    from oscar_zoo.engines.sglang.launch.variants import variants

    lists = ("chunk", "page_size", "radix", "tp")
    changed = [name for name in lists if server[name] != SERVER_OPTIONS[name]]
    if server["url"] is not None:
        if changed or server["sweep"] or server["full"] or flags:
            raise UsageError(
                "--url measures a server as it is.", hint="leave out what is for a new one"
            )
        return ()
    if server["sweep"]:
        if changed:
            raise UsageError(
                f"--sweep and {written(changed[0])} exclude each other.",
                hint="give one of them",
            )
        return sweep(device, full=server["full"])
    chunks, pages, tps = (
        numbers(f"--{name}", server[name.replace("-", "_")])
        for name in ("chunk", "page-size", "tp")
    )
    return variants(chunks, pages, _switches(server["radix"]), tps, full=server["full"])


def written(name: str) -> str:
    """The option whose field is `name`."""
    return f"--{name.replace('_', '-')}"


def _switches(text: str) -> tuple[bool, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not set(parts) <= {"on", "off"}:
        raise UsageError(
            f"--radix {text!r} is not on, off, or both.", hint="for example --radix on,off"
        )
    return tuple(part == "on" for part in dict.fromkeys(parts))
