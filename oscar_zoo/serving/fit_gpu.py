"""Does a model fit a GPU, with a BF16, an FP8 and an INT2 cache: how many tokens and requests. No
hub is asked over the network, and neither torch nor a GPU is needed."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import Reference, is_path
from oscar_zoo.artifact.outcome import HIDDEN, says
from oscar_zoo.artifact.specs import CodeBits, Geometry, ServingRecipe, SideWidths, Widths
from oscar_zoo.engines.sglang.capacity import (
    RULES,
    Cache,
    Planner,
    Pools,
    reserved,
    stored_bits,
    weights_share,
)
from oscar_zoo.engines.sglang.launch.preflight import host_cache_flag
from oscar_zoo.engines.sglang.sizing import Layout, check_heads, splits
from oscar_zoo.engines.vllm.command import check_built
from oscar_zoo.errors import ArtifactNotFound, UnsupportedModel, UsageError
from oscar_zoo.models.other_layers import OtherLayers
from oscar_zoo.next_step import Pull
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
from oscar_zoo.serving.artifact_model import check_served, check_used
from oscar_zoo.serving.memory import (
    Needs,
    Weights,
    fetch_config,
    gpu_share,
    longest_of_manifest,
    needs_of_choice,
    needs_of_manifest,
    needs_of_recipe,
)
from oscar_zoo.serving.params import Engine, FitGpuParams
from oscar_zoo.serving.sizes import check_bits, given_gpu, parse_memory
from oscar_zoo.verb import python_call

CONVERSATION = 32768  # tokens of one in the host's memory
CONTEXT = 8192
"""Tokens of a request, where nobody says them and the model takes so many."""
MACHINE_GPUS = 8
"""GPUs that most machines have at most; `serve` runs on one machine."""
GIVEN, OF_RECIPE = "as given", "of its recipe"
"""Where a number comes from."""

Count = Annotated[int, Field(ge=0)]


def called(name: str, description: str) -> Any:
    """What the schema says about a field that has another name in the JSON."""
    return says(description, serialization_alias=name)


@dataclass(frozen=True)
class FittingCache:
    """What fits with one kind of cache, and its bytes on each GPU. Where nobody knows what other
    layers keep, tokens and requests lie between two numbers; else the two are the same."""

    cache: Annotated[Cache, *HIDDEN]
    pools: Annotated[Pools, *HIDDEN]
    """What a server has that shall run the requests of the report."""
    kind: Literal["BF16", "FP8", "INT2"]
    token_bytes: Annotated[Count, says("Of a token in the layers with full attention.")]
    window_token_bytes: Annotated[Count, says("Of a token in the layers with a sliding window.")]
    window: Annotated[Count, says("Tokens that these layers keep of a request.")]
    request_bytes: Annotated[Count, says("That a running request takes beside its tokens.")]
    sink_bytes: Annotated[Count, says("Of these, the first tokens in BF16, of two prompts.")]
    ring_bytes: Annotated[Count, says("Of these, the last tokens in BF16.")]
    state_bytes: Annotated[Count, says("Of these, the states of layers without keys and values.")]
    tokens: Annotated[Count, says("That fit.")]
    most_tokens: Annotated[Count, says("That fit at most.")]
    running: Annotated[Count, called("running_requests", "Those that have states; else all.")]
    state_slots: Annotated[Count, says("As the server divides its memory.")]
    sliding_slots: Annotated[Count, says("As the server divides its memory.")]
    requests: Annotated[Count, called("max_requests", "Of that context that fit.")]
    most_requests: Annotated[Count, says("The same at most.")]
    context: Annotated[Count, called("max_context", "Of each of that many requests at most.")]
    fits: Annotated[bool | None, says("Whether the requests fit; null where unknown.")]

    @classmethod
    def of(
        cls, planner: Planner, left: int, context: int, requests: int, limit: int | None
    ) -> FittingCache:
        """What fits into `left` bytes; a model takes requests of `limit` tokens, where known."""
        cache, longer = planner.cache, limit is not None and context > limit
        pools, many = planner.divide(left, requests), planner.requests(left, context)
        most, most_many = pools, many
        if planner.uncertain:
            best = replace(planner, least=False)  # what nobody knows counts as nothing
            most, most_many = best.divide(left, requests), best.requests(left, context)
        many, most_many = (0, 0) if longer else (many, most_many)
        return cls(
            cache,
            pools,
            kind=cache.kind,  # type: ignore[arg-type]
            token_bytes=cache.token,
            window_token_bytes=cache.window_token,
            window=cache.window,
            request_bytes=cache.request,
            sink_bytes=cache.sinks,
            ring_bytes=cache.ring,
            state_bytes=cache.state,
            tokens=pools.tokens,
            most_tokens=most.tokens,
            running=pools.requests,
            state_slots=pools.states,
            sliding_slots=pools.sliding or 0,
            requests=many,
            most_requests=most_many,
            context=most.context if limit is None else min(most.context, limit),
            fits=_between(many, most_many, requests),
        )


@dataclass(frozen=True)
class FitReport:
    """What oscar-zoo fit-gpu prints: an estimate of what GPUs hold. A source says in a few words
    where a number comes from."""

    model: str
    memory: Annotated[Count, says("Of one GPU.", serialization_alias="memory_bytes")]
    memory_source: str
    gpus: Annotated[int, says("That share the model.", ge=1)]
    gpus_source: str
    weights: Annotated[Weights, *HIDDEN]
    room: Annotated[Count, called("cache_bytes", "Of each GPU, left for a cache.")]
    context: Annotated[Count, says("Tokens of a request that was asked for, or the usual number.")]
    longest: Annotated[int | None, called("model_context", "Of a request at most, where known.")]
    requests: Annotated[Count, says("That run at the same time.")]
    usual_requests: Annotated[int, says("That serve lets run where its flags do not say it.")]
    bits: Annotated[float, called("bits_per_element", "Of INT2, with scales and rotary keys.")]
    bits_source: str
    latents: Annotated[bool, *HIDDEN]
    caches: tuple[FittingCache, ...]
    unknown: Annotated[str | None, called("other_layers_unknown", "Null where all is known.")]
    config_of: Annotated[str | None, *HIDDEN]
    """Id of the model on Hugging Face whose `config.json` says it; `None` where none is known."""
    fits: Annotated[bool | None, says("The same of INT2; without --requests, of one request.")]
    fitting_gpus: Annotated[int | None, says("The smallest number that is enough, if any.")]
    not_served: Annotated[str | None, says("Why serve refuses the model, where known.")]
    usable: Annotated[float, called("usable_share", "Of it, for weights and cache.")]
    engine: Engine
    host_tokens: Annotated[Count, says("Of INT2, that fit the --host-cache; 0 without it.")] = 0
    host_requests: Annotated[Count, says("Of these, with 32,768 tokens each.")] = 0
    disk_request_bytes: Annotated[Count, says("Of one of them in a --disk-cache.")] = 0
    estimate: Literal[True] = True
    schema: Literal["oscar-zoo.fit-gpu/1"] = "oscar-zoo.fit-gpu/1"

    @property
    def too_long(self) -> bool:
        return self.longest is not None and self.context > self.longest

    def of_kind(self, kind: str) -> FittingCache:
        return next(one for one in self.caches if one.kind == kind)

    @computed_field(  # type: ignore[prop-decorator]
        alias="other_layers_counted",
        description="Whether what layers without full attention keep is counted.",
    )
    @property
    def other_layers(self) -> bool:
        return self.unknown is None

    @computed_field(  # type: ignore[prop-decorator]
        alias="reserved_bytes", description="Of each GPU, neither for weights nor for a cache."
    )
    @property
    def reserved(self) -> int:
        return reserved(self.memory, self.usable)

    @computed_field(  # type: ignore[prop-decorator]
        alias="gpu_weights_bytes", description="Of each GPU, for weights."
    )
    @property
    def gpu_weights(self) -> int:
        return weights_share(self.weights.nbytes, Layout(tp=self.gpus))

    @computed_field(description="Of all weights.")
    def weights_bytes(self) -> int:
        return self.weights.nbytes

    @computed_field(description="Where that size comes from, in a few words.")
    def weights_source(self) -> str:
        return self.weights.source


def run(params: FitGpuParams) -> FitReport:
    """How many tokens and requests of a model fit GPUs; an estimate, for which no GPU is needed."""
    memory, memory_source, count = given_gpu(params.memory, params.gpu, params.gpus)
    name, needs, artifact, not_served = subject_of(params.model)
    weights = _weights(params, name, needs, not_served)
    rules = RULES[params.engine]
    gpus = count or needs.gpus
    if params.engine == "vllm":
        check_built(name, needs.geometry)
        others, why = needs.other != OtherLayers(), "their share of vLLM's pages is not counted"
        check_built(name, needs.geometry, others=others, why=why)
    check_heads(name, needs.geometry, Layout(tp=gpus), option="--tp {}")
    context = params.context or min(CONTEXT, needs.longest or CONTEXT)
    try:
        needs = replace(needs, serving=recipe_of_bits(needs, params.bits))
        if needs.geometry.rotary_key and (widths := needs.serving.widths) and 4 in widths.k.bits:
            not_served = not_served or "`serve` takes latents (MLA) with codes of 2 bits alone"
        shared = {}
        for number in range(1, needs.geometry.num_q_heads + 1):
            if splits(needs.geometry, number):
                room, usual, kinds = gpu_share(needs, memory, weights.nbytes, number, rules.usable)
                given = room, context, params.requests or usual, needs.longest
                shared[number] = room, usual, tuple(FittingCache.of(one, *given) for one in kinds)
    except UsageError:
        raise
    except ValueError as error:
        raise UnsupportedModel(
            f"the INT2 cache does not take the heads of {name}: {error}.",
            hint="serve it with SGLang alone",
        ) from None
    holding = {n: _holds(found[-1], params.requests, context) for n, (*_, found) in shared.items()}
    enough = [number for number in shared if holding[number] is not False]
    room, usual, caches = shared[gpus]
    host = _host_tokens(params, name, needs, caches[-1].token_bytes, gpus)
    conversation = gpus * (CONVERSATION * caches[-1].token_bytes + caches[-1].sink_bytes // 2)
    usual_bits = f"of {artifact}" if artifact else "of its recipe, without an artifact"
    return FitReport(
        model=name,
        memory=memory,
        memory_source=memory_source,
        gpus=gpus,
        gpus_source=GIVEN if count else OF_RECIPE if gpus > 1 else "by default",
        weights=weights,
        room=room,
        context=context,
        longest=needs.longest,
        requests=params.requests or usual,
        usual_requests=usual,
        bits=stored_bits(needs.geometry, needs.serving),
        bits_source=usual_bits if params.bits is None else GIVEN,
        latents=bool(needs.geometry.rotary_key),
        caches=caches,
        unknown=needs.unknown,
        config_of=needs.config_of,
        fits=holding[gpus],
        fitting_gpus=min(enough, default=None),
        not_served=not_served,
        usable=rules.usable,
        engine=params.engine,
        host_tokens=host,
        host_requests=host // CONVERSATION,
        disk_request_bytes=conversation if host else 0,
    )


def _host_tokens(params: FitGpuParams, name: str, needs: Needs, token: int, gpus: int) -> int:
    """Tokens that the host's memory holds as `serve` shares it, 0 where nobody asks."""
    if params.host_cache is None:
        return 0
    if params.engine == "vllm" or needs.other != OtherLayers():
        where = "vLLM" if params.engine == "vllm" else f"the other layers of {name}"
        raise UsageError(f"--host-cache does not work with {where}.", hint="leave it out")
    flag = host_cache_flag(parse_memory(params.host_cache, "--host-cache"), Layout(tp=gpus), None)
    return int(flag.partition("=")[2]) * 10**9 // token


fit_gpu = python_call(FitGpuParams, run)


def subject_of(text: str) -> tuple[str, Needs, str | None, str | None]:
    """What `text` means, a model's name or folder, `NAME:TAG`, or an artifact's folder: the name of
    the model, what it takes on GPUs, `<Model>:<tag>` of the artifact, and why `serve` refuses the
    model, if that is known.

    Without a tag the artifact is the one that `serve` would take for this model, as far as this
    machine knows; where several have its name and none is the default, it is none.
    """
    target = parse(text) if is_path(text) or set(":@") & set(text) else None
    if isinstance(target, NameTarget) or (
        isinstance(target, PathTarget) and (target.path / FILE_NAME).is_file()
    ):
        return _of_artifact(target)
    choice = choose_model(text)
    needs = _needs(choice)
    if needs is None and not is_path(text) and Path(text).exists():
        error = ArtifactNotFound.for_name(text)
        suggest_path(Path(text), error)
        raise error
    if needs is None:
        raise UsageError(
            f"the shapes of {choice.name} are not known here.",
            hint=f"{fetch_config(choice.source)}, or give the folder that holds it",
        )
    entry = served_entry(Reference(choice.name))
    manifest = entry.manifest if entry is not None else None
    if manifest is None or manifest.model.geometry != needs.geometry:
        return choice.name, needs, None, _not_served(choice)
    artifact = manifest.artifact_id.reference
    return choice.name, _served(needs, manifest), artifact, _not_served(choice)


def _of_artifact(target: PathTarget | NameTarget) -> tuple[str, Needs, str, str | None]:
    try:
        (entry,), _ = known_entries([target], Sources(offline=True))
    except ArtifactNotFound as error:
        raise ArtifactNotFound(
            f"{target} is not on this machine, and fit-gpu asks no hub.",
            hint=error.advice,
            suggestions=error.suggestions,
            next_step=None if error.advice else Pull(str(target)),  # of the known, one is meant
        ) from None
    name, manifest = entry.id.reference, entry.manifest
    if manifest is None:
        if entry.recipe is None:
            raise UsageError(
                f"{name} has no oscar.json, and the zoo does not know the shapes of its model.",
                hint="give the folder of the model",
            )
        return entry.recipe.name, needs_of_recipe(entry.recipe), name, None
    choice = recorded_model(manifest.model.id)
    needs = _needs(choice)
    if needs is None or needs.geometry != manifest.model.geometry:
        needs = needs_of_manifest(manifest)
    return choice.name, _served(needs, manifest), name, _not_served(choice)


def _served(needs: Needs, manifest: Manifest) -> Needs:
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
        raise UsageError("--bits auto is what compute measures.", hint="give a number of bits")
    sides = 2 * len(geometry.attention_layers)

    def raised(number: int) -> ServingRecipe:
        return recipe.with_widths(_widths(geometry, number))

    def cost(number: int) -> float:
        return stored_bits(geometry, raised(number))

    if bits in (2, 4):
        return raised(0 if bits == 2 else sides)
    check_bits(bits, cost(0), cost(sides), recipe.group_size, latents=bool(geometry.rotary_key))
    return raised(bisect_right(range(sides + 1), bits, key=cost) - 1)


def _widths(geometry: Geometry, number: int) -> Widths:
    layers = len(geometry.attention_layers)

    def side(first: int) -> SideWidths:
        wide = number - first
        bits: tuple[CodeBits, ...] = tuple(4 if layer < wide else 2 for layer in range(layers))
        return SideWidths(bits=bits, clip=(0.0,) * layers)

    return Widths(k=side(0), v=side(layers))


def _holds(int2: FittingCache, requests: int | None, context: int) -> bool | None:
    """Whether INT2 holds so many requests; `requests=None` means one beside what `serve` reserves.
    The answer is `None` where nobody knows."""
    if requests is not None or int2.most_requests == 0:
        return _between(int2.requests, int2.most_requests, requests or 1)
    return _between(int2.tokens, int2.most_tokens, context)


def _between(least: int, most: int, wanted: int) -> bool | None:
    """Whether `wanted` is there, of which there are `least` to `most`; `None` where nobody knows"""
    if least >= wanted:
        return True
    return None if most >= wanted else False


def _weights(params: FitGpuParams, name: str, needs: Needs, not_served: str | None) -> Weights:
    if params.weights is not None:
        return Weights(params.weights, GIVEN)
    if needs.weights is None:
        told = needs.config_of
        raise UsageError(
            f"the size of the weights of {name} is not known here."
            + (f" And {not_served}" if not_served else ""),
            hint="say it, for example --weights 16GB, or "
            + ("give the folder of the model" if told is None else fetch_config(told)),
        )
    return needs.weights
