"""How to run many sequences through the layers of any model one layer at a time, learned from the
model itself.

Each weight is then needed once instead of once per sequence. One pass of the model, with layers
that do nothing in place of its own, gives every argument that each layer would get. The layers can
then run whenever their hidden states are ready. That works only when layers need nothing except
hidden states from each other: `plan_replay` proves it bit for bit with a short sequence, or returns
no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

Result = TypeVar("Result")
Forward = Callable[[Sequence[int]], None]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a layer; `HIDDEN` stands where its hidden states belong."""

PROBE_TOKENS = 32
HIDDEN = "hidden_states"
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Arguments, beside tensors and tuples of these, through which layers cannot tell each other
anything."""

_PLANS: WeakKeyDictionary[Any, ReplayPlan | None] = WeakKeyDictionary()


class Entangled(Exception):  # answered with a pass of the whole model
    """Layers exchange more than hidden states."""


@dataclass
class ReplayState:
    """One sequence between two layers: its hidden states, `[1, T, hidden]`, and how each layer is
    called."""

    hidden: Tensor
    calls: Sequence[Call]

    def advance(self, layer: nn.Module, index: int) -> None:
        args, kwargs = self.calls[index]
        if args:
            output = layer(self.hidden, *args[1:], **kwargs)
        else:
            output = layer(**kwargs | {HIDDEN: self.hidden})
        self.hidden = _hidden(output)


def advance_together(
    states: Sequence[ReplayState], layer: nn.Module, index: int, *, most_tokens: int
) -> None:
    """Run one layer over sequences that are called alike, in batches of at most `most_tokens` where
    its arguments fit a batch: none has rows of one sequence only."""
    room = most_tokens // states[0].hidden.shape[1] if states else 0
    if room < 2 or any(x.dim() > 1 and x.shape[0] > 1 for x in _tensors(states[0].calls[index])):
        for state in states:
            state.advance(layer, index)
        return
    for first in range(0, len(states), room):
        some = states[first : first + room]
        batch = ReplayState(torch.cat([state.hidden for state in some]), some[0].calls)
        batch.advance(layer, index)
        for state, hidden in zip(some, batch.hidden.split(1), strict=True):
            state.hidden = hidden


@dataclass(frozen=True)
class ReplayPlan:
    """Layers that can run one after the other. `widths` are the numbers of values that layers
    return, 0 for bare hidden states; `hidden_bytes` are of one token, `item_bytes` of one
    number."""

    layers: Sequence[nn.Module]
    widths: tuple[int, ...]
    hidden_bytes: int
    item_bytes: int

    def prepare(self, forward: Forward, ids: Sequence[int]) -> ReplayState:
        """The state of a sequence before the first layer, from a pass in which layers do
        nothing."""
        calls: list[Call] = []
        hidden: Tensor | None = None

        def passed(index: int, given: Tensor, call: Call) -> Tensor:
            nonlocal hidden
            if index != len(calls) or (hidden is not None and given is not hidden):
                raise Entangled
            hidden = given
            calls.append(call)
            return given

        with self._replaced(passed):
            forward(ids)
        if hidden is None or len(calls) != len(self.layers):
            raise Entangled
        return ReplayState(hidden, calls)

    def finish(self, whole: Callable[[], Result], state: ReplayState) -> Result:
        """The output of `whole`, a pass of the model over the sequence of `state`, which is after
        the last layer. No layer runs again."""
        last = len(self.layers) - 1
        with self._replaced(lambda index, given, call: state.hidden if index == last else given):
            return whole()

    @contextmanager
    def _replaced(self, passed: Callable[[int, Tensor, Call], Tensor]) -> Iterator[None]:
        """Layers return what `passed` makes of their hidden states; their hooks and attributes
        stay."""

        def stand_in(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                given = passed(index, *_split(args, kwargs))
                return (given, *[None] * (self.widths[index] - 1)) if self.widths[index] else given

            return forward

        own = [vars(layer).get("forward") for layer in self.layers]
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = stand_in(index)
            yield
        finally:
            for layer, forward in zip(self.layers, own, strict=True):
                vars(layer).pop("forward", None)
                if forward is not None:
                    layer.forward = forward


def plan_replay(
    model: nn.Module, num_layers: int, ids: Sequence[int], *, forward: Forward, outline: Forward
) -> ReplayPlan | None:
    """Find the layers of `model` and prove, with the first tokens of any sequence `ids`, that they
    can run one after the other; `None` where they cannot. `forward` is one pass of the whole
    model."""
    probe = ids[:PROBE_TOKENS]
    # what a layer keeps for the next one would be of this sequence
    other = [0 if any(probe) else 1] * len(probe)
    for layers, returned in _outputs(list(find_stacks(model, num_layers)), forward, probe):
        if len(returned) != len(layers):
            continue  # a stack of something else
        try:
            last = _hidden(returned[-1])
            widths = tuple(len(one) if isinstance(one, tuple) else 0 for one in returned)
            size = last.element_size()
            plan = ReplayPlan(layers, widths, last.shape[-1] * size, size)
            states = [plan.prepare(outline, tokens) for tokens in (probe, other)]
            for index, layer in enumerate(layers):
                for state in states:
                    state.advance(layer, index)
        except Entangled:
            return None
        return plan if torch.equal(states[0].hidden.to(last.device), last) else None
    return None


def find_stacks(model: nn.Module, length: int) -> Iterator[nn.ModuleList]:
    """Lists of `length` modules that lie in no other such list."""
    inside: set[int] = set()
    for module in model.modules():  # outer ones first
        if isinstance(module, nn.ModuleList) and len(module) == length and id(module) not in inside:
            inside.update(id(child) for child in module.modules())
            yield module


def _outputs(
    stacks: Sequence[nn.ModuleList], forward: Forward, ids: Sequence[int]
) -> list[tuple[nn.ModuleList, list[Any]]]:
    """What each layer returns in a pass; shorter where layers do not run once each and in order."""
    found: list[tuple[nn.ModuleList, list[Any]]] = [(layers, []) for layers in stacks]

    def keep(returned: list[Any], index: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: (
            returned.append(output) if index == len(returned) else returned.clear()
        )

    handles = [
        layer.register_forward_hook(keep(returned, index))
        for layers, returned in found
        for index, layer in enumerate(layers)
    ]
    try:
        forward(ids)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """The hidden states in the arguments of a layer, and the arguments without them."""
    hidden = args[0] if args else kwargs.get(HIDDEN)
    rest = kwargs if args else {name: value for name, value in kwargs.items() if name != HIDDEN}
    if not isinstance(hidden, Tensor) or not all(map(_harmless, (*args[1:], *rest.values()))):
        raise Entangled
    return hidden, ((HIDDEN, *args[1:]) if args else (), rest)


def _harmless(value: Any) -> bool:
    return isinstance(value, (*PLAIN, Tensor)) or (
        isinstance(value, tuple) and all(map(_harmless, value))
    )


def _hidden(output: Any) -> Tensor:
    first, *rest = output if isinstance(output, tuple) and output else (output,)
    if not isinstance(first, Tensor) or any(one is not None for one in rest):
        raise Entangled
    return first


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def run_by_layer(
    model: Any,
    num_layers: int,
    sequences: Sequence[Tensor],
    last: Callable[[int], Any] | None = None,
) -> Iterator[Any]:
    """Run every sequence of token ids `[T]`, all of them through one layer before the next. `last`
    is one pass of the whole model over a sequence, by its index, whose result is yielded."""
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
    """See `plan_replay`; a plan is made once per model."""
    if model not in _PLANS:

        def decode(probe: Sequence[int]) -> None:
            _decode(model, probe)

        _PLANS[model] = plan_replay(model, num_layers, ids.tolist(), forward=decode, outline=decode)
    return _PLANS[model]


def remember_plan(model: Any, plan: ReplayPlan | None) -> None:
    _PLANS[model] = plan


def _decode(model: Any, ids: Sequence[int]) -> None:
    device = model.get_input_embeddings().weight.device
    model.base_model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
