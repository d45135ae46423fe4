"""The command of a verb, made of its parameters: options, help, completion, `--json`, exit code."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.verb import Arg, Parameter, checked, parameters_of


def command(
    name: str,
    params: type,
    *,
    run: str,
    view: str,
    cls: type[click.Command] = click.Command,
    quiet: bool = True,
    then: str | None = None,
    observed: bool = True,
) -> click.Command:
    """The click command of a verb, whose help is the docstring of `params`. As `module:function`:

    `run`, from parameters, and an observer where it is `observed`, to an outcome, which may have
    `exit_code`, or the `error` that ended it; `view`, which prints the outcome for people and gets
    outcome, parameters and `quiet`; and `then`, which runs when the result was printed in any form,
    with what a view gets, and gives the exit code where the outcome has no other than 0.
    """

    def body(as_json: bool, quiet: bool = False, **values: Any) -> int:
        from oscar_zoo.cli.main import exit_code
        from oscar_zoo.cli.render import terminal
        from oscar_zoo.verb import as_json as plain

        if values.get("offline"):
            options.go_offline()
        request = checked(params, values)
        if observed:
            from oscar_zoo.cli.render.progress import TerminalObserver

            with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
                outcome = named(run)(request, observer)
        else:  # the import of an observer takes most of the time of a short verb
            outcome = named(run)(request)
        if as_json:
            terminal.emit_json(plain(outcome))
        else:
            named(view)(outcome, request, quiet=quiet)
        code = 0
        if then is not None:
            code = named(then)(outcome, request, quiet=quiet or as_json) or 0
        if (failure := getattr(outcome, "error", None)) is not None:
            return exit_code(failure)
        return getattr(outcome, "exit_code", 0) or code

    return of_body(name, params, body, cls=cls, quiet=quiet)


def of_body(
    name: str,
    params: type,
    body: Callable[..., int],
    *,
    cls: type[click.Command] = click.Command,
    quiet: bool = True,
) -> click.Command:
    """The click command that gives the values of `params`, `as_json` and `quiet` to `body`."""
    body.__doc__ = inspect.getdoc(params)
    for parameter in reversed(list(parameters_of(params))):
        body = declared(parameter)(body)
    own = body.__dict__.pop("__click_params__", [])
    made: Any = options.json_option(body)
    if quiet:
        made = options.quiet_option(made)
    made.__click_params__ += own  # click reads the list from its end
    return click.command(name, cls=cls)(made)


def declared(parameter: Parameter) -> Callable[[Any], Any]:
    """The argument or option of one field."""
    says, (kind, many, only_on) = parameter.says, _kind(parameter)
    shared: dict[str, Any] = {"metavar": says.metavar, "type": kind}
    if says.complete is not None:
        shared["shell_complete"] = getattr(completing, says.complete)
    if says.read is not None:
        shared["callback"] = _reader(says.read)
    if not parameter.required:
        shared["default"] = parameter.default
    if isinstance(says, Arg):
        shared |= {"required": parameter.required, "nargs": -1 if many else 1}
        if many or parameter.default is None:
            shared.pop("default", None)
        return click.argument(parameter.name, **shared)
    shared |= {"help": says.help, "show_default": says.shown, "envvar": says.variable}
    if says.kind is not None:
        shared["cls"] = named(says.kind)
    flag = says.flag or "--" + parameter.name.replace("_", "-")
    if not many:
        shared.setdefault("cls", options.Once)
    if kind is bool:
        two_sided = not only_on and "/" not in flag
        flag = f"{flag}/--no-{flag.removeprefix('--')}" if two_sided else flag
        return click.option(*flag.split(), parameter.name, is_flag=True, **shared)
    return click.option(
        *flag.split(), parameter.name, multiple=many, required=parameter.required, **shared
    )


def named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _reader(place: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def read(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(named(place)(one) for one in value)
        return named(place)(value) if isinstance(value, str) else value

    return read


def _kind(parameter: Parameter) -> tuple[Any, bool, bool]:
    """The type for click, whether it takes many, and whether a switch has no `--no-...`."""
    many = optional = False
    members = [parameter.type]
    while len(members) != 1 or get_origin(members[0]) in (tuple, Union, types.UnionType):
        inner = [part for member in members for part in (get_args(member) or (member,))]
        many = many or any(get_origin(member) is tuple for member in members)
        optional = optional or type(None) in inner
        members = list(dict.fromkeys(p for p in inner if p not in (type(None), Ellipsis)))
        if len(members) > 1 and not any(get_args(member) for member in members):
            break  # a text or a path: what it is, is said where it is read
    (first, *others) = members
    if parameter.says.read is not None or others:
        return options.Text(), many, False
    if get_origin(first) is Literal:
        return click.Choice(get_args(first)), many, False
    if first in (int, float):
        return _number(first, parameter), many, False
    known = {Path: options.Place(path_type=Path), bool: bool, str: options.Text()}
    return known[first], many, not optional


def _number(kind: type, parameter: Parameter) -> Any:
    least, most = parameter.says.least, parameter.says.most
    if least is None and most is None:
        return kind
    made: Any = click.IntRange if kind is int else click.FloatRange
    return made(least, most)
