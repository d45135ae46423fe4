"""The calibration tap: what every attention layer of this worker sees while prompts run through
SGLang.

A hook around `RadixAttention.forward` sees q, k and v of the worker's own heads after norms and
RoPE, and the output before any gate and o_proj, for every model and attention backend. It is
installed only if the environment asks for it (`ranks.VARIABLE`). From `oscar_tap_start` on the taps
of the full-attention layers (`tap_layer.py`) sum. Later they keep the rows of sequences, or put an
INT2 cache in the place of their attention. The driving process (`capture_process.py`) calls this
and all other `METHODS` on all ranks at once. An error in a forward pass is kept and raised by the
next call, because an exception in the middle of a batch would end the engine without a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.capture.cache_files import read_cache
from oscar_zoo.compute.capture.rank_rows import OwnRows
from oscar_zoo.compute.capture.state import another, unusable, weights_digest
from oscar_zoo.compute.coverage import check_finite
from oscar_zoo.compute.layer_moments import LayerMoments
from oscar_zoo.compute.products import accumulation
from oscar_zoo.engines.sglang import tapped_model
from oscar_zoo.engines.sglang.compat import geometry, radix_attention, scheduler_process
from oscar_zoo.engines.sglang.tap_layer import LayerTap
from oscar_zoo.engines.sglang.whole_on_cpu import attention_on_cpu, softmax_of
from oscar_zoo.errors import OscarZooError, UnsupportedModel
from oscar_zoo.evaluate.simulated_cache import SimulatedCache

TAP = "oscar_tap"
"""Name of the attribute that holds the tap of an attention layer."""


def attention(
    original: Any, layer: Any, q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `RadixAttention.forward`: call it or what stands in its place, then show inputs and
    outputs to the tap of this layer, if there is one."""
    if forward_batch.forward_mode.name != "EXTEND" or radix_attention.capturing():
        return original(layer, q, k, v, forward_batch, *args, **kwargs)
    tap: LayerTap | None = getattr(layer, TAP, None)
    lengths, sinks = forward_batch.extend_seq_lens_cpu, kwargs.get("sinks")
    result = None
    if tap is not None and tap.cache is not None:
        result = tap.replaced((q, k, v), sum(lengths), softmax_of(layer, sinks))
    if result is None:
        result = attention_on_cpu(layer, q, k, v, forward_batch, sinks)
    if result is None:
        result = original(layer, q, k, v, forward_batch, *args, **kwargs)
    if tap is None:
        return result
    given = [
        name
        for name, value in kwargs.items()
        if value is not None and name not in radix_attention.ATTENTION_ARGUMENTS
    ]
    if given and tap.error is None:
        tap.error = UnsupportedModel(
            f"attention of layer {tap.layer_id} takes {given[0]}, so it is not plain softmax"
            " attention.",
            hint="choose a model with ordinary or grouped-query attention",
        )
    prefixes = forward_batch.extend_prefix_lens_cpu
    tap.observe((q, k, v, result), prefixes, lengths, lambda: softmax_of(layer, sinks))
    return result


def start(scheduler: Any, folder: str, *, outputs: bool, weights: bool) -> None:
    """Put a tap on every full-attention layer of this worker.

    Args:
        scheduler: SGLang's scheduler of this worker.
        folder: private folder of this capture, where failures are reported.
        outputs: whether to sum attention outputs.
        weights: whether to sum output projections, which need no tokens.

    Raises:
        UnsupportedModel: an INT2 cache could not serve this model.
        ComputeFailed: the worker holds the model in a form that cannot be calibrated.
    """
    runner = scheduler_process.model_runner(scheduler)
    layers = tapped_model.layers_to_tap(runner)
    device = next(runner.model.parameters()).device
    for layer in layers:
        heads = tapped_model.kv_heads(runner.model_config, layer)
        sums = LayerMoments.zeros(
            len(heads), layer.qk_head_dim, layer.v_head_dim, device, heads=heads
        )
        if weights:
            with torch.inference_mode():
                sums.set_weights(
                    radix_attention.output_projection(
                        runner.model, layer, runner.model_config.dtype
                    )
                )
        setattr(layer, TAP, LayerTap(layer.layer_id, sums, layer.tp_q_head_num, outputs))


def check(scheduler: Any, folder: str) -> None:
    """Raise the error of a forward pass since `start`, if there was one."""
    for tap in _taps(scheduler):
        if tap.error is not None:
            raise tap.error


def weigh(scheduler: Any, folder: str) -> None:
    """Begin the second pass; see `LayerTap.weigh`."""
    check(scheduler, folder)
    for tap in _taps(scheduler):
        tap.weigh()


def save(scheduler: Any, folder: str, *, place: str) -> None:
    """Write the sums of this worker to `place`; see `ranks.write_rank`.

    Raises:
        ComputeFailed: sums are not finite, or a forward pass since `start` failed.
        StorageError: the disk refused.
    """
    check(scheduler, folder)
    runner, taps = scheduler_process.model_runner(scheduler), _taps(scheduler)
    for tap in taps:
        check_finite(tap.layer_id, tap.sums)
    device = taps[0].sums.qq.device if taps else torch.device("cpu")
    dtype: torch.dtype = runner.model_config.dtype
    report = ranks.RankReport(
        geometry=tapped_model.whole_geometry(runner.model_config, [tap.layer_id for tap in taps]),
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        accumulate=accumulation(torch.empty(0, dtype=dtype, device=device)),
        weights=weights_digest(runner.model.parameters()),
        layers={tap.layer_id: tap.report() for tap in taps},
    )
    ranks.write_rank(
        Path(place), geometry.rank_name(), report, {tap.layer_id: tap.sums for tap in taps}
    )


def load(scheduler: Any, folder: str, *, place: str) -> None:
    """Continue from the sums that the worker of this rank wrote with `save`.

    Raises:
        IntegrityError: they are incomplete, or belong to another split of the model.
        OutputExists: they belong to other weights.
    """
    runner, taps = scheduler_process.model_runner(scheduler), _taps(scheduler)
    report, sums = ranks.read_rank(Path(place), geometry.rank_name())
    if {tap.layer_id: tap.sums.heads for tap in taps} != {
        layer: one.heads for layer, one in sums.items()
    }:
        raise unusable(Path(place), "it has other layers or heads")
    if report.weights != (mine := weights_digest(runner.model.parameters())):
        raise another(Path(place).parent, "weights", report.weights, mine)
    for tap in taps:
        tap.restore(sums[tap.layer_id], report.layers[tap.layer_id])


def project(scheduler: Any, folder: str, *, place: str) -> None:
    """Write the output projections of the tapped layers to `place`, see `rank_rows`.

    Raises:
        UnsupportedModel: a layer has none.
        StorageError: the disk refused.
    """
    runner = scheduler_process.model_runner(scheduler)
    for layer in _tapped_layers(scheduler):
        with torch.inference_mode():
            weight = radix_attention.output_projection(
                runner.model, layer, runner.model_config.dtype
            )
        _own_rows(layer, Path(place)).write_projection(layer.layer_id, weight)


def keep(scheduler: Any, folder: str, *, place: str, queries: bool) -> None:
    """Sum no more, and write the rows of the sequence that comes next to `place`; see `rank_rows`.

    Args:
        scheduler: SGLang's scheduler of this worker.
        folder: as of `start`.
        place: a folder of its own; empty to keep nothing from now on.
        queries: whether queries are written too.

    Raises:
        OscarZooError: a forward pass failed.
    """
    check(scheduler, folder)
    for layer in _tapped_layers(scheduler):
        tap: LayerTap = getattr(layer, TAP)
        tap.summing = False
        tap.keep = _own_rows(layer, Path(place), queries=queries).write if place else None


def simulate(scheduler: Any, folder: str, *, place: str) -> None:
    """Sum no more, and let the tapped layers compute attention over an INT2 cache.

    Args:
        scheduler: SGLang's scheduler of this worker.
        folder: as of `start`.
        place: folder of `cache_files.write_cache`; empty for the engine's own attention.

    Raises:
        OscarZooError: a forward pass failed.
    """
    check(scheduler, folder)
    taps = _taps(scheduler)
    heads = taps[0].sums.heads
    whole = tapped_model.whole_geometry(
        scheduler_process.model_runner(scheduler).model_config, [tap.layer_id for tap in taps]
    )
    mine = {"num_kv_heads": len(heads), "num_q_heads": taps[0].query_heads}
    cache = None
    if place:
        spec = read_cache(Path(place), heads)
        cache = SimulatedCache(spec, whole.model_copy(update=mine), taps[0].sums.qq.device)
    for tap in taps:
        tap.summing, tap.cache = False, cache


def _own_rows(layer: Any, place: Path, *, queries: bool = False) -> OwnRows:
    tap: LayerTap = getattr(layer, TAP)
    first = geometry.attention_rank() * tap.query_heads
    q_heads = range(first, first + tap.query_heads)
    return OwnRows(place, geometry.rank_name(), q_heads, tap.sums.heads, queries)


def _reporting(step: Callable[..., None]) -> Callable[..., None]:
    """`step` as a method of the scheduler that reports its failure."""

    @functools.wraps(step)
    def method(scheduler: Any, folder: str, **kwargs: Any) -> None:
        try:
            step(scheduler, folder, **kwargs)
        except OscarZooError as error:
            ranks.write_failure(Path(folder), geometry.rank_name(), error)
            raise

    return method


METHODS: Mapping[str, Callable[..., None]] = {
    f"oscar_tap_{step.__name__}": _reporting(step)
    for step in (start, load, check, weigh, save, project, keep, simulate)
}
"""Methods that `Engine.collective_rpc` may call on a tapped engine, each with `folder=`, the
private folder of the capture."""


def _tapped_layers(scheduler: Any) -> list[Any]:
    model = scheduler_process.model_runner(scheduler).model
    return [layer for layer in radix_attention.attention_layers(model) if hasattr(layer, TAP)]


def _taps(scheduler: Any) -> list[LayerTap]:
    return [getattr(layer, TAP) for layer in _tapped_layers(scheduler)]
