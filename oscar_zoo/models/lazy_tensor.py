"""Tensors that record how they are made from tensors in files, and hold no numbers.

A loader may rename, join, split or cast the tensors of a checkpoint with them: each operation runs
on shapes only and is recorded. `materialize` repeats the recorded operations on the real tensors.
Its result is equal, bit for bit, to what the loader would have made, at any time, on any device,
and as often as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


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
        """The lazy tensor of a tensor in a file."""
        return cls(torch.empty(source.shape, dtype=source.dtype, device="meta"), source)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes and record it.

        Requests for a device are left out, because nothing here has one yet.
        """
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
    """The tensor itself.

    Args:
        read: gives the numbers of a source, on the device where to compute.
    """
    return _materialize(tensor, read, {})


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
