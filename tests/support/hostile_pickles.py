"""Pickles with any opcode in any place, and the bad files made of them."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tiny_artifacts as tiny
from hostile_archives import Case, with_content


@dataclass
class Raw:
    """Opcodes spelled out."""

    code: bytes


@dataclass
class Tensor:
    """A tensor as torch.save writes it, with every argument open to lies."""

    key: str
    shape: tuple[int, ...]
    stride: tuple[Any, ...] | None = None
    numel: int | None = None
    offset: Any = 0
    grad: Any = False
    storage: bytes = b"ctorch\nFloatStorage\n"
    function: bytes = b"ctorch._utils\n_rebuild_tensor_v2\n"
    hooks: bytes = b"ccollections\nOrderedDict\n)R"
    location: str = "cpu"
    kind: str = "storage"


def op(value: Any) -> bytes:
    match value:
        case Raw():
            return value.code
        case Tensor():
            return _tensor(value)
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if 0 <= value < 256:
            return b"K" + bytes([value])
        case int() if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        case int():
            return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + b"".join(map(op, value)) + b"t"
        case dict():
            return b"}" + b"".join(op(key) + op(item) + b"s" for key, item in value.items())
    raise TypeError(value)


def _tensor(t: Tensor) -> bytes:
    size = int(np.prod(t.shape))
    stride = t.stride or tuple(int(np.prod(t.shape[i + 1 :])) for i in range(len(t.shape)))
    storage = (
        b"(" + op(t.kind) + t.storage + op(t.key) + op(t.location) + op(t.numel or size) + b"tQ"
    )
    return (
        t.function
        + b"("
        + storage
        + op(t.offset)
        + op(t.shape)
        + op(stride)
        + op(t.grad)
        + t.hooks
        + b"tR"
    )


def top(**changes: Any) -> dict[Any, Any]:
    """The value in the good file; `changes` to top-level keys, `None` removes one."""
    layers = {i: layer(i) for i in tiny.LAYERS}
    value = {
        "format_version": 1,
        "objective": "qqt_r_h_pbr",
        "source_grouping": "layer",
        "layers": layers,
    }
    value |= changes
    return {key: item for key, item in value.items() if item is not None}


def layer(index: int, **changes: Any) -> dict[str, Any]:
    """One layer of the good file; a change to `...` removes a key."""
    d = tiny.D
    value = {
        "layer_id": index,
        "rotation": Tensor(str(2 * index), (d, d)),
        "eigenvalues": Tensor(str(2 * index + 1), (d,)),
    } | changes
    return {key: item for key, item in value.items() if item is not ...}


def of_pickle(code: bytes) -> bytes:
    return with_content("data.pkl", code)


def of(value: Any) -> bytes:
    return of_pickle(b"\x80\x02" + op(value) + b".")


def of_layer(**changes: Any) -> bytes:
    return of(top(layers={0: layer(0), 1: layer(1, **changes)}))


def cases() -> Iterator[Case]:
    yield from _pickles()
    yield from _tensors()


def _pickles() -> Iterator[Case]:
    code = b"\x80\x02" + op(top()) + b"."
    yield "protocol-0", "pickle.protocol", of_pickle(b"(dp0\n.")
    yield "protocol-3", "pickle.protocol", of_pickle(b"\x80\x03" + code[2:])
    yield "protocol-4", "pickle.protocol", of_pickle(b"\x80\x04" + code[2:])
    yield "pickle-empty", "pickle.truncated", of_pickle(b"")
    yield "no-stop", "pickle.truncated", of_pickle(code[:-1])
    yield "cut", "pickle.truncated", of_pickle(code[: len(code) // 2])
    yield "trailing", "pickle.trailing", of_pickle(code + b"N.")
    yield "two-objects", "pickle.stack", of_pickle(b"\x80\x02N" + op(top()) + b".")
    yield "nothing", "pickle.stack", of_pickle(b"\x80\x02.")
    yield "open-mark", "pickle.stack", of_pickle(b"\x80\x02" + op(top()) + b"(.")
    yield "a-number", "pickle.value", of_pickle(b"\x80\x02K\1.")
    yield "a-tuple", "pickle.value", of_pickle(b"\x80\x02).")
    for label, opcode in {
        "build": b"}b",
        "newobj": b")\x81",
        "inst": b"(ios\nsystem\n",
        "obj": b"(o",
        "ext": b"\x82\1",
        "pop": b"N0",
        "dup": b"2",
        "list": b"]",
        "append": b"Na",
        "stack-global": b"\x93",
        "frame": b"\x95" + bytes(8),
        "memoize": b"N\x94",
        "long4": b"\x8b\4\0\0\0\0\0\0\0",
        "int-text": b"I1\n",
        "put-text": b"Np0\n",
        "persid-text": b"P0\n",
        "bytes": b"C\0",
        "string": b"U\0",
        "set": b"\x8f",
        "reset": b"\xff",
    }.items():
        yield f"opcode-{label}", "pickle.opcode", of_pickle(b"\x80\x02" + opcode + op(top()) + b".")
    for name in (
        b"os\nsystem\n",
        b"builtins\neval\n",
        b"torch\nload\n",
        b"torch._utils\n_rebuild_parameter\n",
    ):
        data = f"global-{name.split()[-1].decode()}"
        yield data, "pickle.global", of_pickle(b"\x80\x02c" + name + b".")
    data = of_pickle(b"\x80\x02ctorch._utils _rebuild_tensor_v2\n\n.")
    yield "global-space", "pickle.global", data
    yield "global-endless", "pickle.global", of_pickle(b"\x80\x02c" + b"a" * 5000)
    yield "global-unicode", "pickle.global", of_pickle(b"\x80\x02ct\xc3\xb6rch\nx\n.")
    yield "call-text", "pickle.reduce", of(Raw(op("os") + b")R"))
    yield "call-storage", "pickle.reduce", of(Raw(b"ctorch\nFloatStorage\n)R"))
    yield "call-ordered", "pickle.reduce", of(Raw(b"ccollections\nOrderedDict\n" + op((1,)) + b"R"))
    yield "call-short", "pickle.reduce", of(Raw(b"ctorch._utils\n_rebuild_tensor_v2\n)R"))
    data = of(Raw(b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR"))
    yield "call-no-storage", "pickle.reduce", data
    yield "key-bool", "pickle.key", of({True: 1})
    yield "key-none", "pickle.key", of({None: 1})
    yield "key-float", "pickle.key", of({1.5: 1})
    yield "key-tuple", "pickle.key", of({(): 1})
    yield "key-twice", "pickle.duplicate_key", of(Raw(b"}" + 2 * (op("layers") + b"}s")))
    yield "key-int-twice", "pickle.duplicate_key", of(Raw(b"}" + 2 * (b"K\1" + b"}s")))
    yield "items-odd", "pickle.stack", of(Raw(b"}(K\1K\1K\1u"))
    yield "items-of-text", "pickle.stack", of(Raw(op("x") + b"K\1K\1s"))
    yield "items-of-nothing", "pickle.stack", of(Raw(b"K\1K\1s"))
    yield "tuple-no-mark", "pickle.stack", of(Raw(b"t"))
    yield "below-mark", "pickle.stack", of(Raw(b"K\1(\x85"))
    yield "value-tuple", "pickle.value", of(top(calibration={"tokens": (1,)}))
    data = of(top(calibration={"tokens": Raw(b"ctorch\nFloatStorage\n")}))
    yield "value-global", "pickle.value", data
    data = of(top(calibration=Raw(b"ccollections\nOrderedDict\n)R")))
    yield "value-ordered", "pickle.value", data
    yield "value-nan", "pickle.value", of(top(calibration={"created_at_unix": float("nan")}))
    yield "value-inf", "pickle.value", of(top(calibration={"created_at_unix": float("inf")}))
    yield "tuple-of-dict", "pickle.value", of(Raw(b"}\x85"))
    yield "tuple-long", "pickle.limit", of(tuple(range(9)))
    yield "text-long", "pickle.limit", of("x" * 5000)
    yield "text-huge", "pickle.limit", of_pickle(b"\x80\x02X\xff\xff\xff\xff.")
    yield "text-utf8", "pickle.text", of_pickle(b"\x80\x02X\2\0\0\0\xff\xfe.")
    yield "text-surrogate", "pickle.text", of_pickle(b"\x80\x02X\3\0\0\0\xed\xa0\x80.")
    yield "long-long", "pickle.limit", of_pickle(b"\x80\x02\x8a\xff" + bytes(255) + b".")
    yield "stack-deep", "pickle.limit", of_pickle(b"\x80\x02" + b"N" * 100_000 + b".")
    yield "marks-deep", "pickle.limit", of_pickle(b"\x80\x02" + b"(" * 100_000 + b".")
    yield "tuples-deep", "pickle.depth", of_pickle(b"\x80\x02)" + b"\x85" * 100_000 + b".")
    doubling = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(200))
    yield "tuples-doubled", "pickle.depth", of_pickle(b"\x80\x02)" + doubling + b".")
    dicts: Any = {}
    for _ in range(9):
        dicts = {"a": dicts}
    yield "dicts-deep", "pickle.depth", of(dicts)
    yield "dict-wide", "pickle.limit", of(dict.fromkeys(range(5000), 1))
    yield "pickle-huge", "pickle.limit", of_pickle(b"\x80\x02" + b"N" * (5 << 20))
    yield "dicts-many", "pickle.limit", of_pickle(_many_dicts(20 << 16))
    yield "dicts-many-short", "pickle.limit", of_pickle(_many_dicts(1 << 16))
    yield "tuples-many", "pickle.limit", of_pickle(b"\x80\x02}" + b"K\0)s" * 950_000 + b".")
    yield "tuples-many-short", "pickle.limit", of(Raw(_many_tuples(40_000)))
    yield "memo-skip", "pickle.memo", of(Raw(op("x") + b"q\1"))
    yield "memo-again", "pickle.memo", of(Raw(op("x") + b"q\0q\0"))
    yield "memo-far", "pickle.memo", of(Raw(op("x") + b"r\xff\xff\xff\x7f"))
    yield "memo-unset", "pickle.memo", of(Raw(b"h\0"))
    yield "memo-long-unset", "pickle.memo", of(Raw(b"j\xff\xff\xff\xff"))
    yield "memo-dict", "pickle.memo", of(Raw(b"}q\0h\0"))
    yield "memo-self", "pickle.memo", of(Raw(b"}q\0" + op("a") + b"h\0s"))
    yield "memo-number", "pickle.memo", of(Raw(b"K\1q\0h\0"))
    yield "memo-empty", "pickle.stack", of(Raw(b"q\0"))


def _many_dicts(count: int) -> bytes:
    """A pickle of `count` dicts in dicts, three bytes for most of them."""
    one = b"}"
    for width in (256, 256, -(-count >> 16)):
        one = b"}(" + b"".join(b"K" + bytes([i]) + one for i in range(width)) + b"u"
    return b"\x80\x02" + one + b"."


def _many_tuples(count: int) -> bytes:
    """Tuples of tuples, all of which are thrown away inside the size of a tensor."""
    return b"}(" + b"K\0" + b")))\x87" * count + b"u"


def _tensors() -> Iterator[Case]:
    d = tiny.D

    def matrix(**changes: Any) -> bytes:
        return of_layer(rotation=Tensor("2", changes.pop("shape", (d, d)), **changes))

    for kind in (
        "Double",
        "Half",
        "BFloat16",
        "Long",
        "Int",
        "Bool",
        "ComplexFloat",
        "QInt8",
        "Untyped",
    ):
        yield f"dtype-{kind}", "tensor.dtype", matrix(storage=f"ctorch\n{kind}Storage\n".encode())
    yield "meta", "pickle.storage", matrix(location="meta")
    yield "location", "pickle.storage", matrix(location="cuda:x")
    yield "kind", "pickle.storage", matrix(kind="module")
    yield "storage-key", "pickle.storage", of_layer(rotation=Tensor("../x", (d, d)))
    yield "storage-zero", "pickle.storage", of_layer(rotation=Tensor("2", (d, d), numel=-1))
    yield "storage-bool", "pickle.storage", of_layer(rotation=Tensor("2", (1, 1), numel=True))
    yield "storage-huge", "pickle.storage", matrix(numel=1 << 40)
    yield "offset", "tensor.offset", matrix(offset=1)
    yield "offset-bool", "tensor.offset", matrix(offset=False)
    yield "grad", "tensor.grad", matrix(grad=True)
    yield "grad-none", "tensor.grad", matrix(grad=None)
    yield "hooks", "pickle.reduce", matrix(hooks=b"N")
    yield "parameter", "pickle.global", matrix(function=b"ctorch._utils\n_rebuild_parameter\n")
    yield "sparse", "pickle.global", matrix(function=b"ctorch._utils\n_rebuild_sparse_tensor\n")
    yield "quantized", "pickle.global", matrix(function=b"ctorch._utils\n_rebuild_qtensor\n")
    yield "transposed", "tensor.stride", matrix(stride=(1, d))
    yield "expanded", "tensor.stride", matrix(stride=(0, 1))
    yield "stride-bool", "tensor.stride", matrix(stride=(d, True))
    yield "stride-short", "tensor.stride", matrix(stride=(d,))
    yield "scalar", "tensor.shape", matrix(shape=())
    yield "rank-4", "tensor.shape", matrix(shape=(1, 1, d, d))
    yield "empty-axis", "tensor.shape", matrix(shape=(0, d), numel=d * d)
    yield "negative-axis", "tensor.shape", matrix(shape=(-d, -d))
    data = matrix(shape=(1 << 30, 1 << 30, 1 << 30), numel=64, stride=(1 << 60, 1 << 30, 1))
    yield "overflow", "tensor.size", data
    yield "view", "tensor.size", matrix(numel=2 * d * d)
    yield "rank-3", "tensor.shape", matrix(shape=(1, d, d))
    yield "not-square", "tensor.shape", matrix(shape=(d // 2, d * 2))
    yield "rank-1", "tensor.shape", matrix(shape=(d * d,))
    yield "not-power", "tensor.shape", matrix(shape=(6, 6))
    yield "width-1", "tensor.shape", matrix(shape=(1, 1))
    yield "width-2048", "tensor.shape", matrix(shape=(2048, 2048))
    yield "record-short", "tensor.size", with_content("data/2", b"\0" * (4 * d * d - 4))
    yield "record-odd", "tensor.size", with_content("data/2", b"\0" * (4 * d * d + 1))
    yield "record-long", "tensor.size", with_content("data/2", b"\0" * (8 * d * d))
    yield "record-absent", "tensor.record", of_layer(rotation=Tensor("9", (d, d)))
    yield "shared", "tensor.shared", of_layer(rotation=Tensor("0", (d, d)))
    yield "shared-eigenvalues", "tensor.shared", of_layer(eigenvalues=Tensor("1", (d,)))
    yield "shared-sizes", "tensor.shared", of_layer(rotation=Tensor("0", (4, 4)))
    yield "orphan-layer", "tensor.orphan", of(top(layers={0: layer(0)}))
    yield "eigenvalues-shape", "tensor.shape", of_layer(eigenvalues=Tensor("3", (2, d // 2)))
