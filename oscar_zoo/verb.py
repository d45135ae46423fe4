"""One definition of a verb: what goes in, and what comes out.

What goes in is a frozen dataclass. Its fields are the options of the command, the keywords of the
Python call and the rows of the documentation; the text of a field is written once, at the field.
What comes out is a frozen dataclass too. Its JSON and the schema of that JSON are made from it.
Pydantic checks the first and writes the second; it is imported when that happens, so `--help` and
shell completion load neither pydantic nor anything of the package.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal, ParamSpec, TypeVar, get_type_hints

P = ParamSpec("P")
M = TypeVar("M")
R = TypeVar("R")
C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True)
class Opt:
    """What a field says beside its type and its default: how its value is called, the `flag` where
    it is not the field's name (`a/b` are its two sides), the function of `cli.completing` that
    offers values, the `module:function` that reads the text of a command line, the bounds of a
    number, whether `--help` names the default, the variable of the environment, and the
    `module:class` of `cli` that makes the option."""

    help: str
    metavar: str | None = None
    flag: str | None = None
    complete: str | None = None
    read: str | None = None
    least: float | None = None
    most: float | None = None
    shown: bool = False
    variable: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Arg(Opt):
    """A field that is given by its place."""


@dataclass(frozen=True)
class Parameter:
    """One field of the parameters of a verb, as its readers need it."""

    name: str
    type: Any
    says: Opt
    default: Any

    @property
    def required(self) -> bool:
        return self.default is MISSING


def parameters_of(kind: type) -> Iterator[Parameter]:
    """The fields of a verb's parameters, then those of each group it inherits. A field without an
    `Opt` is for callers from Python."""
    hints = get_type_hints(kind, include_extras=True)
    own = {field.name: field for field in fields(kind)}
    order = [name for owner in kind.__mro__ for name in inspect.get_annotations(owner)]
    for name in dict.fromkeys(order):
        said = [x for x in getattr(hints[name], "__metadata__", ()) if isinstance(x, Opt)]
        if name in own and said:
            yield Parameter(name, hints[name].__origin__, said[0], _default(own[name]))


def python_call(params: Callable[P, M], run: Callable[[M], R]) -> Callable[P, R]:
    """A function with the fields of `params` as its arguments, for people who call from Python.
    It raises `UsageError` for a value that is none of its field's type."""

    @functools.wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run(checked(params, signature.bind(*args, **kwargs).arguments))

    signature = inspect.signature(params)
    call.__signature__ = signature  # type: ignore[attr-defined]
    assert isinstance(params, type)
    rows = [f"    {row.name}: {row.says.help}" for row in parameters_of(params)]
    call.__doc__ = "\n".join([str(run.__doc__), "", "Args:", *rows])
    return call


def shows(params: type) -> Callable[[C], C]:
    """Of a Python call whose `**options` are fields of `params`: `help` and notebooks show them."""

    def shown(call: C) -> C:
        own = [
            one
            for one in inspect.signature(call).parameters.values()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        named = {one.name for one in own}
        fields_too = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for one in inspect.signature(params).parameters.values()
            if one.name not in named
        ]
        call.__signature__ = inspect.Signature([*own, *fields_too])  # type: ignore[attr-defined]
        return call

    return shown


def checked(params: Callable[..., M], values: dict[str, Any]) -> M:
    """The parameters with these values; raises `UsageError` where one is none of its field's
    type."""
    from pydantic import ValidationError

    from oscar_zoo.errors import UsageError

    try:
        made: M = _adapter(params).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][:1]))
        raise UsageError(f"{place}: {first['msg']}.") from None
    return made


def as_json(outcome: Any) -> dict[str, Any]:
    """The JSON of what a verb found: plain values, under the names of the schema. An outcome of
    facts that only a model or a server names has a `to_json` of its own."""
    if hasattr(outcome, "to_json"):
        return dict(outcome.to_json())
    kind: Any = type(outcome)
    found: dict[str, Any] = _adapter(kind).dump_python(outcome, mode="json", by_alias=True)
    return found


def schema_of(kind: Any, mode: Literal["serialization", "validation"] = "serialization") -> Any:
    """The JSON Schema of what a verb prints: closed, every key required, without titles."""
    from oscar_zoo.artifact.specs import Closed

    return _adapter(kind).json_schema(mode=mode, by_alias=True, schema_generator=Closed)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
