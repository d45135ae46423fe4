"""One statement of a signature that several implementations share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def signature_of(model: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Declare that a function takes the arguments of `model`, for type checkers and for `help`.

    The function is returned itself: a call costs no more.
    """

    def declared(function: Callable[..., R]) -> Callable[P, R]:
        named: Any = function
        named.__signature__ = inspect.signature(model)
        return function

    return declared
