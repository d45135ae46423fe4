"""Rows of one sequence that the ranks of an engine hand over: a file per rank and layer.

Every rank writes the rows of its own heads, with the model's indices of these heads. `read_rows`
joins them. A KV head that several ranks hold is taken once. Files are temporary and are read by the
process that started the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from oscar_zoo.artifact import durable
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.models.softmax import Softmax

_O_PROJ = "o_proj"


@dataclass(frozen=True)
class OwnRows:
    """Writes what one rank has.

    Attributes:
        folder: where; it must exist.
        rank: name of the rank, different for every one.
        q_heads, kv_heads: the model's indices of its heads.
        queries: whether queries are written too.
    """

    folder: Path
    rank: str
    q_heads: Sequence[int]
    kv_heads: Sequence[int]
    queries: bool = True

    def write(
        self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> None:
        """Write the rows of one layer.

        Args:
            query, key, value: `[heads, T, ..]`, heads of this rank.
            softmax: of the layer, with the sinks of these query heads.

        Raises:
            StorageError: the disk refused.
        """
        rows = {"key": key, "value": value, **({"query": query} if self.queries else {})}
        if softmax.sinks is not None:
            rows["sinks"] = softmax.sinks
        factors = [softmax.scaling, 0.0 if softmax.cap is None else softmax.cap]
        self._save(layer_id, {**rows, "softmax": torch.tensor(factors, dtype=torch.float64)})

    def write_projection(self, layer_id: int, o_proj: Tensor) -> None:
        """Write the columns `[hidden, heads * dv]` of the output projection of one layer, in a
        folder of their own.

        Raises:
            StorageError: the disk refused.
        """
        self._save(layer_id, {_O_PROJ: o_proj})

    def _save(self, layer_id: int, tensors: Mapping[str, Tensor]) -> None:
        heads = {
            "q_heads": torch.tensor(list(self.q_heads)),
            "kv_heads": torch.tensor(list(self.kv_heads)),
        }
        on_host = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        with durable.storage_errors(f"cannot write to {self.folder}"):
            save_file({**on_host, **heads}, self.folder / f"{_stem(layer_id)}.{self.rank}")


@dataclass(frozen=True)
class JoinedRows:
    """Rows of one sequence in one layer, all heads; `query` is `None` where none were written."""

    query: Tensor | None
    key: Tensor
    value: Tensor
    softmax: Softmax


def read_rows(folder: Path, layer_id: int) -> JoinedRows:
    """Join what the ranks wrote of one layer with `OwnRows.write`.

    Returns:
        Rows on the CPU, `[heads, T, ..]`.

    Raises:
        ComputeFailed: a head is missing.
    """
    parts = _read(folder, layer_id)
    scaling, cap = parts[0]["softmax"].tolist()
    sinks = _by_head(parts, "q_heads", "sinks", layer_id) if "sinks" in parts[0] else None
    return JoinedRows(
        _by_head(parts, "q_heads", "query", layer_id) if "query" in parts[0] else None,
        _by_head(parts, "kv_heads", "key", layer_id),
        _by_head(parts, "kv_heads", "value", layer_id),
        Softmax(scaling, cap or None, sinks),
    )


def read_projection(folder: Path, layer_id: int) -> Tensor:
    """`[hidden, num_q_heads * dv]` of what the ranks wrote with `OwnRows.write_projection`.

    Raises:
        ComputeFailed: a head is missing.
    """
    parts = _read(folder, layer_id)
    for part in parts:
        part[_O_PROJ] = part[_O_PROJ].unflatten(1, (len(part["q_heads"]), -1)).transpose(0, 1)
    return _by_head(parts, "q_heads", _O_PROJ, layer_id).transpose(0, 1).flatten(1)


def _read(folder: Path, layer_id: int) -> list[dict[str, Tensor]]:
    try:
        parts = [load_file(path) for path in sorted(folder.glob(f"{_stem(layer_id)}.*"))]
    except (OSError, SafetensorError) as error:
        raise ComputeFailed.incomplete(
            f"rows of layer {layer_id} are unreadable: {error}"
        ) from None
    if not parts:
        raise ComputeFailed.incomplete(f"no rank handed in rows of layer {layer_id}")
    return parts


def _by_head(parts: Sequence[Mapping[str, Tensor]], heads: str, name: str, layer_id: int) -> Tensor:
    """One tensor of all ranks with the heads on its first axis, in ascending order."""
    found = {
        head: rows
        for part in parts
        for head, rows in zip(part[heads].tolist(), part[name], strict=True)
    }
    if sorted(found) != list(range(len(found))):
        raise ComputeFailed.incomplete(f"layer {layer_id} has {name} rows of heads {sorted(found)}")
    return torch.stack([found[head] for head in sorted(found)])


def _stem(layer_id: int) -> str:
    return f"layer-{layer_id:04d}"
