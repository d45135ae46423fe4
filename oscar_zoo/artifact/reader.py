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

_TEXT, _TEXT_OR_NONE, _COUNT, _NUMBER = (str,), (str, type(None)), (int,), (int, float)
_CALIBRATION: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("generation_id", "accumulator_dtype", "fitter"), _TEXT),
    **dict.fromkeys(("model_path", "model_revision", "prompt_sha256"), _TEXT_OR_NONE),
    **dict.fromkeys(("tokens", "max_tokens", "tp_size"), _COUNT),
    **dict.fromkeys(("global_q_heads", "global_kv_heads"), _COUNT),
    "post_rope": (bool,),
    "created_at_unix": _NUMBER,
}
_CALIBRATION_3: Mapping[str, tuple[type, ...]] = {
    **_CALIBRATION,
    **dict.fromkeys(("init", "init_objective"), _TEXT_OR_NONE),
    "steps": _COUNT,
    "lr": _NUMBER,
    **dict.fromkeys(("k_quant", "v_quant"), (*_TEXT_OR_NONE, bool, *_NUMBER)),
}


def read_rotation(data: bytes, *, what: str) -> RotationSet:
    """Parse a whole untrusted rotation file. Arrays are read-only float32 views into `data`, or
    copies where it is not aligned."""
    _name_kind(data, what)
    records = archive.read_archive(data, what=what)
    top = pickle_reader.load(records[archive.PICKLE], what=what)
    return build(top, records, what=what)


def _name_kind(data: bytes, what: str) -> None:
    if (mistaken := mistaken_content(data)) is not None:
        reason, words, hint = mistaken
        raise MalformedFile(reason, f"{what} is {words}.", hint=hint)
    if data.startswith(_LEGACY):
        message = f"{what} is a bare pickle, not an archive; only files of torch >= 1.6 are read."
        raise MalformedFile("file.legacy_pickle", message)
    if data.startswith(b"GGUF"):
        raise UnsupportedFormat("gguf", f"{what} is a GGUF file, not a rotation file.")
    if not data.startswith(b"PK"):
        message = f"{what} is not a rotation file (it starts with {data[:4]!r})."
        raise MalformedFile("file.unknown", message)


def build(top: Any, records: Mapping[str, memoryview], *, what: str) -> RotationSet:
    """Check the value of a pickle against the schemas and attach the tensors."""
    if kind := _other_kind(top):
        message = f"{what} is a {kind} file, not a rotation file."
        raise UnsupportedFormat(kind, message, hint=_KIND_HINTS[kind])
    return _Builder(top, records, what).build()


def _other_kind(top: Any) -> str | None:
    if type(top) is TensorRef:
        return "mla_latent" if top.shape == (512, 512) else None
    if any(key in top for key in _CODEBOOKS):
        return "pq_codebooks"
    if str(top.get("format_version", "")).startswith("identity-"):
        return "identity"
    if "rotation" in top and "layers" not in top and "format_version" not in top:
        return "mla_latent"
    layers = top.get("layers")
    first = next(iter(layers.values()), None) if type(layers) is dict else None
    moments = (type(x) is dict and ("M_q" in x or "S_v" in x) for x in (top, first))
    return "moments" if any(moments) else None


_CODEBOOKS = ("codebooks", "codebooks_per_layer", "codebooks_stage1", "codebooks_stage2")
_KIND_HINTS = {
    "mla_latent": "rotations of MLA latents cannot be served by this version",
    "pq_codebooks": "product-quantisation codebooks are never loaded",
    "identity": "an identity rotation does nothing; use the bf16 cache instead",
    "moments": "moments are an input of `oscar-zoo compute`, not an artifact",
}


class _Builder:
    def __init__(self, top: Any, records: Mapping[str, memoryview], what: str) -> None:
        self.top, self.records, self.what = top, records, what
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
            self.bad("schema.version", f"format_version is {ascii(version)[:60]}; 1 to 3 are read")
        self.version = version
        self.keys(self.top, required | ({"transform"} if version == 3 else set()), {"calibration"})
        grouping = GROUPINGS[version].get(self.text("source_grouping"))
        if grouping is None:
            said = ascii(self.top["source_grouping"])[:80]
            self.bad("schema.grouping", f"source_grouping {said} in format {version}")
        self.grouping, self.objective = grouping, self.text("objective")
        self.orthogonal, self.centered = True, False
        self.role: Role | None = None
        self.name = self.transform_of_block() if version == 3 else self.transform_of_objective()
        entries = sorted(self.layer_entries().items())
        layers = tuple(self.layer(key, entry) for key, entry in entries)
        self.check_uniform(layers)
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
        self,
        block: Mapping[Any, Any],
        required: set[str],
        optional: set[str],
        where: str = "the file",
    ) -> None:
        missing, unknown = required - block.keys(), block.keys() - required - optional
        if missing:
            self.bad("schema.missing", f"{where} has no {', '.join(sorted(missing))}")
        if unknown:
            said = ascii(min(unknown, key=str))[:80]
            self.bad("schema.unknown_key", f"{where} has the unknown key {said}")

    def text(self, key: str) -> str:
        value = self.top[key]
        if type(value) is not str:
            self.bad("schema.type", f"{key} is not a text")
        return value

    def transform_of_objective(self) -> str:
        hessian, _, composition = self.objective.partition("_")
        per_head = self.version == 2 and self.objective == PER_HEAD_OBJECTIVE
        if per_head or (hessian in HESSIANS and composition in COMPOSITIONS):
            return "oscar"
        if self.version != 1 or self.objective not in ("hadamard", "uresidual"):
            self.bad_objective()
        return self.objective

    def bad_objective(self) -> NoReturn:
        said = ascii(self.objective)[:80]
        self.bad("schema.objective", f"unknown objective {said} in format {self.version}")

    def transform_of_block(self) -> str:
        block = self.top["transform"]
        if type(block) is not dict or ("key" in block) == ("value" in block):
            message = "the transform block names neither or both of key and value"
            self.bad("schema.transform", message)
        self.role = "k" if "key" in block else "v"
        word = "key" if self.role == "k" else "value"
        more = {"centered"} if self.role == "k" else set()
        self.keys(block, {word, "orthogonal"} | more, set(), "transform")
        name, orthogonal, centered = block[word], block["orthogonal"], block.get("centered", False)
        if type(name) is not str or _TRANSFORM_NAME.fullmatch(name) is None:
            self.bad("schema.transform", "the name of the transform is not a word")
        if type(orthogonal) is not bool or type(centered) is not bool:
            self.bad("schema.transform", "orthogonal and centered must be true or false")
        if _VERSION_3_OBJECTIVE.fullmatch(self.objective) is None:
            self.bad_objective()
        if self.objective[-2:] in ("_k", "_v") and self.objective[-1] != self.role:
            message = f"objective {self.objective} contradicts the transform block of {word}s"
            self.bad("schema.objective", message)
        self.orthogonal, self.centered = orthogonal, centered
        return name

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
        partner_name = None if self.orthogonal or self.role is None else PARTNER[self.role]
        required = {"layer_id", "rotation"} | ({partner_name} if partner_name else set())
        required |= {"k_mean"} if self.centered else set()
        required |= {"eigenvalues"} if self.version == 3 else set()
        of_keys = self.version == 3 and self.role == "k" and self.grouping == "kv_head"
        optional = {"eigenvalues"} | ({"k_feedback"} if of_keys else set())
        self.keys(entry, required, optional, f"layer {key}")
        if type(entry["layer_id"]) is not int or entry["layer_id"] != key:
            self.bad("layers.id", f"layer {key} calls itself {ascii(entry['layer_id'])[:40]}")
        forward = self.tensor(entry, "rotation", key, None)
        shape, rows = forward.shape, forward.shape[:-1]
        partner = self.tensor(entry, partner_name, key, shape) if partner_name else forward
        mean = self.tensor(entry, "k_mean", key, rows) if self.centered else None
        eigenvalues = None
        if entry.get("eigenvalues") is not None:
            eigenvalues = self.tensor(entry, "eigenvalues", key, rows)
        elif self.version != 3 and "eigenvalues" in entry:
            self.bad("schema.type", f"the eigenvalues of layer {key} are not a tensor")
        feedback = None
        if "k_feedback" in entry:
            pairs = shape[-1] * (shape[-1] - 1) // 2
            feedback = self.tensor(entry, "k_feedback", key, (*shape[:-2], pairs))
        return LayerTransform(key, forward, partner, mean, eigenvalues, feedback)

    def is_square(self, shape: tuple[int, ...]) -> bool:
        """Whether a matrix for every head, or for all of them, has this shape."""
        d = shape[-1]
        rank = 3 if self.grouping == "kv_head" else 2
        return len(shape) == rank and shape[-2] == d and 2 <= d <= MAX_HEAD_DIM and has_hadamard(d)

    def tensor(
        self, entry: Mapping[str, Any], name: str, key: int, shape: tuple[int, ...] | None
    ) -> Array:
        """An array of this shape, or a square one without a `shape`."""
        ref, place = entry[name], f"{name} of layer {key}"
        if type(ref) is not TensorRef:
            self.bad("schema.type", f"{place} is not a tensor")
        if not (self.is_square(ref.shape) if shape is None else ref.shape == shape):
            self.bad("tensor.shape", f"{place} has the shape {list(ref.shape)}")
        shared = self.objective == "hadamard"
        user = self.users.setdefault(DATA + ref.key, name if shared else place)
        if user not in (name, place):
            self.bad("tensor.shared", f"{place} shares its record with {user}")
        # One array per record: a shared record costs its own size, however many layers name it.
        if ref.key not in self.arrays:
            self.arrays[ref.key] = self.array(place, ref)
        if self.arrays[ref.key].shape != ref.shape:
            self.bad("tensor.shared", f"{place} shares its record in another shape")
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

    def check_uniform(self, layers: tuple[LayerTransform, ...]) -> None:
        first = layers[0]
        work = len({id(layer.forward) for layer in layers}) * first.forward.size
        shape = list(first.forward.shape)
        if work * first.forward.shape[-1] > MAX_MULTIPLICATIONS:
            self.bad("layers.work", f"{len(layers)} layers of {shape} are more than is checked")
        for layer in layers:
            if layer.forward.shape != first.forward.shape:
                message = f"layer {layer.layer_id} has the shape {list(layer.forward.shape)}"
                self.bad("layers.shape", f"{message}, layer {first.layer_id} {shape}")
            if (layer.eigenvalues is None) != (first.eigenvalues is None):
                self.bad("layers.eigenvalues", "some layers have eigenvalues and some have none")
            if (layer.feedback is None) != (first.feedback is None):
                self.bad("layers.feedback", "some layers have feedback and some have none")

    def calibration(self) -> dict[str, CalibrationValue]:
        block = self.top.get("calibration", {})
        types = _CALIBRATION_3 if self.version == 3 else _CALIBRATION
        if type(block) is not dict:
            self.bad("schema.calibration", "calibration is not a dict")
        for key, value in block.items():
            if key not in types or type(value) not in types[key]:
                message = f"calibration.{ascii(key)[:60]} is unknown or has a wrong type"
                self.bad("schema.calibration", message)
            if type(value) is int and key not in ("lr", "k_quant", "v_quant") and value < 0:
                self.bad("schema.calibration", f"calibration.{key} is negative")
        if "generation_id" in block and _HEX.fullmatch(block["generation_id"]) is None:
            self.bad("schema.calibration", "calibration.generation_id is not hexadecimal")
        return block
