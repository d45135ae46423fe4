"""Rotation files that are almost right: mutants of good files, each made again from its number.

A mutant changes bytes, records, fields of headers, opcodes of the pickle or values of tensors, and
mends every checksum that it would otherwise break, so that it gets as far as the rule that it is
about.
"""

from __future__ import annotations

import functools
import pickletools
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny_artifacts as tiny
from hostile_archives import Record, archive, good_records
from hostile_pickles import Tensor, layer, op, top
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard, pbr_permutation
from oscar_zoo.artifact.writer import rotation_bytes

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NUMBERS = (0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 2**31 - 1, 2**31, 2**40, 2**62, -1, -8)
FLOATS = (0.0, -0.0, 1.0, float("nan"), float("inf"), 1e-45, 3.4e38, -1.0)
WORDS = ("cpu", "cuda:0", "layers", "rotation", "", "x" * 300, "0", "../x", "wush_k", "\x00")
SPLICES = tuple(b"}(tusq\x00h\x00N\x88\x89K\x01RQ.)c\x85\x86\x87\x8arj")


class Mutants:
    """The mutants of a list of good files.

    Args:
        originals: good files; without them, one small file of each format and the golden files.
    """

    def __init__(self, originals: Sequence[bytes] = ()) -> None:
        self.originals = tuple(originals) or small_files()

    def __getitem__(self, number: int) -> bytes:
        """The mutant of this number, always the same."""
        chance = random.Random(number)
        kind = KINDS[number % len(KINDS)]
        return kind(chance, self.originals[chance.randrange(len(self.originals))])


@functools.cache
def small_files() -> tuple[bytes, ...]:
    """One file of each kind, and what is committed."""
    sets = (tiny.rotation_set(), tiny.hadamard_set(), tiny.per_head_set(), tiny.partnered_set())
    golden = (path.read_bytes() for path in sorted(GOLDEN.rglob("*.pt")))
    return (*map(rotation_bytes, sets), *golden)


def some_bytes(chance: random.Random, data: bytes) -> bytes:
    """One to eight other bytes, anywhere."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def one_block(chance: random.Random, data: bytes) -> bytes:
    """A block cut out, emptied, repeated, or exchanged with another."""
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.choice((1, 4, 64, 512, len(data))))
    block = data[start:end]
    other = chance.randrange(len(data))
    change = chance.choice((b"", bytes(len(block)), block * 2, data[other : other + len(block)]))
    return data[:start] + change + data[end:]


def opcodes(chance: random.Random, data: bytes) -> bytes:
    """Opcodes of the pickle left out, repeated, exchanged or invented."""
    records = records_of(data)
    parts = list(_opcodes(records[0].content))
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(1, len(parts))
        other = chance.randrange(1, len(parts))
        how = chance.randrange(6)
        if how == 0:
            del parts[place]
        elif how == 1:
            parts.insert(place, parts[other])
        elif how == 2:
            parts[place], parts[other] = parts[other], parts[place]
        elif how == 3:
            parts.insert(place, bytes([chance.choice(SPLICES)]))
        elif how == 4:
            parts[place] = _argument(chance, parts[place])
        else:
            parts[place:place] = parts[other : other + chance.randrange(1, 30)]
        if len(parts) < 2:
            break
    records[0].content = b"".join(parts)
    return archive(records)


def pickle_bytes(chance: random.Random, data: bytes) -> bytes:
    """Bytes of the pickle, whatever they are."""
    records = records_of(data)
    change = chance.choice((some_bytes, some_bytes, one_block))
    records[0].content = change(chance, records[0].content)
    return archive(records)


def headers(chance: random.Random, data: bytes) -> bytes:
    """Fields of headers that lie."""
    records = records_of(data)
    end: dict[str, Any] = {"zip64": 0} if chance.random() < 0.5 else {}
    record = chance.choice(records)
    number = chance.choice((*NUMBERS[:14], len(record.content), len(record.content) + 1))
    how = chance.randrange(7)
    if how == 0:
        field = chance.choice(("needed", "flags", "method", "time", "date"))
        record.local[field] = number % 65536
    elif how == 1:
        field = chance.choice(("crc", "stored", "size"))
        chance.choice((record.local, record.central))[field] = number % 2**32
    elif how == 2:
        field = chance.choice(("disk", "internal", "external", "made_by"))
        record.central[field] = number % 65536
    elif how == 3:
        record.flags = chance.choice((0, 1, 8, 0x800, 0x808, 0x2000))
    elif how == 4:
        record.extra = chance.choice((b"", b"FB\0\0", b"FB\4\0ZZZZ", b"\1\0\x10\0" + bytes(16)))
    elif how == 5:
        field = chance.choice(("count", "size", "start", "here"))
        end[field] = number % 65536
    else:
        end[chance.choice(("prefix", "suffix", "middle", "comment"))] = bytes(1 + number % 100)
    return archive(records, **end)


def records_moved(chance: random.Random, data: bytes) -> bytes:
    """Records left out, repeated, exchanged, renamed, or with the content of another."""
    records = records_of(data)
    place, other = (chance.randrange(len(records)) for _ in range(2))
    how = chance.randrange(5)
    if how == 0:
        del records[place]
    elif how == 1:
        records.insert(place, records[other])
    elif how == 2:
        records[place], records[other] = records[other], records[place]
    elif how == 3:
        records[place].name = f"archive/{chance.choice(('data/9', 'data/00', 'version', *WORDS))}"
    else:
        records[place].content = records[other].content
    return archive(records)


def numbers(chance: random.Random, data: bytes) -> bytes:
    """Other numbers in tensors."""
    records = records_of(data)
    record = chance.choice([one for one in records if "/data/" in str(one.name)])
    content = bytearray(record.content)
    for _ in range(chance.choice((1, 1, 4, 64))):
        place = chance.randrange(max(1, len(content) // 4)) * 4
        if chance.random() < 0.5:
            content[place : place + 4] = struct.pack("<f", chance.choice(FLOATS))
        else:
            content[place] ^= 1 << chance.randrange(8)
    record.content = bytes(content)
    record.flags = chance.choice((0, 8, 0x800, 0x808))
    return archive(records, **({"zip64": 0} if chance.random() < 0.5 else {}))


def values(chance: random.Random, data: bytes) -> bytes:
    """Another value somewhere in what the pickle builds."""
    value = top()
    number, word = chance.choice(NUMBERS[:15]), chance.choice(WORDS)
    anything: Any = chance.choice((number, word, None, True, {}, chance.choice(FLOATS), {0: {}}))
    how = chance.randrange(6)
    if how == 0:
        value[chance.choice((*value, word))] = anything
    elif how == 1:
        where = chance.choice(("layer_id", "rotation", "eigenvalues", "q_rotation", word))
        value["layers"] = {0: layer(0), 1: layer(1, **{where: anything})}
    elif how == 2:
        value["layers"] = {chance.choice((number, word)): layer(0), 1: layer(1)}
    elif how == 3:
        value["calibration"] = {chance.choice(("tokens", "generation_id", word)): anything}
    else:
        shape = tuple(chance.choice((1, 2, 4, 8, 16, 64)) for _ in range(chance.randrange(4)))
        key, numel = str(chance.randrange(5)), chance.choice((None, 64, 8, number))
        offset, grad = chance.choice((0, 0, 0, number)), chance.choice((False, False, anything))
        rotation = Tensor(key, shape, numel=numel, offset=offset, grad=grad)
        value["layers"] = {0: layer(0), 1: layer(1, rotation=rotation)}
    records = records_of(small_files()[0])
    records[0].content = b"\x80\x02" + op(value) + b"."
    return archive(records)


def shared(chance: random.Random, data: bytes) -> bytes:
    """Layers that share records, as the layers of a Hadamard file do, in shapes of their own."""
    d = tiny.D
    layers = {}
    for number in range(2):
        shape = chance.choice(((d, d), (d, d), (1, d, d), (d // 2, d // 2), (4, 4, 4), (d * d,)))
        row = chance.choice(((d,), (d,), (d // 2,), (1, d)))
        matrix = Tensor(chance.choice("0001"), shape, numel=chance.choice((None, d * d)))
        ones = Tensor(chance.choice("1110"), row, numel=chance.choice((None, d)))
        layers[number] = layer(number, rotation=matrix, eigenvalues=ones)
    records = records_of(small_files()[1])
    records[0].content = b"\x80\x02" + op(top(objective="hadamard", layers=layers)) + b"."
    return archive(records)


Kind = Callable[[random.Random, bytes], bytes]
KINDS: tuple[Kind, ...] = (
    some_bytes,
    one_block,
    opcodes,
    opcodes,
    opcodes,
    pickle_bytes,
    headers,
    records_moved,
    numbers,
    values,
    shared,
)


@functools.lru_cache(64)
def _read_records(data: bytes) -> tuple[tuple[str, bytes], ...]:
    return tuple((str(record.name), record.content) for record in good_records(data))


def records_of(data: bytes) -> list[Record]:
    """Fresh records of a good file."""
    return [Record(name, content) for name, content in _read_records(data)]


@functools.lru_cache(64)
def _opcodes(code: bytes) -> tuple[bytes, ...]:
    starts = [place for _, _, place in pickletools.genops(code) if place is not None]
    return tuple(code[a:b] for a, b in zip(starts, [*starts[1:], len(code)], strict=True))


def _argument(chance: random.Random, opcode: bytes) -> bytes:
    """An opcode with another argument of the same length."""
    if len(opcode) == 1:
        return bytes([chance.choice(SPLICES)])
    place = chance.randrange(1, len(opcode))
    return opcode[:place] + bytes([chance.randrange(256)]) + opcode[place + 1 :]


Matrix = NDArray[np.float64]
Change = Callable[[RotationSet], RotationSet]


def spectra(dynamic_range: float, seed: int, d: int = 64) -> Matrix:
    """Two covariances whose diagonal spans `dynamic_range`, a few channels far above the rest."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.uniform(0, 1, d))
    scale[:: d // 4] *= np.sqrt(dynamic_range)
    rows = (
        rng.standard_normal((2, 4 * d, d)) @ (np.eye(d) + 0.1 * rng.standard_normal((d, d))) * scale
    )
    return np.asarray(np.swapaxes(rows, -2, -1) @ rows / (4 * d))


def other_signs(rotations: RotationSet) -> RotationSet:
    """No mistake: the signs of eigenvectors are arbitrary."""

    def flip(matrix: NDArray[np.float32]) -> NDArray[np.floating]:
        order, d = _order(matrix), len(matrix)
        signs = np.random.default_rng(d).choice([-1.0, 1.0], d)
        vectors = matrix[:, order] @ hadamard(d) * signs
        return (vectors @ hadamard(d))[:, np.argsort(order)]

    return _by_layer(flip)(rotations)


def _by_layer(change: Callable[[NDArray[np.float32]], NDArray[np.floating]]) -> Change:
    def changed(layer: LayerTransform) -> LayerTransform:
        matrix = np.ascontiguousarray(change(layer.forward.copy()), np.float32)
        return replace(layer, forward=matrix, partner=matrix)

    return lambda rotations: replace(rotations, layers=tuple(map(changed, rotations.layers)))


def _order(matrix: NDArray[np.float32]) -> NDArray[np.int64]:
    """Where the columns of U H are in U H P."""
    return np.argsort(pbr_permutation(np.arange(len(matrix), dtype=np.float64)))


def _without_h(matrix: NDArray[np.float32]) -> NDArray[np.floating]:
    order = _order(matrix)
    return np.asarray((matrix[:, order] @ hadamard(len(matrix)))[:, np.argsort(order)])


def _swap_columns(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    matrix[:, [3, 7]] = matrix[:, [7, 3]]
    return matrix


def _negate_column(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    matrix[:, 5] *= -1
    return matrix


def _shift_layers(rotations: RotationSet) -> RotationSet:
    ids = [layer.layer_id for layer in rotations.layers]
    moved = zip(ids, rotations.layers[::-1], strict=True)
    return replace(rotations, layers=tuple(replace(layer, layer_id=i) for i, layer in moved))


def _scale_eigenvalues(rotations: RotationSet) -> RotationSet:
    doubled = ((layer, layer.eigenvalues) for layer in rotations.layers)
    return replace(
        rotations, layers=tuple(replace(a, eigenvalues=b * 2) for a, b in doubled if b is not None)
    )


def _made_from(objective: str, seed: int) -> Change:
    """The rotation of other covariances, called like the right one."""

    def other(rotations: RotationSet) -> RotationSet:
        made = tiny.rotation_set(objective, matrices=spectra(100, seed, rotations.head_dim))
        return replace(made, objective=rotations.objective)

    return other


MISTAKES: dict[str, Change] = {
    "transposed": _by_layer(lambda r: r.T),
    "random": _by_layer(
        lambda r: np.linalg.qr(np.random.default_rng(3).standard_normal(r.shape))[0]
    ),
    "plain Hadamard": _by_layer(lambda r: hadamard(len(r))),
    "layers shifted": _shift_layers,
    "values served as keys": _made_from("sst_r_h_pbr", 77),
    "another model": _made_from("qqt_r_h_pbr", 78),
    "without H": _by_layer(_without_h),
    "without P": _by_layer(lambda r: r[:, _order(r)]),
    "columns permuted": _by_layer(lambda r: r[:, np.random.default_rng(4).permutation(len(r))]),
    "columns swapped": _by_layer(_swap_columns),
    "column negated": _by_layer(_negate_column),
    "eigenvalues doubled": _scale_eigenvalues,
}
"""Twelve of them, each a function from the right rotation to a wrong one."""
