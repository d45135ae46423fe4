"""Does a model fit a GPU, with a BF16, an FP8 and an INT2 cache: how many tokens and requests. No
hub is asked over the network, and neither torch nor a GPU is needed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import Reference, is_path
from oscar_zoo.artifact.specs import CodeBits, Geometry, ServingRecipe, SideWidths, Widths
from oscar_zoo.engines.sglang.capacity import (
    USABLE,
    Cache,
    Planner,
    Pools,
    reserved,
    stored_bits,
    weights_share,
)
from oscar_zoo.engines.sglang.sizing import Layout, check_heads, splits
from oscar_zoo.errors import ArtifactNotFound, UnsupportedModel, UsageError
from oscar_zoo.next_step import Pull
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import known_entries, served_entry
from oscar_zoo.registry.targets import (
    ModelChoice,
    NameTarget,
    PathTarget,
    choose_model,
    parse,
    recorded_model,
    suggest_path,
)
from oscar_zoo.serving.memory import (
    GpuShare,
    Needs,
    Weights,
    at_most,
    fetch_config,
    gpu_share,
    longest_of_manifest,
    needs_of_choice,
    needs_of_manifest,
    needs_of_recipe,
)
from oscar_zoo.serving.params import FitGpuParams
from oscar_zoo.serving.prepared import check_served, check_used
from oscar_zoo.serving.sizes import given_gpu
from oscar_zoo.verb import python_call

CONTEXT = 8192
"""Tokens of a request, where nobody says them and the model takes so many."""
MACHINE_GPUS = 8
"""GPUs that most machines have at most; `serve` runs on one machine."""
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
    """The answer; a source says in a few words where a number comes from.

    Attributes:
        memory: bytes of one GPU.
        room: bytes of each GPU that are left for a cache.
        context: tokens of a request.
        longest: tokens of a request that the model takes at most; `None` where nobody knows.
        requests: that run at a time.
        usual_requests: as many as `serve` lets run at a time when its flags do not say a number.
        bits: of a stored element of the INT2 cache, scales and offsets included, on average.
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


def run(params: FitGpuParams) -> FitReport:
    """How many tokens and requests of a model fit GPUs; an estimate, for which no GPU is needed."""
    given = given_gpu(params.memory, params.gpu, params.gpus)
    memory = given.memory
    subject = subject_of(params.model)
    name, needs = subject.name, subject.needs
    weights = _weights(params, subject)
    gpus = given.gpus or needs.gpus
    check_heads(name, needs.geometry, Layout(tp=gpus), option="--tp {}")
    most = needs.geometry.num_q_heads
    groups = [number for number in range(1, most + 1) if splits(needs.geometry, number)]
    try:
        serving = recipe_of_bits(needs, params.bits)
        bits = stored_bits(needs.geometry, serving)
        needs = replace(needs, serving=serving)
        shared = {number: _share(params, memory, needs, weights, number) for number in groups}
    except UsageError:
        raise
    except ValueError as error:
        raise UnsupportedModel(
            f"the INT2 cache does not take the heads of {name}: {error}.",
            hint="serve it with SGLang alone",
        ) from None
    context = _context(params, needs)
    holding = {n: _holds(caches, params.requests, context) for n, (_, caches) in shared.items()}
    enough = [number for number in groups if holding[number] is not False]
    if needs.longest is not None and context > needs.longest:
        enough = []  # more memory does not make the model take such requests
    mine, caches = shared[gpus]
    of_artifact = f"of {subject.artifact}" if subject.artifact else None
    usual_bits = of_artifact or "of its recipe, without an artifact"
    return FitReport(
        model=name,
        memory=memory,
        memory_source=given.source,
        gpus=gpus,
        gpus_source=GIVEN if given.gpus else OF_RECIPE if gpus > 1 else "by default",
        weights=weights,
        room=mine.room,
        context=context,
        longest=needs.longest,
        requests=params.requests or mine.usual_requests,
        usual_requests=mine.usual_requests,
        bits=bits,
        bits_source=usual_bits if params.bits is None else GIVEN,
        caches=caches,
        unknown=needs.unknown,
        config_of=needs.config_of,
        fits=holding[gpus],
        fitting_gpus=min(enough, default=None),
        not_served=subject.not_served,
    )


fit_gpu = python_call(FitGpuParams, run)


@dataclass(frozen=True)
class Subject:
    """A model with what it takes on GPUs, where `serving` is the recipe of the artifact if there is
    one; `<Model>:<tag>` of that artifact; and why `serve` refuses the model, if that is known."""

    name: str
    needs: Needs
    artifact: str | None
    not_served: str | None = None


def subject_of(text: str) -> Subject:
    """The model and the artifact that `text` means: a model's name or folder, `NAME:TAG`, or an
    artifact's folder.

    Without a tag it is the artifact that `serve` would take for this model, as far as this machine
    knows; where several have its name and none is the default, it is none.
    """
    target = _artifact_target(text)
    if target is not None:
        return _of_artifact(_entry(target))
    choice = choose_model(text)
    needs = _needs(choice)
    if needs is None and not is_path(text) and Path(text).exists():
        error = ArtifactNotFound.for_name(text)
        suggest_path(Path(text), error)
        raise error
    if needs is None:
        raise UsageError(
            f"the shapes of {choice.name} are not known here.",
            hint="give the folder that holds its config.json",
        )
    entry = served_entry(Reference(choice.name))
    manifest = entry.manifest if entry is not None else None
    if manifest is None or manifest.model.geometry != needs.geometry:
        return Subject(choice.name, needs, None, _not_served(choice))
    artifact = manifest.artifact_id.reference
    return Subject(choice.name, _served(needs, manifest), artifact, _not_served(choice))


def _artifact_target(text: str) -> PathTarget | NameTarget | None:
    """The artifact that `text` is written as; `None` for what names a model."""
    if not is_path(text) and not set(":@") & set(text):
        return None
    target = parse(text)
    if isinstance(target, PathTarget):
        return target if (target.path / FILE_NAME).is_file() else None
    return target if isinstance(target, NameTarget) else None


def _entry(target: PathTarget | NameTarget) -> Entry:
    try:
        (entry,), _ = known_entries([target], Sources(offline=True))
    except ArtifactNotFound as error:
        raise ArtifactNotFound(
            f"{target} is not on this machine, and fit-gpu asks no hub.",
            hint=error.advice,
            suggestions=error.suggestions,
            next_step=Pull(str(target)),
        ) from None
    return entry


def _of_artifact(entry: Entry) -> Subject:
    name, manifest = entry.id.reference, entry.manifest
    if manifest is None:
        if entry.recipe is None:
            raise UsageError(
                f"{name} has no oscar.json, and the zoo does not know the shapes of its model.",
                hint="give the folder of the model",
            )
        return Subject(entry.recipe.name, needs_of_recipe(entry.recipe), name)
    choice = recorded_model(manifest.model.id)
    needs = _needs(choice)
    if needs is None or needs.geometry != manifest.model.geometry:
        needs = needs_of_manifest(manifest)
    return Subject(choice.name, _served(needs, manifest), name, _not_served(choice))


def _served(needs: Needs, manifest: Manifest) -> Needs:
    """The needs of a model with the artifact of `manifest`."""
    longest = needs.longest or longest_of_manifest(manifest)
    return replace(needs, serving=manifest.recipe, longest=longest)


def _not_served(choice: ModelChoice) -> str | None:
    """Why `serve` refuses a model, as a sentence; `None` when it does not."""
    try:
        check_served(choice)
    except UnsupportedModel as error:
        return error.message
    return None


def _needs(choice: ModelChoice) -> Needs | None:
    check_used(choice)
    return needs_of_choice(choice)


def recipe_of_bits(needs: Needs, bits: float | Literal["auto"] | None) -> ServingRecipe:
    """The recipe of `needs` with codes that take `bits` per element; 2 and 4 are codes of so many
    bits everywhere, whatever their scales add.

    Which layers get codes of 4 bits does not matter for an estimate: keys come first, then values.
    """
    recipe, geometry = needs.serving, needs.geometry
    if bits is None:
        return recipe
    if bits == "auto":
        raise UsageError(
            "--bits auto is what compute measures, so fit-gpu does not know it.",
            hint="give a number of bits",
        )
    if bits == 2:
        return recipe.with_widths(None)
    sides = 2 * len(geometry.attention_layers)

    def raised(number: int) -> ServingRecipe:
        return recipe.with_widths(_widths(geometry, number))

    def cost(number: int) -> float:
        return stored_bits(geometry, raised(number))

    if bits == 4:
        return raised(sides)
    low, high = cost(0), cost(sides)
    if not low <= bits <= high:
        raise UsageError(
            f"--bits {bits:g} is not possible with groups of {recipe.group_size}: codes of 2 bits"
            f" cost {low:g} with their scales, codes of 4 bits {high:g}.",
            hint=f"use 2 or 4 for all codes, or a budget from {low:g} to {high:g}",
        )
    return raised(bisect_right(range(sides + 1), bits, key=cost) - 1)


def _widths(geometry: Geometry, number: int) -> Widths:
    """Codes of 4 bits for the first `number` sides, and of 2 bits for the others."""
    layers = len(geometry.attention_layers)

    def side(first: int) -> SideWidths:
        bits: tuple[CodeBits, ...] = tuple(
            4 if first + layer < number else 2 for layer in range(layers)
        )
        return SideWidths(bits=bits, clip=(0.0,) * layers)

    return Widths(k=side(0), v=side(layers))


def _share(
    params: FitGpuParams, memory: int, needs: Needs, weights: Weights, gpus: int
) -> tuple[GpuShare, tuple[FittingCache, ...]]:
    """What each of `gpus` GPUs holds."""
    share = gpu_share(needs, memory, weights.nbytes, gpus)
    requests = params.requests or share.usual_requests
    context, longest = _context(params, needs), needs.longest
    limit = None if longest is None else max(longest, context)  # a longer one was asked for
    return share, tuple(
        _fitting(planner, share.room, context, requests, limit) for planner in share.planners
    )


def _holds(caches: Sequence[FittingCache], requests: int | None, context: int) -> bool | None:
    """Whether INT2 holds so many requests; `requests=None` means one beside what `serve` reserves.
    The answer is `None` where nobody knows."""
    int2 = next(one for one in caches if one.cache.kind == "INT2")
    if requests is not None:
        return _between(int2.requests, int2.most_requests, requests)
    return _between(int2.tokens, int2.most_tokens, context)


def _between(least: int, most: int, wanted: int) -> bool | None:
    """Whether `wanted` is there, of which there are `least` to `most`; `None` where nobody knows"""
    if least >= wanted:
        return True
    return None if most >= wanted else False


def _context(params: FitGpuParams, needs: Needs) -> int:
    return params.context or min(CONTEXT, needs.longest or CONTEXT)


def _weights(params: FitGpuParams, subject: Subject) -> Weights:
    if params.weights is not None:
        return Weights(params.weights, GIVEN)
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
