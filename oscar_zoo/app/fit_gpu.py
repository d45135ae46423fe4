"""Does a model fit a GPU, with a BF16, an FP8 and an INT2 cache: how many tokens and requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from oscar_zoo.app.fit_bits import recipe_of_bits
from oscar_zoo.app.fit_report import GIVEN, OF_RECIPE, FitReport, FittingCache
from oscar_zoo.app.fit_subject import Subject, subject_of
from oscar_zoo.app.gpu_share import at_most, gpu_share
from oscar_zoo.app.model_needs import Needs, Weights, fetch_config
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.sglang.capacity import stored_bits
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.engines.sglang.head_split import check_heads, splits
from oscar_zoo.engines.sglang.pool_plan import Planner
from oscar_zoo.errors import UnsupportedModel, UsageError

CONTEXT = 8192
"""Tokens of a request, where nobody says them and the model takes so many."""
MACHINE_GPUS = 8
"""GPUs that most machines have at most; `serve` runs on one machine."""


@dataclass(frozen=True)
class FitRequest:
    """What to fit, and where.

    Attributes:
        model: a name of the zoo, a hub id whose `config.json` is on this machine, a folder that
            holds one, or an artifact: `NAME:TAG` or its folder.
        memory: bytes of one GPU.
        context: tokens of each request; by default `CONTEXT`, or what the model takes at most.
        requests: that run at a time; by default as many as `serve` lets run.
        gpus: of one tensor-parallel group; by default those of the recipe.
        weights: bytes of all weights, instead of what the model says.
        bits: of a stored element of the INT2 cache on average, 2 or 4 for codes of so many bits
            everywhere; by default those of the artifact, else those of the recipe.
        memory_source: what says the memory, in a few words.
    """

    model: str
    memory: int
    context: int | None = None
    requests: int | None = None
    gpus: int | None = None
    weights: int | None = None
    bits: float | Literal["auto"] | None = None
    memory_source: str = GIVEN


def fit_gpu(
    model: str,
    memory: int,
    *,
    context: int | None = None,
    requests: int | None = None,
    gpus: int | None = None,
    weights: int | None = None,
    bits: float | None = None,
) -> FitReport:
    """How many tokens and requests of a model fit GPUs; an estimate, for which no GPU is needed.

    Args:
        model: a name of the zoo, a hub id whose `config.json` is on this machine, a folder that
            holds one, or an artifact: `NAME:TAG` or its folder.
        memory: bytes of one GPU.
        context: tokens of each request; by default 8,192, or what the model takes at most.
        requests: that run at a time; by default as many as `serve` lets run.
        gpus: of one tensor-parallel group; by default those of the recipe.
        weights: bytes of all weights, instead of what the model says.
        bits: of a stored element of the INT2 cache on average, 2 or 4 for codes of so many bits
            everywhere; by default those of the artifact, else those of the recipe.

    Raises:
        UsageError: the shapes or the size of the weights are not known, no such group of GPUs can
            serve the model, or codes of 2 and 4 bits cannot have these bits.
        PathNotFound, ArtifactNotFound: nothing on this machine has this name.
        InvalidModel: a folder has no `config.json`, or a damaged one.
        UnsupportedModel: the INT2 cache does not take this model.
    """
    return fit(FitRequest(model, memory, context, requests, gpus, weights, bits))


def fit(request: FitRequest) -> FitReport:
    """The answer to `request`; raises as `fit_gpu`."""
    subject = subject_of(request.model)
    name, needs = subject.name, subject.needs
    weights = _weights(request, subject)
    gpus = request.gpus or needs.gpus
    check_heads(name, needs.geometry, Layout(tp=gpus), option="--tp {}")
    most = needs.geometry.num_q_heads
    groups = [number for number in range(1, most + 1) if splits(needs.geometry, number)]
    try:
        serving = recipe_of_bits(needs, request.bits)
        bits = stored_bits(needs.geometry, serving)
        shared = {number: _share(request, needs, serving, weights, number) for number in groups}
    except UsageError:
        raise
    except ValueError as error:
        raise UnsupportedModel(
            f"the INT2 cache does not take the heads of {name}: {error}.",
            hint="serve it with SGLang alone",
        ) from None
    context = _context(request, needs)
    holding = {number: shared[number].holds(request.requests, context) for number in groups}
    enough = [number for number in groups if holding[number] is not False]
    if needs.longest is not None and context > needs.longest:
        enough = []  # more memory does not make the model take such requests
    mine = shared[gpus]
    return FitReport(
        model=name,
        memory=request.memory,
        memory_source=request.memory_source,
        gpus=gpus,
        gpus_source=GIVEN if request.gpus else OF_RECIPE if gpus > 1 else "by default",
        weights=weights,
        room=mine.room,
        context=context,
        longest=needs.longest,
        requests=mine.requests,
        usual_requests=mine.usual_requests,
        bits=bits,
        bits_source=_bits_source(request, subject),
        caches=mine.caches,
        unknown=needs.unknown,
        config_of=needs.config_of,
        fits=holding[gpus],
        fitting_gpus=min(enough, default=None),
        not_served=subject.not_served,
    )


@dataclass(frozen=True)
class _Share:
    """What each GPU of a group holds; fields as those of `FitReport`."""

    room: int
    requests: int
    usual_requests: int
    caches: tuple[FittingCache, ...]

    def holds(self, requests: int | None, context: int) -> bool | None:
        """Whether INT2 holds so many requests; `requests=None` means one beside what `serve`
        reserves. The answer is `None` where nobody knows."""
        int2 = next(one for one in self.caches if one.cache.kind == "INT2")
        if requests is not None:
            return _between(int2.requests, int2.most_requests, requests)
        return _between(int2.tokens, int2.most_tokens, context)


def _share(
    request: FitRequest, needs: Needs, serving: ServingRecipe, weights: Weights, gpus: int
) -> _Share:
    """What each of `gpus` GPUs holds."""
    share = gpu_share(replace(needs, serving=serving), request.memory, weights.nbytes, gpus)
    requests = request.requests or share.usual_requests
    context, longest = _context(request, needs), needs.longest
    limit = None if longest is None else max(longest, context)  # a longer one was asked for
    fitting = tuple(
        _fitting(planner, share.room, context, requests, limit) for planner in share.planners
    )
    return _Share(share.room, requests, share.usual_requests, fitting)


def _between(least: int, most: int, wanted: int) -> bool | None:
    """Whether `wanted` is there, of which there are `least` to `most`; `None` where nobody knows"""
    if least >= wanted:
        return True
    return None if most >= wanted else False


def _context(request: FitRequest, needs: Needs) -> int:
    return request.context or min(CONTEXT, needs.longest or CONTEXT)


def _bits_source(request: FitRequest, subject: Subject) -> str:
    if request.bits is not None:
        return GIVEN
    return f"of {subject.artifact}" if subject.artifact else "of its recipe, without an artifact"


def _weights(request: FitRequest, subject: Subject) -> Weights:
    if request.weights is not None:
        return Weights(request.weights, GIVEN)
    if subject.needs.weights is None:
        told = subject.needs.config_of
        raise UsageError(
            f"the size of the weights of {subject.name} is not known here."
            + (f" And {subject.not_served}" if subject.not_served else ""),
            hint="say it, for example --weights 16GB, or "
            + ("give the folder of the model" if told is None else fetch_config(told)),
        )
    return subject.needs.weights


def _fitting(
    planner: Planner, left: int, context: int, requests: int, limit: int | None
) -> FittingCache:
    pools, many = planner.divide(left, requests), planner.requests(left, context)
    most, most_many = pools, many
    if planner.uncertain:
        best = at_most(planner)
        most, most_many = best.divide(left, requests), best.requests(left, context)
    room_for = most.context
    return FittingCache(
        cache=planner.cache,
        pools=pools,
        most_tokens=most.tokens,
        requests=many,
        most_requests=most_many,
        context=room_for if limit is None else min(room_for, limit),
        fits=_between(many, most_many, requests),
    )
