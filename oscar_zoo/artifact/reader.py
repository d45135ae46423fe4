"""The only door for rotation files: untrusted bytes -> `RotationSet`, by our own strict parser.

A file is read once and completely into one bytes object (`files.read_file`), and that same object
is hashed and parsed. `archive` takes it apart and `pickle_reader` evaluates its pickle, and neither
imports or calls anything a file asks for. The closed schemas of format_version 1, 2 and 3 are here:
version, key set, grouping, tensor rank and objective must agree. An unknown key, a missing
companion matrix or a shared record is refused, because a loader that reads only `rotation` would
serve wrong numbers without an error. Rules that need numbers or a model are in `verify`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from oscar_zoo.artifact import archive, pickle_reader
from oscar_zoo.artifact.archive import DATA
from oscar_zoo.artifact.files import mistaken_content
from oscar_zoo.artifact.formats import (
    COMPOSITIONS,
    HESSIANS,
    Array,
    CalibrationValue,
    Grouping,
    LayerTransform,
    Role,
    RotationSet,
    has_hadamard,
)
from oscar_zoo.artifact.pickle_reader import TensorRef
from oscar_zoo.errors import MalformedFile, UnsupportedFormat

_LEGACY = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


MAX_HEAD_DIM = 1024
MAX_LAYER_ID = 1 << 16
MAX_MULTIPLICATIONS = 1 << 34
"""Most multiplications in one product of every matrix with its partner, which `checks` needs: 8,192
matrices of 128 channels, 1,024 of 256 or 16 of 1,024."""
PER_HEAD_OBJECTIVE = "cov_eig_hadamard_perhead"
"""Objective of the upstream per-head fitting script."""

GROUPINGS: Mapping[int, Mapping[str, Grouping]] = {
    1: {"layer": "layer"},
    2: {"per_kv_head": "kv_head"},
    3: {"layer": "layer", "head": "kv_head"},
}
"""format_version -> word of `source_grouping` in the file -> our word."""

PARTNER: Mapping[Role, str] = {"k": "q_rotation", "v": "o_rotation"}
_VERSION_3_OBJECTIVE = re.compile(r"[a-z][a-z0-9]{0,20}(_[a-z0-9]{1,20}){1,4}")
_TRANSFORM_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")
_HEX = re.compile(r"[0-9a-f]{1,64}")

_TEXT, _COUNT, _NUMBER = (str,), (int,), (int, float)
_CALIBRATION: Mapping[str, tuple[type, ...]] = {
    "generation_id": _TEXT,
    "model_path": (*_TEXT, type(None)),
    "model_revision": (*_TEXT, type(None)),
    "prompt_sha256": (*_TEXT, type(None)),
    "tokens": _COUNT,
    "max_tokens": _COUNT,
    "global_q_heads": _COUNT,
    "global_kv_heads": _COUNT,
    "tp_size": _COUNT,
    "post_rope": (bool,),
    "accumulator_dtype": _TEXT,
    "created_at_unix": _NUMBER,
    "fitter": _TEXT,
}
_CALIBRATION_3: Mapping[str, tuple[type, ...]] = {
    **_CALIBRATION,
    "init": (*_TEXT, type(None)),
    "init_objective": (*_TEXT, type(None)),
    "steps": _COUNT,
    "lr": _NUMBER,
    "k_quant": (*_TEXT, bool, *_NUMBER, type(None)),
    "v_quant": (*_TEXT, bool, *_NUMBER, type(None)),
}


def read_rotation(data: bytes, *, what: str) -> RotationSet:
    """Parse a whole untrusted rotation file. Arrays are read-only float32 views into `data`, or
    copies where it is not aligned."""
    _name_kind(data, what)
    records = archive.read_archive(data, what=what)
    top = pickle_reader.load(records[archive.PICKLE], what=what)
    return build(top, records, what=what)


def _name_kind(data: bytes, what: str) -> None:
    mistaken = mistaken_content(data)
    if mistaken is not None:
        reason, words, hint = mistaken
        raise MalformedFile(reason, f"{what} is {words}.", hint=hint)
    if data.startswith(_LEGACY):
        raise MalformedFile(
            "file.legacy_pickle",
            f"{what} is a bare pickle, not an archive.",
            hint="only files of torch >= 1.6 are read",
        )
    if data.startswith(b"GGUF"):
        raise UnsupportedFormat("gguf", f"{what} is a GGUF file, not a rotation file.")
    if not data.startswith(b"PK"):
        raise MalformedFile(
            "file.unknown", f"{what} is not a rotation file (it starts with {data[:4]!r})."
        )


def build(top: Any, records: Mapping[str, memoryview], *, what: str) -> RotationSet:
    """Check the value of a pickle against the schemas and attach the tensors."""
    _refuse_other_kinds(top, what)
    return _Builder(top, records, what).build()


def _refuse_other_kinds(top: Any, what: str) -> None:
    kind = ""
    if type(top) is TensorRef:
        kind = "mla_latent" if top.shape == (512, 512) else ""
    elif any(
        key in top
        for key in ("codebooks", "codebooks_per_layer", "codebooks_stage1", "codebooks_stage2")
    ):
        kind = "pq_codebooks"
    elif str(top.get("format_version", "")).startswith("identity-"):
        kind = "identity"
    elif "rotation" in top and "layers" not in top and "format_version" not in top:
        kind = "mla_latent"
    elif _has_moments(top):
        kind = "moments"
    if kind:
        raise UnsupportedFormat(
            kind, f"{what} is a {kind} file, not a rotation file.", hint=_KIND_HINTS[kind]
        )


def _has_moments(top: Mapping[Any, Any]) -> bool:
    layers = top.get("layers")
    first = next(iter(layers.values()), None) if type(layers) is dict else None
    return any(type(block) is dict and ("M_q" in block or "S_v" in block) for block in (top, first))


_KIND_HINTS = {
    "mla_latent": "rotations of MLA latents cannot be served by this version",
    "pq_codebooks": "product-quantisation codebooks are never loaded",
    "identity": "an identity rotation does nothing; use the bf16 cache instead",
    "moments": "moments are an input of `oscar-zoo compute`, not an artifact",
}


class _Builder:
    def __init__(self, top: Any, records: Mapping[str, memoryview], what: str) -> None:
        self.top = top
        self.records = records
        self.what = what
        self.users: dict[str, str] = {}
        self.arrays: dict[str, Array] = {}

    def bad(self, reason: str, message: str) -> NoReturn:
        raise MalformedFile(reason, f"{self.what}: {message}.")

    def build(self) -> RotationSet:
        if type(self.top) is not dict:
            self.bad("schema.foreign", "the file holds a bare tensor")
        required = {"format_version", "objective", "source_grouping", "layers"}
        if not required & self.top.keys():
            self.bad("schema.foreign", "the file has none of the fields of a rotation")
        version = self.top.get("format_version")
        if type(version) is not int or version not in GROUPINGS:
            known = "{} and {}".format(", ".join(map(str, [*GROUPINGS][:-1])), max(GROUPINGS))
            self.bad("schema.version", f"format_version is {ascii(version)[:60]}; {known} are read")
        required |= {"transform"} if version == 3 else set()
        self.keys(self.top, required, {"calibration"}, "the file")
        grouping = GROUPINGS[version].get(self.text("source_grouping"))
        if grouping is None:
            self.bad(
                "schema.grouping",
                f"source_grouping {ascii(self.top['source_grouping'])[:80]} in format {version}",
            )
        self.version, self.grouping, self.objective = version, grouping, self.text("objective")
        self.transform()
        layers = tuple(
            self.layer(key, entry) for key, entry in sorted(self.layer_entries().items())
        )
        self.uniform(layers)
        unused = {name for name in self.records if name.startswith(DATA)} - set(self.users)
        if unused:
            self.bad("tensor.orphan", f"no tensor uses the record {min(unused)}")
        return RotationSet(
            version,
            self.objective,
            grouping,
            self.name,
            self.orthogonal,
            self.centered,
            layers,
            self.calibration(),
            self.role,
        )

    def keys(
        self, block: Mapping[Any, Any], required: set[str], optional: set[str], where: str
    ) -> None:
        missing, unknown = required - block.keys(), block.keys() - required - optional
        if missing:
            self.bad("schema.missing", f"{where} has no {', '.join(sorted(missing))}")
        if unknown:
            self.bad(
                "schema.unknown_key",
                f"{where} has the unknown key {ascii(min(unknown, key=str))[:80]}",
            )

    def text(self, key: str) -> str:
        value = self.top[key]
        if type(value) is not str:
            self.bad("schema.type", f"{key} is not a text")
        return value

    def transform(self) -> None:
        self.orthogonal, self.centered = True, False
        self.role: Role | None = None
        hessian, _, composition = self.objective.partition("_")
        if self.version == 3:
            self.transform_block()
        elif hessian in HESSIANS and composition in COMPOSITIONS:
            self.name = "oscar"
        elif self.version == 1 and self.objective in ("hadamard", "uresidual"):
            self.name = self.objective
        elif self.version == 2 and self.objective == PER_HEAD_OBJECTIVE:
            self.name = "oscar"
        else:
            self.bad(
                "schema.objective",
                f"unknown objective {ascii(self.objective)[:80]} in format {self.version}",
            )

    def transform_block(self) -> None:
        block = self.top["transform"]
        if type(block) is not dict or ("key" in block) == ("value" in block):
            self.bad(
                "schema.transform", "the transform block names neither or both of key and value"
            )
        self.role = "k" if "key" in block else "v"
        word = "key" if self.role == "k" else "value"
        self.keys(
            block,
            {word, "orthogonal"} | ({"centered"} if self.role == "k" else set()),
            set(),
            "transform",
        )
        name, orthogonal, centered = block[word], block["orthogonal"], block.get("centered", False)
        if type(name) is not str or _TRANSFORM_NAME.fullmatch(name) is None:
            self.bad("schema.transform", "the name of the transform is not a word")
        if type(orthogonal) is not bool or type(centered) is not bool:
            self.bad("schema.transform", "orthogonal and centered must be true or false")
        if _VERSION_3_OBJECTIVE.fullmatch(self.objective) is None:
            self.bad(
                "schema.objective", f"unknown objective {ascii(self.objective)[:80]} in format 3"
            )
        if self.objective[-2:] in ("_k", "_v") and self.objective[-1] != self.role:
            self.bad(
                "schema.objective",
                f"objective {self.objective} contradicts the transform block of {word}s",
            )
        self.name, self.orthogonal, self.centered = name, orthogonal, centered

    def layer_entries(self) -> dict[int, Any]:
        layers = self.top["layers"]
        if type(layers) is not dict or not layers:
            self.bad("layers.empty", "there are no layers")
        for key in layers:
            if type(key) is not int:
                self.bad("layers.key_type", f"the layer key {ascii(key)[:40]} is not an integer")
            if not 0 <= key < MAX_LAYER_ID:
                self.bad("layers.id", f"the layer key {key} is out of range")
        return layers

    def layer(self, key: int, entry: Any) -> LayerTransform:
        if type(entry) is not dict:
            self.bad("schema.type", f"layer {key} is not a dict")
        required, optional = {"layer_id", "rotation"}, {"eigenvalues"}
        if not self.orthogonal and self.role is not None:
            required.add(PARTNER[self.role])
        if self.centered:
            required.add("k_mean")
        if self.version == 3:
            required.add("eigenvalues")
        self.keys(entry, required, optional, f"layer {key}")
        if type(entry["layer_id"]) is not int or entry["layer_id"] != key:
            self.bad("layers.id", f"layer {key} calls itself {ascii(entry['layer_id'])[:40]}")
        forward = self.matrix(entry, "rotation", key)
        rows = forward.shape[:-1]
        partner = forward
        if not self.orthogonal and self.role is not None:
            partner = self.tensor(entry, PARTNER[self.role], key, forward.shape)
        mean = self.tensor(entry, "k_mean", key, rows) if self.centered else None
        eigenvalues = None
        if entry.get("eigenvalues") is not None:
            eigenvalues = self.tensor(entry, "eigenvalues", key, rows)
        elif self.version != 3 and "eigenvalues" in entry:
            self.bad("schema.type", f"the eigenvalues of layer {key} are not a tensor")
        return LayerTransform(key, forward, partner, mean, eigenvalues)

    def matrix(self, entry: Mapping[str, Any], name: str, key: int) -> Array:
        ref = entry[name]
        rank = 3 if self.grouping == "kv_head" else 2
        if type(ref) is not TensorRef:
            self.bad("schema.type", f"{name} of layer {key} is not a tensor")
        d = ref.shape[-1]
        if (
            len(ref.shape) != rank
            or ref.shape[-2] != d
            or not has_hadamard(d)
            or not 2 <= d <= MAX_HEAD_DIM
        ):
            self.bad("tensor.shape", f"{name} of layer {key} has the shape {list(ref.shape)}")
        return self.tensor(entry, name, key, ref.shape)

    def tensor(
        self, entry: Mapping[str, Any], name: str, key: int, shape: tuple[int, ...]
    ) -> Array:
        ref = entry[name]
        if type(ref) is not TensorRef:
            self.bad("schema.type", f"{name} of layer {key} is not a tensor")
        if ref.shape != shape:
            self.bad(
                "tensor.shape",
                f"{name} of layer {key} has the shape {list(ref.shape)}, expected {list(shape)}",
            )
        user = self.users.setdefault(
            DATA + ref.key, name if self.objective == "hadamard" else f"{name} of layer {key}"
        )
        if user != name and user != f"{name} of layer {key}":
            self.bad("tensor.shared", f"{name} of layer {key} shares its record with {user}")
        # One array per record: a shared record costs its own size, however many layers name it.
        if ref.key not in self.arrays:
            self.arrays[ref.key] = self.array(f"{name} of layer {key}", ref)
        if self.arrays[ref.key].shape != ref.shape:
            self.bad("tensor.shared", f"{name} of layer {key} shares its record in another shape")
        return self.arrays[ref.key]

    def array(self, place: str, ref: TensorRef) -> Array:
        record = self.records.get(DATA + ref.key)
        if record is None:
            self.bad("tensor.record", f"{place} has no record")
        if len(record) != 4 * math.prod(ref.shape):
            self.bad("tensor.size", f"{place} has {len(record)} bytes of data")
        array = np.require(np.frombuffer(record, dtype="<f4"), dtype=np.float32, requirements=["A"])
        array.setflags(write=False)
        return array.reshape(ref.shape)

    def uniform(self, layers: tuple[LayerTransform, ...]) -> None:
        first = layers[0]
        work = len({id(layer.forward) for layer in layers}) * first.forward.size
        if work * first.forward.shape[-1] > MAX_MULTIPLICATIONS:
            self.bad(
                "layers.work",
                f"{len(layers)} layers of {list(first.forward.shape)} are more than is checked",
            )
        for layer in layers:
            if layer.forward.shape != first.forward.shape:
                self.bad(
                    "layers.shape",
                    f"layer {layer.layer_id} has the shape {list(layer.forward.shape)}, "
                    f"layer {first.layer_id} {list(first.forward.shape)}",
                )
            if (layer.eigenvalues is None) != (first.eigenvalues is None):
                self.bad("layers.eigenvalues", "some layers have eigenvalues and some have none")

    def calibration(self) -> dict[str, CalibrationValue]:
        block = self.top.get("calibration", {})
        types = _CALIBRATION_3 if self.version == 3 else _CALIBRATION
        if type(block) is not dict:
            self.bad("schema.calibration", "calibration is not a dict")
        for key, value in block.items():
            if key not in types or type(value) not in types[key]:
                self.bad(
                    "schema.calibration",
                    f"calibration.{ascii(key)[:60]} is unknown or has a wrong type",
                )
            if type(value) is int and key not in ("lr", "k_quant", "v_quant") and value < 0:
                self.bad("schema.calibration", f"calibration.{key} is negative")
        if "generation_id" in block and _HEX.fullmatch(block["generation_id"]) is None:
            self.bad("schema.calibration", "calibration.generation_id is not hexadecimal")
        return block
