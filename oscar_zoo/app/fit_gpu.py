"""Does a model fit a GPU, with a BF16, an FP8 and an INT2 cache: how many tokens and requests."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.app.model_needs import Needs, Weights, needs_of_choice
from oscar_zoo.app.refused_models import check_used
from oscar_zoo.engines.sglang.capacity import USABLE, Cache, caches, room
from oscar_zoo.engines.sglang.concurrency import Layout, usual_requests
from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.registry.model_names import choose_model

CONTEXT = 8192
"""Tokens of a request, where nobody says them."""


@dataclass(frozen=True)
class FitRequest:
    """What to fit, and where.

    Attributes:
        model: a name of the zoo, a hub id whose `config.json` is on this machine, or a folder that
            holds one.
        memory: bytes of one GPU.
        context: tokens of each request.
        requests: that run at a time; by default as many as `serve` lets run.
        gpus: of one tensor-parallel group; by default those of the recipe.
        weights: bytes of all weights, instead of what the model says.
    """

    model: str
    memory: int
    context: int = CONTEXT
    requests: int | None = None
    gpus: int | None = None
    weights: int | None = None


@dataclass(frozen=True)
class FittingCache:
    """What fits with one kind of cache.

    Attributes:
        cache: its bytes on each GPU.
        tokens: that fit in all, with the requests of the report.
        requests: of the context of the report that fit at a time.
        context: the longest with which the requests of the report fit.
        fits: whether the requests of the report fit with its context.
    """

    cache: Cache
    tokens: int
    requests: int
    context: int
    fits: bool


@dataclass(frozen=True)
class FitReport:
    """The answer.

    Attributes:
        model: its name.
        memory: bytes of one GPU.
        gpus: number of them.
        weights: of the model.
        room: bytes of each GPU that are left for a cache.
        context: tokens of a request.
        requests: that run at a time.
        caches: BF16, FP8 and INT2.
        other_layers: whether what layers without full attention keep is counted.
    """

    model: str
    memory: int
    gpus: int
    weights: Weights
    room: int
    context: int
    requests: int
    caches: tuple[FittingCache, ...]
    other_layers: bool

    @property
    def usable(self) -> float:
        """Share of the memory that weights and cache may take."""
        return USABLE


def fit_gpu(
    model: str,
    memory: int,
    *,
    context: int = CONTEXT,
    requests: int | None = None,
    gpus: int | None = None,
    weights: int | None = None,
) -> FitReport:
    """How many tokens and requests of a model fit GPUs; an estimate, for which no GPU is needed.

    Args:
        model: a name of the zoo, a hub id whose `config.json` is on this machine, or a folder that
            holds one.
        memory: bytes of one GPU.
        context: tokens of each request.
        requests: that run at a time; by default as many as `serve` lets run.
        gpus: of one tensor-parallel group; by default those of the recipe.
        weights: bytes of all weights, instead of what the model says.

    Raises:
        UsageError: the shapes or the size of the weights are not known, or no such group of GPUs
            can serve the model.
        PathNotFound: no model has this name.
        UnsupportedModel: the INT2 cache does not take this model.
    """
    return fit(FitRequest(model, memory, context, requests, gpus, weights))


def fit(request: FitRequest) -> FitReport:
    """The answer to `request`; raises as `fit_gpu`."""
    choice = choose_model(request.model)
    check_used(choice)
    needs = needs_of_choice(choice)
    if needs is None:
        raise UsageError(
            f"the shapes of {choice.name} are not known here.",
            hint="give the folder that holds its config.json",
        )
    weights = _weights(request, needs, choice.name)
    gpus = request.gpus or needs.gpus
    if needs.geometry.num_q_heads % gpus:
        raise UsageError(
            f"{gpus} GPUs cannot share the {needs.geometry.num_q_heads} query heads of"
            f" {choice.name}.",
            hint="choose a divisor, for example --tp 2",
        )
    layout = Layout(tp=gpus)
    try:
        kinds = caches(needs.geometry, needs.serving, layout, needs.other)
    except ValueError as error:
        raise UnsupportedModel(
            f"the INT2 cache does not take the heads of {choice.name}: {error}.",
            hint="serve it with SGLang alone",
        ) from None
    left = room(request.memory, weights.nbytes, layout)
    plain = next(kind for kind in kinds if kind.kind == "BF16")
    requests = request.requests or usual_requests(
        request.memory, plain.token, needs.serving.windows, layout
    )
    return FitReport(
        model=choice.name,
        memory=request.memory,
        gpus=gpus,
        weights=weights,
        room=left,
        context=request.context,
        requests=requests,
        caches=tuple(_fitting(kind, left, request.context, requests) for kind in kinds),
        other_layers=needs.other is not None,
    )


def _weights(request: FitRequest, needs: Needs, name: str) -> Weights:
    found = needs.weights if request.weights is None else Weights(request.weights, "as given")
    if found is None:
        raise UsageError(
            f"the size of the weights of {name} is not known here.",
            hint="say it, for example --weights 16GB, or give the folder of the model",
        )
    return found


def _fitting(cache: Cache, left: int, context: int, requests: int) -> FittingCache:
    many = cache.requests(left, context)
    return FittingCache(
        cache=cache,
        tokens=cache.tokens(left, requests),
        requests=many,
        context=cache.context(left, requests),
        fits=many >= requests,
    )
