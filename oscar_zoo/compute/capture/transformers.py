"""Capture in this process with transformers, for every model that uses its attention interface.

An attention function is registered under a name of its own. It computes exactly what the
model computes and passes the rows to a listener, so no architecture is known by name here. Models
whose layers exchange only hidden states run layer by layer, and one pass is then enough for
everything. All other models, and captures with more tokens than fit, run whole (`passes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# first: it prepares the imports of transformers, or reports what is missing
from oscar_zoo.models.loading import LoadedModel

# isort: split

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import logging as transformers_logging

from oscar_zoo.artifact.manifest import ModelBlock, Numerics
from oscar_zoo.artifact.specs import Harness, brief
from oscar_zoo.compute.capture.checkpoint import DATA, STORE, Checkpoint, weights_digest
from oscar_zoo.compute.capture.passes import Passes, RowSink, Ticks
from oscar_zoo.compute.data.calibration import CalibrationData
from oscar_zoo.compute.moments import Moments, Need, row_loss
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord
from oscar_zoo.compute.products import accumulation
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.attention import BLOCKED, Softmax, exact_attention
from oscar_zoo.models.checkpoint import UNMERGED, whole_weight
from oscar_zoo.models.geometry import covers_context
from oscar_zoo.models.latent import Latents, latents_of, readers_of_latents, up_weights
from oscar_zoo.models.layer_replay import ReplayPlan, plan_replay, remember_plan

NAME = "oscar_zoo_capture"
"""Name of our attention implementation in transformers."""


def capture(
    loaded: LoadedModel,
    data: CalibrationData,
    *,
    needs: frozenset[Need],
    progress: Ticks = lambda done, total: None,
    work: Path | None = None,
    resume: bool = False,
) -> Moments:
    """Moments of `data`: one sequence at a time, in order, without padding or KV cache; on the
    model's device, with no coverage checked; empty without needs. The model is left as it was
    found, and may be spread over devices by accelerate. What an interrupted capture needs to go on
    is kept in `work`, if that is given, and `resume` goes on from it."""
    if not needs:
        return Moments(loaded.block.geometry, {})
    with _tapped(loaded) as tap, torch.inference_mode():
        plan, projections = _learn(tap, data.sequences[0])
        tap.readers = projections
        saved = keeper = None
        if work is not None:
            info = MomentsInfo(
                model=loaded.block,
                calibration=None,
                coverage=None,
                numerics=numerics(loaded),
                sequences=tuple(map(SequenceRecord.of, data.sequences)),
                partial=True,
            )
            keeper = Checkpoint(work / STORE, _facts(loaded, data, needs), info)
            saved = keeper.load() if resume else None
            if saved is None:
                keeper.clear()
        passes = Passes(
            loaded.block.geometry,
            needs,
            loaded.device,
            data.sequences,
            forward=tap.forward,
            listen=tap.listen,
            weights=lambda layer: projections.weight(layer, loaded.block),
            progress=progress,
            checkpoint=keeper,
        )
        return passes.run(plan, saved, streamed=loaded.streamed)


class Tap:
    """The attention of one model while it goes through `_dispatch`."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.projections: OutputProjections | None = None
        self.latents: Latents | None = None
        self.readers: OutputProjections | None = None
        self._sink: RowSink | None = None
        self._calls: Counter[int] = Counter()

    def listen(self, sink: RowSink | None) -> None:
        """Who gets the rows from now on."""
        self._sink = sink

    def forward(self, ids: Sequence[int]) -> None:
        """The decoder over one sequence; logits over the vocabulary are not needed."""
        tokens = torch.tensor([list(ids)], device=self.loaded.device)
        self.loaded.model.base_model(input_ids=tokens, use_cache=False)

    def saw(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, output: Tensor, **rest: Any
    ) -> None:
        """One call of attention; `output` is `[1, T, n_q, dv]`."""
        layer = getattr(module, "layer_idx", None)
        if layer not in self.loaded.block.attention_layers:
            return
        self._calls[layer] += 1
        if self.latents is not None:
            query, key, value = self.latents.rows(module, query, key)
        self._refuse(layer, query, key, value, **rest)
        if self.projections is not None:
            self.projections.watch(layer, module)
        if self._sink is None:
            return
        width, more = self.loaded.block.head_dim, {}
        if self.latents is not None and self.readers is not None:
            scaling = Softmax.of_call(query, rest).scaling
            readers = self.readers.of_latents(layer, self.loaded.block)
            more["loss"] = row_loss(query[0], key[0, 0], scaling, *readers)
        heads = output[0].transpose(0, 1)
        self._sink(layer, query[0, ..., :width], key[0, ..., :width], value[0], heads, **more)

    def _refuse(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> None:
        block = self.loaded.block
        reasons = [what for name, what in BLOCKED.items() if rest.get(name) is not None]
        window = rest.get("sliding_window")
        if window is not None and not covers_context(
            window, self.loaded.model.config.get_text_config(decoder=True)
        ):
            reasons.append(f"a sliding window of {window} tokens")
        heads = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        width = block.head_dim + (block.rotary_key or 0)
        if heads != (block.num_q_heads, block.num_kv_heads, width, block.v_head_dim):
            what = "query heads, KV heads, head_dim, v_head_dim"
            reasons.append(f"{what} {heads}, unlike its configuration")
        if reasons:
            raise UnsupportedModel(
                f"layer {layer} of {block.id} ({type(self.loaded.model).__name__}) has"
                f" {reasons[0]}.",
                hint="its cache cannot be calibrated by this version",
            )

    def check_reached(self) -> None:
        """After one pass of the whole model."""
        block, name = self.loaded.block, type(self.loaded.model).__name__
        wrong = [layer for layer in block.attention_layers if self._calls[layer] != 1]
        if not wrong:
            return
        how = f"computes the attention of layers {brief(tuple(wrong))} in code of its own"
        if any(self._calls[layer] for layer in wrong):
            how = f"attends {self._calls[wrong[0]]} times per token in layer {wrong[0]}"
        raise UnsupportedModel(
            f"{block.id} ({name}) {how}.",
            hint="only models with one cache per layer that use the attention interface of"
            " transformers can be calibrated",
        )


class OutputProjections:
    """Which weights read the attention output of each layer: found by watching, not by name. The
    output projection is the first matrix that a layer applies after its attention function
    returned. It is found once per layer, during the first sequence."""

    def __init__(self) -> None:
        self.found: dict[int, nn.Module] = {}
        self._watched: dict[int, nn.Module] = {}
        self._handles: list[Any] = []

    def watch(self, layer_id: int, attention: nn.Module) -> None:
        """Call this just before the attention function of `attention` returns; only the first call
        counts."""
        if layer_id in self._watched:
            return
        self._watched[layer_id] = attention

        def found(module: nn.Module, args: Any) -> None:
            self.found.setdefault(layer_id, module)

        self._handles += [
            module.register_forward_pre_hook(found)
            for module in attention.modules()
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2
        ]

    def close(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def weight(self, layer_id: int, block: ModelBlock) -> Tensor:
        """`[hidden, num_q_heads * dv]` of a layer that was watched; of latents what reads their
        sums."""
        if block.rotary_key is not None:
            return readers_of_latents(*self.of_latents(layer_id, block))
        return self._weight(layer_id, block, block.num_q_heads * block.v_head_dim)

    def of_latents(self, layer_id: int, block: ModelBlock) -> tuple[Tensor, Tensor]:
        """W_UV and W_O; see `latent.readers`."""
        attention = self._watched[layer_id]
        values = up_weights(attention, block)[1]
        out = self._weight(layer_id, block, block.num_q_heads * values.shape[1]).to(values.device)
        by_head = out.unflatten(1, (block.num_q_heads, -1)).transpose(0, 1)
        return values.float(), by_head.float()

    def _weight(self, layer_id: int, block: ModelBlock, columns: int) -> Tensor:
        module, name = self.found.get(layer_id), f"output projection of layer {layer_id}"
        what = "has no matrix of its own"
        if module is not None:
            weight = whole_weight(module, f"{name} of {block.id}")
            if weight.ndim == 2 and weight.shape[1] == columns:
                return weight
            what = f"has shape {list(weight.shape)}, not [hidden, {columns}]"
        raise UnsupportedModel(f"the {name} of {block.id} {what}.", hint=UNMERGED)


def output_weights(loaded: LoadedModel, ids: Sequence[int]) -> Callable[[int], Tensor]:
    """Layer id -> `[hidden, num_q_heads * dv]`, the weights that read the attention output."""
    with _tapped(loaded) as tap, torch.inference_mode():
        _, projections = _learn(tap, ids)
    return lambda layer: projections.weight(layer, loaded.block)


def numerics(loaded: LoadedModel) -> Numerics:
    """The `numerics` block of the manifest."""
    device = loaded.device
    return Numerics(
        forward_dtype=loaded.dtype,
        accumulate=accumulation(torch.empty(0, dtype=getattr(torch, loaded.dtype), device=device)),
        engine=Harness(name="transformers", version=version("transformers")),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


_OPEN: ContextVar[Tap | None] = ContextVar("oscar_zoo_tap", default=None)
_KNOWN: WeakKeyDictionary[Any, tuple[ReplayPlan | None, OutputProjections]] = WeakKeyDictionary()


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
        with latents_of(loaded.model, loaded.block) as tap.latents:
            yield tap
    finally:
        loaded.model.set_attn_implementation(before)
        transformers_logging.set_verbosity(level)
        _OPEN.reset(opened)


def _learn(tap: Tap, ids: Sequence[int]) -> tuple[ReplayPlan | None, OutputProjections]:
    """Run a few tokens to learn whether all layers are reached, which module reads their outputs,
    and whether layers can run one at a time."""
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
        _KNOWN[model] = plan, projections
    return _KNOWN[model]


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
