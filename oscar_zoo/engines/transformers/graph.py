"""Decode steps of a whole model as one CUDA graph.

Python takes longer to launch the kernels of a decode step than a GPU takes to run them. So a step
that was launched some times is recorded, and replayed from then on. What a model computes on the
host stays as it was then; that is why a replay at another length must first give what the model
gives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from oscar_zoo.engines.transformers.layer import OscarLayer
from oscar_zoo.engines.transformers.rows import Rows
from oscar_zoo.errors import UsageError
from oscar_zoo.runtime.dispatch import KERNELS

if TYPE_CHECKING:
    from oscar_zoo.engines.transformers.cache import OscarCache

WARM = 2
"""Steps that are launched before one is recorded: they compile kernels, and an answer of a few
tokens is not worth a recording."""
SAME = 1e-3
"""Largest relative distance of logits of a replay from those of the model."""
MASK = "attention_mask"
"""A step needs none: the first pass told who has padding."""
PLAIN = bool | int | float | str | None


@dataclass(frozen=True)
class Recording:
    """A step that was recorded.

    Attributes:
        length: of each sequence in front of it.
        inputs: where it reads what a step brings.
        at: where it reads the length.
        out: where it leaves its results.
    """

    length: int
    inputs: Mapping[str, Tensor]
    at: Tensor
    replay: Callable[[], None]
    out: ModelOutput


def install(model: Any) -> None:
    """Let the models of this class offer their steps to the `OscarCache` that they are given."""
    kind = type(model)
    stock = kind.forward
    if getattr(stock, "offers_steps", False):
        return

    kinds = inspect.signature(stock).parameters.items()
    names = [name for name, one in kinds if one.kind is one.POSITIONAL_OR_KEYWORD][1:]

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **given: Any) -> Any:
        graphs = (getattr(x, "graph", None) for x in given.values())
        graph = next((x for x in graphs if isinstance(x, StepGraph)), None)
        if graph is None or graph.asked or len(args) > len(names):
            return stock(self, *args, **given)
        named, graph.asked = dict(zip(names, args, strict=False)), True
        try:
            return graph.step(functools.partial(stock, self), named | given)
        finally:
            graph.asked = False

    forward.offers_steps = True  # type: ignore[attr-defined]
    kind.forward = forward


def record(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """What launches again what `call` launched, and the result of `call`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    return graph.replay, out


class StepGraph:
    """The graph of one cache: of steps that bring one token of each sequence."""

    def __init__(self, cache: OscarCache) -> None:
        self._cache = cache
        self.usable = all(type(layer) is OscarLayer for layer in cache.layers)
        """Not where a layer keeps something else, or a step could not be recorded."""
        self.replays = 0
        self.asked = False
        """During a step: a model may be inside of another one, as with adapters."""
        self._trusted = False
        self._forget()

    def _forget(self) -> None:
        self._seen: tuple[Any, list[Any]] | None = None
        self._recording: Recording | None = None
        self._warm = 0

    def step(self, call: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """`call(**given)`, or the same by a replay."""
        ids = given.get("input_ids")
        if ids is not None and not ids.shape[1]:
            held = self._cache.get_seq_length(self._cache.block.attention_layers[0])
            message = f"no new tokens came: this cache holds {held:,}, and the input has no more."
            raise UsageError(message, hint="give the whole conversation, or call cache.reset()")
        inputs = self._inputs(given)
        if inputs is None:
            self._forget()  # which would hold stores that are about to grow
            return call(**given)
        kind = {x: given[x] for x in given if x not in inputs and x != MASK}
        kind |= {name: (x.shape, x.dtype, x.device) for name, x in inputs.items()}
        if not self._goes_on(kind):
            self._forget()
            out = call(**given)
            self._seen, self._warm = (kind, self._stores()), 1
            return out
        self._warm += 1
        if self._recording is None and self._warm > WARM:
            self._recording = self._recorded(call, given, inputs)
        if self._recording is None:
            return call(**given)
        length = self._rows[0].length
        out = self._replayed(self._recording, inputs)
        if self._trusted or length == self._recording.length:
            return out
        self._count(length)  # so that the model writes the same rows again
        own = call(**given)
        self._trusted = self.usable = _near(out, own)
        return own

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The tensors that a step brings; `None` where no graph can hold it."""
        inputs = {x: given[x] for x in given if isinstance(given[x], Tensor) and x != MASK}
        rest = (given[x] for x in given if x not in inputs and x != MASK)
        ids, mask, cache = inputs.get("input_ids"), given.get(MASK), self._cache
        if (
            not self.usable
            or not cache.attends
            or torch.is_grad_enabled()
            or ids is None
            or ids.shape[1] != 1
            or "position_ids" not in inputs  # else they would be those of the recording
            or not (mask is None or isinstance(mask, Tensor))
            or not all(x is cache or isinstance(x, PLAIN) for x in rest)
        ):
            return None
        rows = self._rows
        ready = all(x is not None and x.length and x.ops is KERNELS for x in rows)
        return inputs if ready and {x.device for x in rows} == {ids.device} else None

    def _goes_on(self, kind: Any) -> bool:
        """Whether this step is as the last one was, and its rows lie where those did."""
        if self._seen is None or self._seen[0] != kind or self._rows[0].room < 1:
            return False
        return all(x is y for x, y in zip(self._seen[1], self._stores(), strict=True))

    def _recorded(
        self, call: Callable[..., Any], given: Mapping[str, Any], inputs: Mapping[str, Tensor]
    ) -> Recording | None:
        steps, rows = self._cache.steps, self._rows[0]
        length, room = rows.length, rows.length + rows.room
        with torch.inference_mode():
            own = {name: x.clone() for name, x in inputs.items()}
            at = torch.full((), length, dtype=torch.int64, device=rows.device)
        arguments = {**given, **own, MASK: None}

        def launched() -> Any:
            with steps.follow(at, room):
                return call(**arguments)

        try:
            replay, out = record(launched)
            self.usable = isinstance(out, ModelOutput) and all(
                isinstance(x, Tensor) or x is self._cache for x in out.values()
            )
        except Exception:  # of any kind: a model that looks at results on the host, for one
            self.usable, self._cache.waiting = False, None
        self._count(length)
        return Recording(length, own, at, replay, out) if self.usable else None

    def _replayed(self, recording: Recording, inputs: Mapping[str, Tensor]) -> ModelOutput:
        length = self._rows[0].length
        with torch.inference_mode():
            recording.at.fill_(length)
            for name, x in recording.inputs.items():
                x.copy_(inputs[name])
        recording.replay()
        self.replays += 1
        self._count(length + 1)
        out = recording.out.items()
        return type(recording.out)(
            **{name: x.clone() if isinstance(x, Tensor) else x for name, x in out}
        )

    @property
    def _rows(self) -> list[Rows]:
        return [layer.rows for layer in self._cache.layers]

    def _stores(self) -> list[Any]:
        return [x for rows in self._rows for x in (rows.store, rows.windows)]

    def _count(self, length: int) -> None:
        for rows in self._rows:
            rows.count(length)


def _near(out: ModelOutput, own: ModelOutput) -> bool:
    x, y = out.logits.float(), own.logits.float()
    return bool((x - y).norm() <= SAME * y.norm())
