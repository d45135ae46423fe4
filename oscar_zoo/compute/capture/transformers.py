"""Capture in this process with transformers, for every model that uses its attention interface.

An attention function is registered under a name of its own. It computes exactly what the
model computes and passes the rows to a listener, so no architecture is known by name here. Models
whose layers exchange only hidden states run layer by layer (`layerwise`), and one pass is then
enough for everything. All other models, and captures with more tokens than fit, run whole
(`whole`), a second time when a fit needs weighted sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

# first: it prepares the imports of transformers, or reports what is missing
from oscar_zoo.models.loading import LoadedModel

# isort: split

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import logging as transformers_logging

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.manifest import ModelBlock, Numerics
from oscar_zoo.artifact.specs import Harness
from oscar_zoo.compute.capture import layerwise, whole
from oscar_zoo.compute.capture.base import Progress, Run, Sums, no_progress
from oscar_zoo.compute.capture.checkpoint import Checkpoint, Saved
from oscar_zoo.compute.capture.projection import OutputProjections
from oscar_zoo.compute.capture.state import DATA, weights_digest
from oscar_zoo.compute.capture.tap import Tap
from oscar_zoo.compute.data import CalibrationData
from oscar_zoo.compute.layer_moments import LayerMoments, Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord
from oscar_zoo.compute.products import accumulation
from oscar_zoo.models.attention import exact_attention
from oscar_zoo.models.layer_replay import ReplayPlan, plan_replay, remember_plan

STORE = "capture"
"""Folder with the state of a capture, in that of the work."""
NAME = "oscar_zoo_capture"
"""Name of our attention implementation in transformers."""


def capture(
    loaded: LoadedModel,
    data: CalibrationData,
    *,
    needs: frozenset[Need],
    progress: Progress = no_progress,
    work: Path | None = None,
    resume: bool = False,
) -> Moments:
    """Moments of `data`: one sequence at a time, in order, without padding or KV cache.

    Args:
        loaded: left as it was found; may be spread over devices by accelerate.
        needs: what fits will read; nothing else is computed.
        work: folder for what an interrupted capture needs to go on; `discard` removes it.
            `None` keeps nothing.
        resume: go on from what is in `work`, if there is anything; otherwise start again.

    Returns:
        Sums on the model's device, with no coverage checked; empty without needs.
    """
    if not needs:
        return Moments(loaded.block.geometry, {})
    device = loaded.device
    with _tapped(loaded) as tap, torch.inference_mode():
        known = _learn(tap, data.sequences[0])
        saved = None
        keeper = None
        if work is not None:
            facts, info = _facts(loaded, data, needs), _partial_info(loaded, data.sequences)
            keeper = Checkpoint(work / STORE, facts, info)
        if keeper is not None and not (resume and (saved := keeper.load())):
            keeper.clear()
        run = Run(
            sums=Sums(loaded.block.geometry, needs, device),
            sequences=data.sequences,
            forward=tap.forward,
            listen=tap.listen,
            set_weights=partial(_set_weights, known.projections, loaded.block)
            if "weights" in needs
            else _nothing,
            progress=progress,
            checkpoint=keeper,
        )
        _run(run, known.plan, saved, streamed=loaded.streamed)
    return run.sums.moments()


def output_weights(loaded: LoadedModel, ids: Sequence[int]) -> Callable[[int], Tensor]:
    """Layer id -> `[hidden, num_q_heads * dv]`, the weights that read the attention output.

    Args:
        ids: some tokens, to watch the model with; a capture before this did that already.
    """
    with _tapped(loaded) as tap, torch.inference_mode():
        projections = _learn(tap, ids).projections
    return lambda layer: projections.weight(layer, loaded.block, loaded.block.id)


def discard(work: Path) -> None:
    """Remove what `capture` kept in `work`."""
    durable.remove_tree(work / STORE)


def numerics(loaded: LoadedModel) -> Numerics:
    """The `numerics` block of the manifest."""
    device = loaded.device
    return Numerics(
        forward_dtype=loaded.dtype,
        accumulate=accumulation(torch.empty(0, dtype=getattr(torch, loaded.dtype), device=device)),
        engine=Harness(name="transformers", version=version("transformers")),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


@dataclass(frozen=True)
class _Known:
    """What one short pass showed about a model."""

    plan: ReplayPlan | None
    projections: OutputProjections


_OPEN: ContextVar[Tap | None] = ContextVar("oscar_zoo_tap", default=None)
_KNOWN: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def _dispatch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute what the model computes and show its rows to the open tap."""
    result = exact_attention(module, query, key, value, attention_mask, **rest)
    if (tap := _OPEN.get()) is not None:
        tap.saw(module, query, key, value, result[0], **rest)
    return result


AttentionInterface.register(NAME, _dispatch)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def _tapped(loaded: LoadedModel) -> Iterator[Tap]:
    """Send the attention of a model through `_dispatch` for a while."""
    tap = Tap(loaded)
    before, level = loaded.model.config._attn_implementation, transformers_logging.get_verbosity()
    opened = _OPEN.set(tap)
    try:
        # of a model that does not follow, `check_reached` speaks
        transformers_logging.set_verbosity_error()
        loaded.model.set_attn_implementation(NAME)
        yield tap
    finally:
        loaded.model.set_attn_implementation(before)
        transformers_logging.set_verbosity(level)
        _OPEN.reset(opened)


def _learn(tap: Tap, ids: Sequence[int]) -> _Known:
    """Run a few tokens to learn three things about the model.

    They are whether all layers are reached, which module reads their outputs, and whether layers
    can run one at a time.
    """
    model = tap.loaded.model
    if model not in _KNOWN:
        tap.projections = projections = OutputProjections()

        def forward(probe: Sequence[int]) -> None:
            try:
                tap.forward(probe)
            finally:
                tap.projections = None
                projections.close()
            tap.check_reached()

        plan = plan_replay(
            model, tap.loaded.block.num_layers, ids, forward=forward, outline=tap.forward
        )
        remember_plan(model, plan)
        _KNOWN[model] = _Known(plan, projections)
    return _KNOWN[model]


def _set_weights(
    projections: OutputProjections, block: ModelBlock, sums: LayerMoments, layer: int
) -> None:
    with torch.inference_mode(False):
        sums.set_weights(projections.weight(layer, block, block.id))


def _nothing(sums: LayerMoments, layer: int) -> None:
    """No fit reads the output projection."""


def _run(run: Run, plan: ReplayPlan | None, saved: Saved | None, *, streamed: bool) -> None:
    """Run layer by layer where that is possible, from where an interrupted run stopped."""
    once = streamed or "weighted" in run.sums.needs  # layer by layer everything is needed once only
    states = layerwise.start_states(run, plan) if plan and once else None
    by_layer = states is not None
    if saved and run.checkpoint and by_layer != (saved.position.phase == layerwise.LAYERS):
        run.checkpoint.clear()
        saved = None
    if plan is None or states is None:
        del states  # makes room
        run.sums.layers.update(saved.layers if saved else {})
        whole.run_whole(run, saved.position if saved else whole.START)
        return
    done = saved.position.done if saved else 0
    run.sums.layers.update(
        {i: sums for i, sums in (saved.layers if saved else {}).items() if i < done}
    )
    layerwise.run_layers(run, plan, states, done, saved.hidden if saved else None)


def _partial_info(loaded: LoadedModel, sequences: Sequence[Sequence[int]]) -> MomentsInfo:
    """The header of moments that are not finished."""
    return MomentsInfo(
        model=loaded.block,
        calibration=None,
        coverage=None,
        numerics=numerics(loaded),
        sequences=tuple(SequenceRecord.of(list(ids)) for ids in sequences),
        partial=True,
    )


def _facts(loaded: LoadedModel, data: CalibrationData, needs: frozenset[Need]) -> dict[str, str]:
    """Everything that decides the bits of the sums, in words."""
    facts = numerics(loaded)
    return {
        "model": loaded.block.id,
        "configuration": loaded.block.config_sha256 or "",
        "weights": weights_digest(loaded.model.parameters()),
        DATA: data.prompts_sha256,
        "needs": " ".join(sorted(needs)),
        "dtype": facts.forward_dtype,
        "accumulation": facts.accumulate,
        "device": facts.device,
        "torch": torch.__version__,
        "transformers": str(facts.engine.version),
    }
