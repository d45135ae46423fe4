"""Triton's interpreter without the two thirds of its time that go into work done already.

While a kernel runs, the interpreter puts functions of its own in place of those of
`triton.language`. It looks for them again at every call of a device function, of which a launch
makes thousands. For every operation it builds types, and a type for every tuple of sizes in them.
It computes every sum of integers twice. Who imports this has it faster from then on.
"""

import functools
import importlib.util
import math
import os
from typing import Any


@functools.cache
def patch_once() -> None:
    """From now on, in this process, a call of a device function leaves alone what its launch has
    patched, types are built once, and nothing is computed that nobody looks at."""
    _patch_once_per_launch()
    _types_of_tuples_when_asked_for()
    _types_of_blocks_once()
    _numpy_types_once()
    _shapes_once()
    _equal_shapes_as_they_are()
    _no_second_sums()


def _patch_once_per_launch() -> None:
    from triton import language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch, is_builtin = interpreter._patch_lang, tl.core.is_builtin

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_lang(fn: Any) -> Any:
        first = [*(lang.program_id for lang in languages(fn)), tl.tensor.__add__, tl.math.exp]
        return patch(fn) if any(map(is_builtin, first)) else interpreter._LangPatchScope()

    def patch_attribute(holder: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = TritonSemantic(builder)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return member(*args, **named)

        scope.set_attr(holder, name, call)

    interpreter._patch_lang, interpreter._patch_attr = patch_lang, patch_attribute


def _no_second_sums() -> None:
    """Sums and products of 32-bit integers are computed with 64 bits as well, to see whether they
    fit; but the interpreter looks at that in its debug mode alone, which nothing turns on."""
    from triton.runtime import interpreter

    assert not interpreter.interpreter_builder.options.debug
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


def _types_of_tuples_when_asked_for() -> None:
    from triton.language import core

    make = core.tuple.__init__

    def init(self: Any, args: Any, *own: Any, **named: Any) -> None:
        if own or named:
            make(self, args, *own, **named)
        else:
            self.values = [*args]

    def type_of(self: Any) -> Any:
        if "known_type" not in self.__dict__:
            self.known_type = core._type_for_tuple_values(self.values)
        return self.known_type

    def set_type(self: Any, own_type: Any) -> None:
        self.known_type = own_type

    core.tuple.__init__, core.tuple.type = init, property(type_of, set_type)


def _types_of_blocks_once() -> None:
    from triton.language import core

    make, made = core.block_type.__init__, {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = (str(element_ty), sizes)
        if key not in made or not all(type(size) is int for size in sizes):
            make(self, element_ty, shape)
            made[key] = {**self.__dict__}
        self.__dict__.update(made[key])
        self.element_ty = element_ty

    core.block_type.__init__ = init


def _numpy_types_once() -> None:
    from triton import language as tl
    from triton.runtime import interpreter

    find, found = interpreter._get_np_dtype, {}

    def numpy_type(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in found:
            found[name] = find(scalar)
        return found[name]

    interpreter._get_np_dtype = numpy_type


def _shapes_once() -> None:
    from triton.language import core

    made: dict[Any, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, own_type: Any) -> None:
        shape = (*own_type.shape,) if own_type.is_block() else ()
        if shape not in made:
            made[shape] = (
                core.constexpr(math.prod(shape)),
                core.tuple([core.constexpr(size) for size in shape]),
            )
        self.handle, self.type, self.dtype = handle, own_type, own_type.scalar
        self.numel, self.shape = made[shape]

    core.tensor.__init__ = init


def _equal_shapes_as_they_are() -> None:
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def fitted(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return left, right
        pair: tuple[Any, Any] = broadcast(self, left, right)
        return pair

    TritonSemantic.broadcast_impl_value = fitted


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    patch_once()
