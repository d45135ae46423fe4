"""The calibration tap: it sums over the inputs and outputs of every attention layer of this worker
while prompts run through SGLang.

A hook around `RadixAttention.forward` sees q, k and v of the worker's own heads after norms and
RoPE, and the output before any gate and o_proj, for every model and attention backend. It is
installed only if the environment asks for it (`ranks.VARIABLE`). It sums from `oscar_tap_start` on.
The driving process (`capture_process.py`) calls this and all other `METHODS` on all
ranks at once. An error in a forward pass is kept and raised by the next call, because an exception
in the middle of a batch would end the engine without a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute import estimators
from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.capture.state import another, unusable, weights_digest
from oscar_zoo.compute.coverage import check_finite
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.compute.products import accumulation
from oscar_zoo.engines.sglang import model_refusals
from oscar_zoo.engines.sglang.compat import geometry, radix_attention, scheduler_process
from oscar_zoo.errors import ComputeFailed, OscarZooError, UnsupportedModel

TAP = "oscar_tap"
"""Name of the attribute that holds the tap of an attention layer."""


@dataclass
class LayerTap:
    """The tap of one attention layer of this worker.

    Attributes:
        layer_id: decoder layer index.
        sums: sums of the worker's own heads.
        query_heads: number of query heads of this worker.
        outputs: whether attention outputs are summed too.
        lengths, weighted_lengths: lengths of the sequences of the first and second pass, in order.
        target: target of the second pass; `None` in the first pass.
        error: the first error; nothing is summed after it.
    """

    layer_id: int
    sums: LayerMoments
    query_heads: int
    outputs: bool
    lengths: list[int] = field(default_factory=list)
    weighted_lengths: list[int] = field(default_factory=list)
    target: Tensor | None = None
    error: OscarZooError | None = None

    def observe(
        self, rows: Sequence[Tensor | None], prefixes: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Add one extend batch.

        Args:
            rows: q, k, v, o as the attention layer got and returned them: tokens first, possibly
                padded at the end, heads and channels as one or two axes.
            prefixes: for every sequence of the batch, its tokens in earlier batches.
            lengths: for every sequence, its tokens in this batch.
        """
        if self.error is not None:
            return
        try:
            self._count(prefixes, lengths)
            self._sum(rows, sum(lengths))
        except OscarZooError as error:
            self.error = error

    def weigh(self) -> None:
        """Begin the second pass.

        The target comes from the queries of this rank alone. If ranks share a KV head,
        `join_heads` joins their weighted sums accordingly.

        Raises:
            ComputeFailed: there was no first pass.
        """
        if not self.sums.query_rows:
            raise ComputeFailed(
                f"attention of layer {self.layer_id} was never reached.",
                hint="its code does not use SGLang's attention layer, or ran inside a CUDA graph",
            )
        self.target = estimators.qqt(self.sums)

    def restore(self, sums: LayerMoments, report: ranks.LayerReport) -> None:
        """Continue from the sums of an earlier worker in this place."""
        device = self.sums.qq.device
        for name in (*ROW_SUMS, *WEIGHTED_SUMS, "wo"):
            tensor = getattr(sums, name)
            setattr(sums, name, None if tensor is None else tensor.to(device))
        self.sums = sums
        self.lengths, self.weighted_lengths = list(report.lengths), list(report.weighted_lengths)

    def report(self) -> ranks.LayerReport:
        """Counts for the driving process, which compares them with the prompts that it sent."""
        return ranks.LayerReport(
            heads=self.sums.heads,
            tokens=self.sums.tokens,
            query_rows=self.sums.query_rows,
            output_rows=self.sums.output_rows,
            weighted_tokens=self.sums.weighted_tokens,
            lengths=tuple(self.lengths),
            weighted_lengths=tuple(self.weighted_lengths),
        )

    def _count(self, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Check that sequences come one after the other, each from its first token on and without a
        gap."""
        seen = self.lengths if self.target is None else self.weighted_lengths
        for prefix, length in zip(prefixes, lengths, strict=True):
            if prefix == 0:
                seen.append(length)
            elif seen and seen[-1] == prefix:
                seen[-1] += length
            else:
                raise ComputeFailed(
                    f"layer {self.layer_id} got tokens from position {prefix} on, after {seen[-1:]}"
                    " tokens.",
                    hint="prompts must run one at a time, without a prefix cache",
                )

    def _sum(self, rows: Sequence[Tensor | None], tokens: int) -> None:
        heads = (self.query_heads, len(self.sums.heads), len(self.sums.heads), self.query_heads)
        query, key, value, output = (
            self._by_head(x, tokens, n) for x, n in zip(rows, heads, strict=True)
        )
        if self.target is None:
            self.sums.add(query, key, value, output if self.outputs else None)
        else:
            self.sums.add_weighted(key, value, self.target)

    def _by_head(self, rows: Tensor | None, tokens: int, heads: int) -> Tensor:
        """Reshape `[tokens + padding, heads * width]` or `[.., heads, width]` to
        `[heads, tokens, width]`."""
        if not isinstance(rows, Tensor) or rows.shape[0] < tokens or rows[:1].numel() % heads:
            seen = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise UnsupportedModel(
                f"attention of layer {self.layer_id} handles {seen} for {tokens} tokens and {heads}"
                " heads.",
                hint="calibration needs one K and one V row per token and head in every layer",
            )
        return rows[:tokens].reshape(tokens, heads, -1).transpose(0, 1)


def attention(
    original: Any, layer: Any, q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `RadixAttention.forward`: call it, then show inputs and outputs to the tap of
    this layer, if there is one."""
    result = original(layer, q, k, v, forward_batch, *args, **kwargs)
    tap: LayerTap | None = getattr(layer, TAP, None)
    if tap is None or forward_batch.forward_mode.name != "EXTEND" or radix_attention.capturing():
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
    tap.observe(
        (q, k, v, result), forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    )
    return result


def start(scheduler: Any, folder: str, *, outputs: bool, weights: bool) -> None:
    """Put a tap on every attention layer of this worker.

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
    _check_model(runner)
    device = next(runner.model.parameters()).device
    for layer in radix_attention.attention_layers(runner.model):
        heads = _heads(runner.model_config, layer)
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
        geometry=_geometry(runner.model_config, [tap.layer_id for tap in taps]),
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
    f"oscar_tap_{step.__name__}": _reporting(step) for step in (start, load, check, weigh, save)
}
"""Methods that `Engine.collective_rpc` may call on a tapped engine, each with `folder=`, the
private folder of the capture."""


def _taps(scheduler: Any) -> list[LayerTap]:
    layers = radix_attention.attention_layers(scheduler_process.model_runner(scheduler).model)
    return [getattr(layer, TAP) for layer in layers]


def _check_model(runner: Any) -> None:
    """Refuse models that cannot be served, several attention layers in one decoder layer, and a
    cache that has not the precision of the model."""
    layers = list(radix_attention.attention_layers(runner.model))
    instead = "choose a model with full attention in every layer"
    try:
        model_refusals.check_model(runner.model_config)
    except UnsupportedModel as error:
        raise UnsupportedModel(error.message, hint=instead) from None
    capped = any(getattr(layer, "logit_cap", None) for layer in layers)
    if capped or getattr(runner.model_config, "has_attention_sinks", False):
        what = "capped logits" if capped else "learned attention sinks"
        raise UnsupportedModel(
            f"the SGLang engine does not measure attention with {what}.",
            hint="oscar-zoo compute --engine transformers",
        )
    for layer in layers:
        try:
            model_refusals.check_layers([layer])
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"layer {layer.layer_id}: {error.message}", hint=instead
            ) from None
    ids = [layer.layer_id for layer in layers]
    if len(set(ids)) != len(ids):
        raise UnsupportedModel(
            "one decoder layer has several attention layers.", hint="choose another model"
        )
    if runner.kv_cache_dtype != runner.model_config.dtype:
        raise ComputeFailed(
            f"the KV cache holds {runner.kv_cache_dtype}, the model computes in"
            f" {runner.model_config.dtype}.",
            hint=(
                "calibrate with a cache of the model's own type: the checkpoint's quantization must"
                " not set another"
            ),
        )


def _heads(config: Any, layer: Any) -> range:
    """The model's indices of the KV heads of this worker."""
    heads, total = geometry.local_kv_heads(config), config.get_total_num_kv_heads()
    whole = (
        getattr(config.hf_text_config, "original_total_num_kv_heads", total) == total
    )  # else SGLang padded them
    if not whole or len(heads) != layer.tp_k_head_num or layer.tp_q_head_num % len(heads):
        raise UnsupportedModel(
            f"layer {layer.layer_id}: the KV heads of the model cannot be split evenly over the"
            " ranks.",
            hint="use as many ranks as divide the number of KV heads",
        )
    return heads


def _geometry(config: Any, layers: Sequence[int]) -> Geometry:
    return Geometry(
        num_layers=config.num_hidden_layers,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.get_total_num_kv_heads(),
        head_dim=config.head_dim,
        v_head_dim=config.v_head_dim,
        attention_layers=tuple(sorted(layers)),
    )
