"""The weights of a checkpoint folder: headers of its safetensors files, and numbers on demand.

Block-scaled float8 weights, which have a `..._scale_inv` tensor beside each, and experts in MXFP4
count as the bfloat16 weights that they stand for. Names and shapes are known before any number is
read, and a checkpoint that contradicts itself is refused then. A loader may rename, join, split or
cast `LazyTensor`s as if they held numbers; `materialize` repeats what it did on the real ones, bit
for bit, at any time, on any device, and as often as needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from oscar_zoo.errors import InvalidModel, UnsupportedModel
from oscar_zoo.models.weight_files import (
    INDEX,
    SINGLE,
    check_all_there,
    damaged,
    first_line,
    index_files,
)

SCALE = "_scale_inv"
BLOCK = (128, 128)
"""Rows and columns that share one scale, when a configuration does not say it."""
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OTHER = "use a bfloat16 checkpoint"

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
"""Numbers that share an exponent."""
BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = (*_POSITIVE, *(-value for value in _POSITIVE))
"""What a four-bit code stands for."""


class CheckpointFile:
    """One tensor in a file: its shape, its dtype (bfloat16 when stored in float8) and bytes as
    weights. `[...]` returns it as a `LazyTensor`, so a loader may treat it as a tensor."""

    def __init__(
        self,
        name: str,
        file: Any,
        scale: CheckpointFile | None = None,
        block: tuple[int, int] = BLOCK,
    ) -> None:
        header = file.get_slice(name)
        kind = header.get_dtype()
        if kind not in DTYPES:
            raise InvalidModel(f"{name} is stored as {kind}, which is not read.", hint=OTHER)
        self.name, self._file, self._scale, self._block = name, file, scale, block
        self.shape = torch.Size(header.get_shape())
        self.dtype = torch.bfloat16 if scale is not None else DTYPES[kind]
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        if scale is not None:
            _check_scale(self, scale, block)

    def __getitem__(self, everything: Any) -> LazyTensor:
        return LazyTensor.of(self)

    def get_dtype(self) -> str:
        return next(kind for kind, dtype in DTYPES.items() if dtype == self.dtype)

    def is_floating_point(self) -> bool:
        return bool(self.dtype.is_floating_point)

    def fetch(self) -> tuple[Tensor, ...]:
        """The stored tensor, and its scales if it has some, in main memory."""
        return tuple(part.clone() for part in self._parts())

    def read(self, device: torch.device, fetched: tuple[Tensor, ...] | None = None) -> Tensor:
        """The numbers on `device`; `fetched` saves going to the file."""
        parts = [part.to(device) for part in fetched or self._parts()]
        return parts[0] if self._scale is None else dequantize(parts[0], parts[1], self._block)

    def _parts(self) -> list[Tensor]:
        """Views of the mapped file."""
        try:
            own: list[Tensor] = [self._file.get_tensor(self.name)]
        except (SafetensorError, OSError) as error:
            raise damaged(f"cannot read {self.name}: {first_line(error)}") from None
        return own if self._scale is None else own + self._scale._parts()


class PackedFile(CheckpointFile):
    """The two tensors of weights in MXFP4, as one; see `unpack`."""

    def __init__(self, blocks: str, file: Any, scales_file: Any) -> None:
        scales = CheckpointFile(_scales_of(blocks), scales_file)
        self._pair = CheckpointFile(blocks, file), scales
        shape = unpacked_shape(*(one.shape for one in self._pair))
        if shape is None or any(one.dtype != torch.uint8 for one in self._pair):
            said = " and ".join(str(list(one.shape)) for one in self._pair)
            raise damaged(f"{blocks} and its scales have shapes {said}, not those of MXFP4")
        self.name, self.shape = blocks.removesuffix(BLOCKS), shape
        self.dtype = torch.bfloat16
        self.nbytes = math.prod(shape) * self.dtype.itemsize

    def read(self, device: torch.device, fetched: tuple[Tensor, ...] | None = None) -> Tensor:
        blocks, scales = (part.to(device) for part in fetched or self._parts())
        return unpack(blocks, scales)

    def _parts(self) -> list[Tensor]:
        return [part for one in self._pair for part in one._parts()]


def open_weights(
    folder: Path, *, block: tuple[int, int] | None = None
) -> dict[str, CheckpointFile]:
    """Name -> tensor, for all weights of a checkpoint; `block` is that of float8 weights."""
    places = _places(folder)
    files = {path: _open(path) for path in dict.fromkeys(places.values())} if places else {}
    inside = {path: set(file.keys()) for path, file in files.items()}
    for name, path in places.items():
        if name not in inside[path]:
            raise damaged(f"{path.name} of {folder} lacks {name}, which its index names")
    scaling = {name: path for name, path in places.items() if name.endswith(SCALE)}
    scales = {name: CheckpointFile(name, files[path]) for name, path in scaling.items()}
    found: dict[str, CheckpointFile] = {}
    packed = {name for name in places if name.endswith(BLOCKS) and _scales_of(name) in places}
    for name in packed:
        pair = PackedFile(name, files[places[name]], files[places[_scales_of(name)]])
        found[pair.name] = pair
    told = packed | set(map(_scales_of, packed)) | scales.keys()
    for name, path in places.items():
        if name in told:
            continue
        one = CheckpointFile(name, files[path], scales.get(name + SCALE), block or BLOCK)
        if one.dtype in FLOAT8:
            raise InvalidModel(f"{name} of {folder} is float8 without {name}{SCALE}.", hint=OTHER)
        found[name] = one
    return found


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """`weight * scale` in bfloat16, products in float32: float8 `[..., rows, columns]`, and one
    number, or one for each block, `[..., ceil(rows / block[0]), ceil(columns / block[1])]`."""
    wide = weight.float()
    if scale.numel() == 1:
        return wide.mul_(scale.float().reshape(())).to(torch.bfloat16)
    rows = block[0]
    columns = scale.float().repeat_interleave(block[1], -1)[..., : weight.shape[-1]]
    for number in range(scale.shape[-2]):
        wide[..., number * rows : (number + 1) * rows, :] *= columns[..., number : number + 1, :]
    return wide.to(torch.bfloat16)


def _scales_of(blocks: str) -> str:
    return blocks.removesuffix(BLOCKS) + SCALES


def _places(folder: Path) -> dict[str, Path]:
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_open(folder / SINGLE).keys(), folder / SINGLE)
    if not (folder / INDEX).is_file():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        raise damaged(f"{folder} has {', '.join(found[:3])} but no {INDEX}")
    named = index_files((folder / INDEX).read_bytes(), str(folder / INDEX))
    places = {name: folder / file for name, file in named.items()}
    check_all_there(folder, set(places.values()))
    return places


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise damaged(f"cannot load {path}: its weights: {first_line(error)}") from None


def _check_scale(weight: CheckpointFile, scale: CheckpointFile, block: Sequence[int]) -> None:
    *outer, rows, columns = (1, 1, *weight.shape)[-max(2, len(weight.shape)) :]
    want = (*outer, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if tuple(scale.shape) != want and math.prod(scale.shape) != 1:
        blocks = f"blocks of {block[0]} x {block[1]} want {list(want)}"
        message = f"{scale.name} has shape {list(scale.shape)}, {blocks}."
        raise InvalidModel(message, hint="check weight_block_size in its config.json")


class TensorSource(Protocol):
    """A tensor in a file; identity is equality."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _Step:
    """One operation, with arguments that may be unread."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _changed(how: str) -> Tensor:
    raise RuntimeError(f"{how} would have changed weights that were not read")


class LazyTensor(Tensor):  # type: ignore[misc]
    """Shape and type of a tensor, on the meta device, and where its numbers come from."""

    form: Tensor
    origin: TensorSource | _Step
    output: int | None

    @staticmethod
    def __new__(
        cls, form: Tensor, origin: TensorSource | _Step, output: int | None = None
    ) -> LazyTensor:
        """`output` says which one of several results of a step this is."""
        made: LazyTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, form.size(), strides=form.stride(), dtype=form.dtype, device=torch.device("meta")
        )
        made.form, made.origin, made.output = form, origin, output
        return made

    def __repr__(self, **_: Any) -> str:
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def of(cls, source: TensorSource) -> LazyTensor:
        return cls(torch.empty(source.shape, dtype=source.dtype, device="meta"), source)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes and record it. Requests for a device are left out, because
        nothing here has one yet."""
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "device"}
        if (
            func._schema.is_mutable
        ):  # code that fills new tensors does that even where it then keeps the stored ones
            args[0].origin, args[0].output = _Step(_changed, (str(func),), {}), None
            return args[0]
        forms = tree_map(
            lambda one: one.form if isinstance(one, LazyTensor) else one, (args, kwargs)
        )
        found, step = func(*forms[0], **forms[1]), _Step(func, args, kwargs)
        if isinstance(found, (list, tuple)):
            return type(found)(cls(one, step, number) for number, one in enumerate(found))
        return cls(found, step)


def sources(tensor: LazyTensor) -> Iterator[TensorSource]:
    """Every tensor in files that `tensor` is made of; one may come more than once."""
    if isinstance(tensor.origin, _Step):
        if tensor.origin.function is _changed:
            _changed(*tensor.origin.args)
        for part in tree_flatten((tensor.origin.args, tensor.origin.kwargs))[0]:
            if isinstance(part, LazyTensor):
                yield from sources(part)
    else:
        yield tensor.origin


def materialize(tensor: LazyTensor, read: Callable[[Any], Tensor]) -> Tensor:
    """The tensor itself; `read` gives the numbers of a source, on the device where to compute."""
    return _materialize(tensor, read, {})


UNMERGED = "calibrate the checkpoint with unquantized, unmerged weights"
EXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def whole_weight(module: Any, name: str) -> Tensor:
    """The weight of a module, also where it is in its file until its layer runs; `name` is for the
    message that it is quantized."""
    weight: Any = module.weight
    if isinstance(weight, LazyTensor):
        weight = materialize(weight, lambda stored: stored.read(torch.device("cpu")))
    elif weight.is_meta:  # kept elsewhere by accelerate
        weight = module._hf_hook.weights_map["weight"]
    if weight.dtype not in EXACT:
        raise UnsupportedModel(
            f"the {name} is quantized ({str(weight.dtype).removeprefix('torch.')}).",
            hint=UNMERGED,
        )
    found: Tensor = weight.detach()
    return found


def _materialize(
    tensor: LazyTensor, read: Callable[[Any], Tensor], split: dict[_Step, Any]
) -> Tensor:
    step, part = tensor.origin, tensor.output
    if not isinstance(step, _Step):
        return read(step)
    if step in split:
        return _tensor(split[step][part])
    args, kwargs = tree_map(
        lambda one: _materialize(one, read, split) if isinstance(one, LazyTensor) else one,
        (step.args, step.kwargs),
    )
    found = step.function(*args, **kwargs)
    if part is None:
        return _tensor(found)  # not kept: its memory is free once the next step is done
    split[step] = found
    return _tensor(found[part])


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def unpacked_shape(blocks: torch.Size, scales: torch.Size) -> torch.Size | None:
    """The shape of the tensor that the two stand for; `None` where they do not fit each other."""
    if len(blocks) != 4 or blocks[3] != GROUP // 2 or blocks[:3] != scales:
        return None
    experts, rows, groups, _ = blocks
    return torch.Size((experts, GROUP * groups, rows))


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights of gpt-oss, `[experts, 32 * groups, rows]`, which have four bits per number, and
    an exponent for 32; bfloat16 holds every value exactly. `blocks` are `[experts, rows, groups,
    16]` uint8, two numbers per byte, the low half first, and `scales` `[experts, rows, groups]`
    uint8, an exponent plus 127. Source: `convert_moe_packed_tensors` of transformers."""
    numbers = torch.tensor(NUMBERS, dtype=torch.float32, device=blocks.device)
    experts, rows, groups, _ = blocks.shape
    shape = (experts, GROUP * groups, rows)
    found = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    for expert in range(experts):
        codes = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], -1).flatten(-2)
        exponents = scales[expert].int() - BIAS
        values = torch.ldexp(numbers[codes.int()], exponents[..., None])
        found[expert] = values.flatten(1).T
    return found
