"""Which groups of channels may share a scale in the cache of a model. Needs no torch."""

from __future__ import annotations

from oscar_kernels.spec import check_group_size
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import UsageError


def check_groups(
    geometry: Geometry, group_size: int, model: str, *, option: str = "a group size of {}"
) -> None:
    """Refuse groups that rows of a cache cannot be cut into.

    Args:
        geometry: shape of the cache.
        group_size: the most channels that share a scale.
        model: what messages call the model.
        option: how a user gives another group size, with `{}` in the place of the number.

    Raises:
        UsageError: why, and the largest group size that can be used.
    """
    try:
        check_group_size(geometry.head_dims, group_size)
    except ValueError as error:
        raise UsageError(
            f"a group size of {group_size} does not go with {model}: {error}.",
            hint=f"use {option.format(geometry.largest_group)}",
        ) from None
