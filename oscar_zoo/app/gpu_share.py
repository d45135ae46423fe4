"""How each GPU of a group divides its memory between a model and a cache, for each kind of cache.

`fit-gpu` and `info` both ask it. No hub is asked, and torch is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from oscar_zoo.app.model_needs import Needs
from oscar_zoo.engines.sglang.capacity import caches, room
from oscar_zoo.engines.sglang.concurrency import Layout, usual_requests
from oscar_zoo.engines.sglang.pool_plan import Planner, Pools


@dataclass(frozen=True)
class GpuShare:
    """What each GPU has for a cache.

    Attributes:
        room: bytes that are left for it.
        usual_requests: as many as `serve` lets run at a time when its flags do not say a number.
        planners: of the caches BF16, FP8 and INT2. What nobody knows of other layers counts as much
            as it can be.
    """

    room: int
    usual_requests: int
    planners: tuple[Planner, ...]

    def pools(self, kind: str, requests: int) -> Pools:
        """What a server with the cache `kind` has that shall run `requests` requests."""
        planner = next(one for one in self.planners if one.cache.kind == kind)
        return planner.divide(self.room, requests)


def gpu_share(needs: Needs, memory: int, weights: int, gpus: int) -> GpuShare:
    """What each of `gpus` GPUs has.

    Args:
        memory: bytes of one GPU.
        weights: bytes of the whole model.
    """
    layout, windows = Layout(tp=gpus), needs.serving.windows
    kinds = caches(needs.geometry, needs.serving, layout, needs.other)
    plain = next(kind.token for kind in kinds if kind.kind == "BF16")
    return GpuShare(
        room(memory, weights, layout),
        usual_requests(memory, plain, windows, layout),
        tuple(Planner(kind, plain, windows, needs.other, least=True) for kind in kinds),
    )


def at_most(planner: Planner) -> Planner:
    """The same planner, where what nobody knows counts as nothing."""
    return replace(planner, least=False)
