"""The sums of an engine's ranks: one folder per rank, joined here to the moments of the model.

Every rank writes the sums of its own heads, one file per layer, with the model's indices of these
heads and the length of every sequence that each layer saw. `join_ranks` accepts only the expected
ranks, one geometry and, in every layer of every rank and in both passes, exactly the sequences that
were sent. So a token that was seen twice or never is found. Then heads are joined by the rules of
`join_heads`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.specs import Geometry, Spec
from oscar_zoo.compute.capture.state import unusable
from oscar_zoo.compute.join_heads import join_heads
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import (
    ComputeFailed,
    IntegrityError,
    OscarZooError,
    OutputExists,
    StorageError,
    UnsupportedModel,
)

VARIABLE = "OSCAR_ZOO_TAP"
"""Set in the environment of an engine whose attention is to be tapped."""

_REPORT, _FAILURE = "rank.json", "failure.json"
_KINDS = {
    kind.code: kind for kind in (UnsupportedModel, OutputExists, IntegrityError, StorageError)
}
"""Failures of a rank that are told as what they are; all others are told as `ComputeFailed`."""


class LayerReport(Spec):
    """What one rank saw of one layer.

    It holds the counts of `LayerMoments`, and the sequence lengths of both passes in order.
    """

    heads: tuple[int, ...]
    tokens: int
    query_rows: int
    output_rows: int
    weighted_tokens: int
    lengths: tuple[int, ...]
    weighted_lengths: tuple[int, ...]


class RankReport(Spec):
    """The report of one rank.

    Attributes:
        geometry: of the whole model; `attention_layers` are those of this rank.
        dtype: of the forward pass, such as `bfloat16`.
        device: name of the GPU, or `cpu`.
        accumulate: how products are summed, see `products.accumulation`.
        weights: `state.weights_digest` of the weights of this rank.
        layers: by decoder layer index.
    """

    geometry: Geometry
    dtype: str
    device: str
    accumulate: str
    weights: str
    layers: dict[int, LayerReport]


def write_rank(
    folder: Path, name: str, report: RankReport, sums: Mapping[int, LayerMoments]
) -> None:
    """Write what one rank has, forced to disk; the report comes last and stands for all of it.

    Args:
        folder: of this capture.
        name: of the rank, different for every one.
        report: with an entry for every layer of `sums`.
        sums: by decoder layer index.

    Raises:
        StorageError: the disk refused.
    """
    own = folder / name
    with durable.storage_errors(f"cannot write to {own}"):
        own.mkdir()
        for layer_id, layer in sums.items():
            tensors = {
                field: getattr(layer, field).cpu().contiguous()
                for field in (*ROW_SUMS, *WEIGHTED_SUMS)
            }
            if layer.wo is not None:
                tensors["wo"] = layer.wo.cpu().contiguous()
            durable.write_new(own / _layer_file(layer_id), save(tensors))
        durable.write_new(own / _REPORT, report.model_dump_json().encode())
        durable.sync_folder(own)


def read_rank(folder: Path, name: str) -> tuple[RankReport, dict[int, LayerMoments]]:
    """The report and the sums that rank `name` wrote with `write_rank`, on the CPU.

    Raises:
        IntegrityError: it is not all there.
    """
    try:
        report = _read_report(folder / name / _REPORT)
        return report, {
            i: _read_layer(folder / name / _layer_file(i), layer)
            for i, layer in report.layers.items()
        }
    except ComputeFailed as error:
        raise unusable(folder, error.message) from None


def write_failure(folder: Path, name: str, error: OscarZooError) -> None:
    """Write down why rank `name` cannot go on.

    An engine passes on only the errors of its first rank.
    """
    text = json.dumps({"code": error.code, "message": error.message, "hint": error.hint})
    (folder / f"{name}.{_FAILURE}").write_text(text, encoding="utf-8")


def raise_failure(folder: Path) -> None:
    """Raise what a rank left with `write_failure`, if any did.

    Raises:
        UnsupportedModel, OutputExists, IntegrityError, StorageError, ComputeFailed: of the first
            rank by name.
    """
    for path in sorted(folder.glob(f"*.{_FAILURE}")):
        said = json.loads(path.read_text(encoding="utf-8"))
        raise _KINDS.get(said["code"], ComputeFailed)(said["message"], hint=said["hint"])


def join_ranks(
    folder: Path, ranks: int, lengths: Sequence[int], *, weighted: bool
) -> tuple[Moments, tuple[RankReport, ...]]:
    """Read what all ranks wrote and join it to the moments of the whole model.

    Args:
        folder: of this capture.
        ranks: how many there must be.
        lengths: of the sequences sent, in order.
        weighted: whether they were sent a second time.

    Returns:
        Sums on the CPU, and the reports by name of the rank. Coverage is for the caller to check.

    Raises:
        ComputeFailed: a rank is missing, or did not see each token of `lengths` once; or the ranks
            do not belong together, see `join_heads`.
    """
    raise_failure(folder)
    names = sorted(path.parent.name for path in folder.glob(f"*/{_REPORT}"))
    if len(names) != ranks:
        raise _incomplete(f"{len(names)} of {ranks} ranks handed in sums")
    reports = {name: _read_report(folder / name / _REPORT) for name in names}
    for name, report in reports.items():
        _check_lengths(name, report, tuple(lengths), weighted=weighted)
    geometry = _common_geometry(reports)
    layers = {}
    for layer_id in geometry.attention_layers:
        parts = [
            _read_layer(folder / name / _layer_file(layer_id), report.layers[layer_id])
            for name, report in reports.items()
            if layer_id in report.layers
        ]
        layers[layer_id] = join_heads(parts)
    return Moments(geometry, layers), tuple(reports.values())


def _common_geometry(reports: Mapping[str, RankReport]) -> Geometry:
    """The model's geometry with the layers of all ranks, which differ between pipeline stages."""
    layers = tuple(sorted({layer for report in reports.values() for layer in report.layers}))
    whole = {
        name: report.geometry.model_copy(update={"attention_layers": layers})
        for name, report in reports.items()
    }
    first, *others = whole.items()
    for name, geometry in others:
        if difference := first[1].difference(geometry):
            raise _incomplete(f"ranks {first[0]} and {name} run different models: {difference}")
    return first[1]


def _check_lengths(name: str, report: RankReport, sent: tuple[int, ...], *, weighted: bool) -> None:
    for layer_id, layer in report.layers.items():
        passes = {
            "": (layer.lengths, sent),
            "second pass of ": (layer.weighted_lengths, sent if weighted else ()),
        }
        for which, (seen, wanted) in passes.items():
            if seen == wanted:
                continue
            if len(seen) != len(wanted):
                raise _incomplete(
                    f"{which}layer {layer_id} on rank {name} saw {len(seen)} of {len(wanted)}"
                    " sequences"
                )
            at = next(
                i for i, pair in enumerate(zip(seen, wanted, strict=True)) if pair[0] != pair[1]
            )
            raise _incomplete(
                f"{which}layer {layer_id} on rank {name} saw {seen[at]} of the {wanted[at]} tokens"
                f" of sequence {at}"
            )


def _read_report(path: Path) -> RankReport:
    try:
        return RankReport.model_validate_json(path.read_bytes())
    except OSError:
        raise _incomplete(f"{path.parent.name} left no report") from None
    except ValidationError as error:
        raise _incomplete(
            f"{path.parent.name} left a report that cannot be read ({error.errors()[0]['msg']})"
        ) from None


def _read_layer(path: Path, report: LayerReport) -> LayerMoments:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        raise _incomplete(f"rank {path.parent.name} left no sums in {path.name}") from None
    counts = report.model_dump(exclude={"lengths", "weighted_lengths"})
    return LayerMoments(**tensors, **counts)


def _layer_file(layer_id: int) -> str:
    return f"layer-{layer_id:04d}.safetensors"


def _incomplete(what: str) -> ComputeFailed:
    return ComputeFailed(
        f"the capture is incomplete: {what}.", hint="nothing was written; report the model"
    )
