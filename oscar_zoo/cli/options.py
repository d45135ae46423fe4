"""Options that several commands share, each defined once, and what the text of an option means
where click has no type for it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from oscar_zoo.errors import OFFLINE_OPTION, UsageError

_QUIET = "Print results and errors only."
F = TypeVar("F", bound=Callable[..., Any])


class Once(click.Option):
    """An option with one value, or one of two names, of which click would take the last."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        self.multiple = True  # for the parser alone, which then keeps all
        super().add_to_parser(parser, ctx)
        self.multiple = False

    def consume_value(self, ctx: click.Context, opts: Any) -> Any:
        *others, value = opts.get(self.name) or [None]
        if {*others} - {value} and not ctx.resilient_parsing:
            got = (self.opts[-1], self.secondary_opts[-1]) if self.is_flag else (*others, value)
            text = f"{self.opts[-1]} is given twice: {' and '.join(got)}."
            raise UsageError(text, hint="leave out all but one")
        return super().consume_value(ctx, opts if value is None else {**opts, self.name: value})


class Text(click.types.StringParamType):
    """A word. click takes any one behind an option for its value, also the next option."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_no_option(value, "--", param, "value"), param, ctx)


class Place(click.Path):
    """A path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_no_option(value, "-", param, "path"), param, ctx)


def _no_option(value: Any, begin: str, param: click.Parameter | None, needed: str) -> Any:
    text = os.fspath(value)
    if isinstance(param, click.Option) and text.startswith(begin) and text != "-":
        named = f", or for a path of that name: ./{text}" if needed == "path" else ""
        said = f"{param.opts[-1]} needs a {needed}, and {text} is an option."
        raise UsageError(said, hint=f"put a {needed} behind {param.opts[-1]}{named}")
    return value


def json_option(function: F) -> F:
    """`--json`: exactly one JSON object on stdout, on errors too."""
    text = "Print one JSON object instead of text."
    return click.option("--json", "as_json", is_flag=True, help=text)(function)


def quiet_option(function: F) -> F:
    """`-q`: no progress, no notes."""
    return click.option("-q", "--quiet", is_flag=True, help=_QUIET)(function)


def accept_quiet(command: click.Command) -> None:
    """Let `command`, or those of a group, take `-q` also where it only leaves out notes."""
    for inner in getattr(command, "commands", {}).values():
        accept_quiet(inner)
    if isinstance(command, click.Group) or any(x.name == "quiet" for x in command.params):
        return
    option = click.Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_leave_out_notes, help=_QUIET
    )
    command.params.append(option)


def _leave_out_notes(context: click.Context, _: click.Parameter, value: bool) -> None:
    from oscar_zoo.cli.render import terminal

    terminal.NOTES.append(not value)
    context.call_on_close(terminal.NOTES.pop)


def go_offline() -> None:
    """What `--offline` means here, for libraries imported later, and for servers it starts."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OSCAR_ZOO_OFFLINE": OFFLINE_OPTION}


def parse_bits(text: str | None) -> float | Literal["auto"] | None:
    """The value of `--bits`, or `None` where the option was not given."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 2 <= value < 16:
        hint = "use 2 or 4 for all codes, a budget such as 2.75, or auto"
        raise UsageError(f"--bits {text!r} is no number from 2 to below 16.", hint=hint)
    return value
