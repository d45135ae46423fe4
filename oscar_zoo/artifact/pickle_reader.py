"""A machine for the few pickle opcodes that `torch.save` emits for a rotation file.

It imports nothing and calls nothing: three global names are compared as strings, the two callables
only build `TensorRef` records. Opcodes, and so objects, depth, stack, marks, memo and strings are
bounded while building, and an opcode outside the table ends the reading. The result consists of
exactly None, bool, int, float, str, dict (keys int or str) and `TensorRef`; a dict is never
reachable twice, and a storage has one size wherever it is named.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from oscar_zoo.errors import MalformedFile

MAX_BYTES = 1 << 20
MAX_OPCODES = 1 << 17
"""Opcodes that are followed, and so the most objects that are built. A layer takes 40 to 150."""
MAX_DEPTH = 8
MAX_STACK = 4096
MAX_MARKS = 16
MAX_MEMO = MAX_OPCODES
MAX_TEXT = 4096
MAX_TUPLE = 8
MAX_NUMEL = 1 << 32

_REBUILD = "torch._utils _rebuild_tensor_v2"
_STORAGE = "torch FloatStorage"
_ORDERED = "collections OrderedDict"
_OTHER_STORAGE = re.compile(r"torch [A-Za-z0-9]{1,20}Storage")
_KEY = re.compile(r"0|[1-9][0-9]{0,6}")
_LOCATION = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, eq=False)
class TensorRef:
    """A float32 tensor: C-contiguous, offset 0, filling the record `data/<key>`. Compared by
    identity."""

    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Global:
    name: str


@dataclass(frozen=True, eq=False)
class _Storage:
    key: str
    numel: int


@dataclass(frozen=True, eq=False)
class _Tuple:
    items: tuple[Any, ...]
    depth: int


@dataclass(eq=False)
class _Dict:
    entries: dict[int | str, Any] = field(default_factory=dict)
    depth: int = 1


_NO_HOOKS = object()
_RECALLABLE = (str, _Global, _Tuple, TensorRef)
_VALUES = (type(None), bool, int, float, str, TensorRef, _Dict)


def load(data: bytes | memoryview, *, what: str) -> Any:
    """Evaluate an untrusted pickle."""
    if len(data) > MAX_BYTES:
        raise MalformedFile(
            "pickle.limit", f"{what}: a pickle of {len(data)} bytes, at most {MAX_BYTES} are read."
        )
    return _plain(_Machine(bytes(data), what).run())


def _plain(value: Any) -> Any:
    if type(value) is _Dict:
        return {key: _plain(item) for key, item in value.entries.items()}
    return value


class _Machine:
    def __init__(self, data: bytes, what: str) -> None:
        self.data = data
        self.what = what
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.storages: dict[str, int] = {}

    def run(self) -> Any:
        if self.take(2) != b"\x80\x02":
            self.bad("protocol", "the pickle does not start with protocol 2")
        opcodes = 0
        while (code := self.take(1)) != b".":
            opcodes += 1
            if opcodes > MAX_OPCODES:
                self.bad("limit", f"the pickle has more than {MAX_OPCODES} opcodes")
            step = _STEPS.get(code)
            if step is None:
                message = f"the pickle uses the opcode 0x{code.hex()}, which no rotation file needs"
                self.bad("opcode", message)
            step(self)
            if len(self.stack) > MAX_STACK or len(self.marks) > MAX_MARKS:
                self.bad("limit", "the pickle needs too much stack")
        if self.position != len(self.data):
            self.bad(
                "trailing", f"{len(self.data) - self.position} bytes follow the end of the pickle"
            )
        if len(self.stack) != 1 or self.marks:
            self.bad("stack", f"the pickle ends with {len(self.stack)} objects on its stack")
        top = self.stack[0]
        if type(top) not in (_Dict, TensorRef):
            self.bad("value", "the pickle holds neither a dict nor a tensor")
        return top

    def bad(self, rule: str, message: str) -> NoReturn:
        raise MalformedFile(
            f"pickle.{rule}", f"{self.what}: {message} (near byte {self.position})."
        )

    def bad_tensor(self, rule: str, message: str) -> NoReturn:
        raise MalformedFile(f"tensor.{rule}", f"{self.what}: {message}.")

    def take(self, size: int) -> bytes:
        chunk = self.data[self.position : self.position + size]
        if len(chunk) != size:
            self.bad("truncated", "the pickle ends in the middle")
        self.position += size
        return chunk

    def number(self, layout: str) -> Any:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + 128)
        if end < 0:
            self.bad("global", "a global name does not end")
        text = self.data[self.position : end]
        self.position = end + 1
        return text.decode("ascii", "replace")

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            self.bad("stack", "the pickle takes from an empty stack")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            self.bad("stack", "the pickle closes a mark that is not open")
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def text(self) -> None:
        size = self.number("I")
        if size > MAX_TEXT:
            self.bad("limit", f"a text of {size} bytes, at most {MAX_TEXT} are read")
        try:
            self.stack.append(self.take(size).decode("utf-8", "strict"))
        except UnicodeDecodeError:
            self.bad("text", "a text is not UTF-8")

    def long(self) -> None:
        size = self.number("B")
        if size > 8:
            self.bad("limit", f"an integer of {size} bytes, at most 8 are read")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def binfloat(self) -> None:
        value = struct.unpack(">d", self.take(8))[0]
        if not math.isfinite(value):
            self.bad("value", "the pickle holds a number that is not finite")
        self.stack.append(value)

    def global_name(self) -> None:
        name = f"{self.line()} {self.line()}"
        if _OTHER_STORAGE.fullmatch(name) and name != _STORAGE:
            message = f"a tensor is stored as {name.removeprefix('torch ')}, only float32 is read"
            self.bad_tensor("dtype", message)
        if name not in (_REBUILD, _STORAGE, _ORDERED):
            self.bad("global", f"the pickle asks for {name[:80]!a}, which no rotation file needs")
        self.stack.append(_Global(name))

    def tuple_of(self, items: list[Any]) -> None:
        if len(items) > MAX_TUPLE:
            self.bad("limit", f"a tuple of {len(items)} items")
        if any(type(item) in (_Dict, TensorRef, float) for item in items):
            self.bad("value", "a tuple holds something no tensor needs")
        depth = 1 + max((item.depth for item in items if type(item) is _Tuple), default=0)
        if depth > MAX_DEPTH:
            self.bad("depth", f"tuples nest deeper than {MAX_DEPTH} levels")
        self.stack.append(_Tuple(tuple(items), depth))

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1] if len(self.stack) > (self.marks[-1] if self.marks else 0) else None
        if type(target) is not _Dict or len(items) % 2:
            self.bad("stack", "the pickle sets items of something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (int, str):
                self.bad("key", "a dict key is neither an integer nor a text")
            if key in target.entries:
                self.bad("duplicate_key", f"the key {ascii(key)[:80]} is set twice")
            if type(value) not in _VALUES:
                self.bad("value", "a dict holds something that is no plain value")
            if type(value) is _Dict:
                target.depth = max(target.depth, value.depth + 1)
            target.entries[key] = value
        if target.depth > MAX_DEPTH:
            self.bad("depth", f"dicts nest deeper than {MAX_DEPTH} levels")
        if len(target.entries) > MAX_STACK:
            self.bad("limit", f"a dict of more than {MAX_STACK} items")

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def put(self, index: int) -> None:
        if index != len(self.memo) or index >= MAX_MEMO:
            self.bad("memo", f"memo slot {index} is not the next one")
        item = self.pop()
        self.stack.append(item)
        self.memo.append(item if type(item) in _RECALLABLE else None)

    def get(self, index: int) -> None:
        item = self.memo[index] if index < len(self.memo) else None
        if item is None:
            self.bad("memo", f"memo slot {index} holds nothing that may be used again")
        self.stack.append(item)

    def persistent(self) -> None:
        match self.pop():
            case _Tuple(
                items=("storage", _Global(name=name), str(key), str(location), int(numel))
            ) if (
                name == _STORAGE
                and type(numel) is int
                and 0 < numel < MAX_NUMEL
                and _KEY.fullmatch(key)
                and _LOCATION.fullmatch(location)
            ):
                if self.storages.setdefault(key, numel) != numel:
                    self.bad_tensor("shared", f"the storage {key} is described with two sizes")
                self.stack.append(_Storage(key, numel))
            case _:
                self.bad("storage", "a storage is not described as torch.save does it")

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if type(function) is not _Global or type(arguments) is not _Tuple:
            self.bad("reduce", "the pickle calls something that is no known function")
        if function.name == _ORDERED and not arguments.items:
            self.stack.append(_NO_HOOKS)
        elif function.name == _REBUILD and len(arguments.items) == 6:
            self.stack.append(self.tensor(*arguments.items))
        else:
            self.bad("reduce", "the pickle calls a function with arguments it does not take")

    def tensor(self, *arguments: Any) -> TensorRef:
        storage, offset, size, stride, requires_grad, hooks = arguments
        if type(storage) is not _Storage or hooks is not _NO_HOOKS or type(size) is not _Tuple:
            self.bad("reduce", "a tensor is not described as torch.save does it")
        shape = size.items
        if type(offset) is not int or offset:
            self.bad_tensor("offset", "a tensor does not start at the beginning of its storage")
        if requires_grad is not False:
            self.bad_tensor("grad", "a tensor requires a gradient")
        if not 1 <= len(shape) <= 3 or not all(
            type(n) is int and 1 <= n < MAX_NUMEL for n in shape
        ):
            self.bad_tensor("shape", f"a tensor has the shape {ascii(shape)[:80]}")
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        given = stride.items if type(stride) is _Tuple else ()
        if given != strides or not all(type(n) is int for n in given):
            self.bad_tensor("stride", f"a tensor of shape {shape} is not contiguous")
        if math.prod(shape) != storage.numel:
            self.bad_tensor(
                "size", f"a tensor of shape {shape} lies in a storage of {storage.numel} numbers"
            )
        return TensorRef(storage.key, shape)


_STEPS: dict[bytes, Callable[[_Machine], None]] = {
    b"}": lambda m: m.stack.append(_Dict()),
    b")": lambda m: m.tuple_of([]),
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"X": _Machine.text,
    b"J": lambda m: m.stack.append(m.number("i")),
    b"K": lambda m: m.stack.append(m.number("B")),
    b"M": lambda m: m.stack.append(m.number("H")),
    b"G": _Machine.binfloat,
    b"N": lambda m: m.stack.append(None),
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b"\x8a": _Machine.long,
    b"c": _Machine.global_name,
    b"t": lambda m: m.tuple_of(m.pop_mark()),
    b"\x85": lambda m: m.tuple_of([m.pop()]),
    b"\x86": lambda m: m.tuple_of([m.pop() for _ in range(2)][::-1]),
    b"\x87": lambda m: m.tuple_of([m.pop() for _ in range(3)][::-1]),
    b"Q": _Machine.persistent,
    b"R": _Machine.reduce,
    b"s": _Machine.set_item,
    b"u": lambda m: m.set_items(m.pop_mark()),
    b"q": lambda m: m.put(m.number("B")),
    b"r": lambda m: m.put(m.number("I")),
    b"h": lambda m: m.get(m.number("B")),
    b"j": lambda m: m.get(m.number("I")),
}
"""Every opcode that is understood; STOP ends the loop."""
