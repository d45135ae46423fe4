"""Run many sequences through one model, decoder layer by decoder layer.

Each weight is then needed once instead of once per sequence, which matters for models whose weights
are read when they are used. When layers exchange more than hidden states, the sequences run one
after the other instead, with the same result but slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from oscar_zoo.models.layer_replay import Entangled, ReplayPlan, plan_replay

_PLANS: WeakKeyDictionary[Any, ReplayPlan | None] = WeakKeyDictionary()


def run_by_layer(
    model: Any,
    num_layers: int,
    sequences: Sequence[Tensor],
    last: Callable[[int], Any] | None = None,
) -> Iterator[Any]:
    """Run every sequence, all of them through one layer before the next.

    Args:
        model: of transformers; whatever routes its attention sees the calls in the order of layers.
        sequences: token ids, `[T]` each.
        last: index of a sequence -> one pass of the whole model over it, whose result is wanted;
            `None` for the passes themselves.

    Yields:
        What `last` returns, in order; nothing without it.
    """
    plan = known_plan(model, num_layers, sequences[0])
    try:
        if plan is None:
            raise Entangled
        states = [plan.prepare(lambda ids: _decode(model, ids), ids.tolist()) for ids in sequences]
    except Entangled:
        for number, ids in enumerate(sequences):
            if last is None:
                _decode(model, ids.tolist())
            else:
                yield last(number)
        return
    for index, layer in enumerate(plan.layers):
        for state in states:
            state.advance(layer, index)
    for number, state in enumerate(states if last else ()):
        yield plan.finish(lambda number=number: last(number), state)  # type: ignore[misc]


def known_plan(model: Any, num_layers: int, ids: Tensor) -> ReplayPlan | None:
    """See `layer_replay.plan_replay`; a plan is made once per model."""
    if model not in _PLANS:

        def decode(probe: Sequence[int]) -> None:
            _decode(model, probe)

        _PLANS[model] = plan_replay(model, num_layers, ids.tolist(), forward=decode, outline=decode)
    return _PLANS[model]


def remember_plan(model: Any, plan: ReplayPlan | None) -> None:
    """Store the plan of `model` that a caller has already made; `None` means that there is none."""
    _PLANS[model] = plan


def _decode(model: Any, ids: Sequence[int]) -> None:
    device = model.get_input_embeddings().weight.device
    model.base_model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
