"""What is said about the fit of a model on GPUs: one answer, and one for each kind of cache."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.app.model_needs import Weights
from oscar_zoo.engines.sglang.capacity import USABLE, Cache, reserved, weights_share
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.engines.sglang.pool_plan import Pools

GIVEN, OF_RECIPE = "as given", "of its recipe"
"""Where a number comes from."""


@dataclass(frozen=True)
class FittingCache:
    """What fits with one kind of cache.

    Where nobody knows what other layers keep, tokens and requests lie between two numbers. Else the
    two are the same.

    Attributes:
        cache: its bytes on each GPU.
        pools: what a server has that shall run the requests of the report.
        most_tokens: token slots at most; `pools` has them at least.
        requests: of the context of the report that run at a time, when as many are asked for.
        most_requests: the same at most.
        context: the longest that each request can have at a time, no longer than the model takes.
        fits: whether the requests of the report fit with its context; `None` where nobody knows.
    """

    cache: Cache
    pools: Pools
    most_tokens: int
    requests: int
    most_requests: int
    context: int
    fits: bool | None

    @property
    def tokens(self) -> int:
        """Token slots."""
        return self.pools.tokens

    @property
    def running(self) -> int:
        """Requests that run at a time, of those of the report."""
        return self.pools.requests


@dataclass(frozen=True)
class FitReport:
    """The answer.

    Attributes:
        model: its name.
        memory: bytes of one GPU.
        memory_source: what says so, in a few words.
        gpus: number of them.
        gpus_source: what says so, in a few words.
        weights: of the model.
        room: bytes of each GPU that are left for a cache.
        context: tokens of a request.
        longest: tokens of a request that the model takes at most; `None` where nobody knows.
        requests: that run at a time.
        usual_requests: as many as `serve` lets run at a time when its flags do not say a number.
        bits: of a stored element of the INT2 cache, scales and offsets included, on average.
        bits_source: what says so, in a few words.
        caches: BF16, FP8 and INT2.
        unknown: what nobody knows of the layers without full attention, in words; `None` where all
            of them are counted.
        config_of: id of the model on Hugging Face whose `config.json` says it; `None` where no such
            file is known.
        fits: whether the requests that were asked for fit with INT2; where nobody said a number,
            whether one fits beside what `serve` reserves. `None` where nobody knows.
        fitting_gpus: the smallest number of GPUs with which that fits, as far as anybody knows;
            `None` where none is enough, or the model takes no such context.
        not_served: why `serve` refuses the model, or `None` where that is not known.
    """

    model: str
    memory: int
    memory_source: str
    gpus: int
    gpus_source: str
    weights: Weights
    room: int
    context: int
    longest: int | None
    requests: int
    usual_requests: int
    bits: float
    bits_source: str
    caches: tuple[FittingCache, ...]
    unknown: str | None
    config_of: str | None
    fits: bool | None
    fitting_gpus: int | None
    not_served: str | None

    def of_kind(self, kind: str) -> FittingCache:
        """What fits with the cache `BF16`, `FP8` or `INT2`."""
        return next(one for one in self.caches if one.cache.kind == kind)

    @property
    def other_layers(self) -> bool:
        """Whether what layers without full attention keep is counted."""
        return self.unknown is None

    @property
    def reserved(self) -> int:
        """Bytes of each GPU that neither weights nor a cache take."""
        return reserved(self.memory)

    @property
    def gpu_weights(self) -> int:
        """Bytes of each GPU that the weights take."""
        return weights_share(self.weights.nbytes, Layout(tp=self.gpus))

    @property
    def usable(self) -> float:
        """Share of the memory that weights and cache may take."""
        return USABLE
