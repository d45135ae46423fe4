"""Which numbers of ranks can share the heads of a model. Needs neither torch nor sglang.

SGLang's attention layers assert it when they are built, without a word. On a CPU it pads the heads
instead.
"""

from __future__ import annotations

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.errors import UsageError


def splits(geometry: Geometry, ranks: int) -> bool:
    """Whether all of `ranks` get as many query heads, and as many KV heads or a copy of one."""
    heads = geometry.num_kv_heads
    return geometry.num_q_heads % ranks == 0 and (heads % ranks == 0 or ranks % heads == 0)


def check_heads(name: str, geometry: Geometry, layout: Layout, *, option: str) -> None:
    """Refuse a number of GPUs that cannot share the heads of a model."""
    ranks = layout.attention_ranks
    if splits(geometry, ranks):
        return
    fewer = next(number for number in range(ranks - 1, 0, -1) if splits(geometry, number))
    raise UsageError(
        f"{ranks} GPUs{'' if layout.workers == 1 else ' of a worker'} cannot share the"
        f" {geometry.num_q_heads} query heads and {geometry.num_kv_heads} KV heads of {name}"
        " evenly.",
        hint=f"choose another number, for example {option.format(fewer * layout.workers)}",
    )
