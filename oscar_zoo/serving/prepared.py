"""The devices, memory and drafts of a server for an artifact and its model, which are known to fit
before anything starts. No hub is asked, and neither weights nor sglang are loaded.

With `--drafts` SGLang's flags for speculative decoding are chosen for a user who names none. Drafts
come from a layer of the model where it has one, else from text that repeats itself. Flags that the
user gives win, so only those that are missing are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from oscar_zoo.artifact import specs
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.engines.setting_flags import OPTIONS
from oscar_zoo.engines.sglang import refusals, sizing
from oscar_zoo.engines.sglang.launch import preflight
from oscar_zoo.engines.sglang.launch.user_flags import (
    ALGORITHM,
    DRAFT_MODEL,
    Flag,
    UserFlags,
    check_flags,
    check_latents,
    needs_gpu,
)
from oscar_zoo.engines.sglang.refusals import BRANCHES, BREADTH
from oscar_zoo.engines.sglang.sizing import SizeFlags, check_heads
from oscar_zoo.engines.vllm.command import NGRAMS
from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.models import hardware
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.model_hub import kept_config
from oscar_zoo.models.other_layers import UNTRIED, MtpLayers, kept_by_others, mtp_layers
from oscar_zoo.models.weight_files import stored_names
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry.artifacts import Artifact
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.artifact_model import ArtifactModel, check_served, model_for
from oscar_zoo.serving.params import ServeParams
from oscar_zoo.serving.sizes import parse_memory


@dataclass(kw_only=True)
class Prepared(ArtifactModel):
    """What is to be served, on `device`, `cpu` or `cuda`, from its GPU number `gpu` on;
    `tensor_parallel` ranks share the model, each on a GPU or a part of the CPU. The flags are those
    of the user behind those for drafts, and `drafts` says what was chosen and why."""

    artifact: Artifact
    device: str
    gpu: int
    tensor_parallel: int
    flags: UserFlags
    drafts: str | None = None

    @property
    def model(self) -> str:
        """The model as a server started anywhere finds it: an absolute path, or its hub id."""
        folder = Path(self.choice.source)
        return str(folder.absolute()) if folder.is_dir() else self.choice.source

    @property
    def in_half(self) -> bool:
        """Whether the model runs in float16 where nobody says otherwise."""
        parts = [] if self.config is None else [self.config, self.config.get_text_config()]
        names = ("dtype", "torch_dtype")
        return "float16" in [getattr(part, name, None) for part in parts for name in names]

    def options(self, params: ServeParams) -> dict[str, Any]:
        """The fields of `ServeOptions`; names have no character that could break a line of a log or
        of an answer."""
        label = f"{self.artifact.label}@{self.artifact.verified.digest}"
        return {
            "model": self.model,
            "revision": params.revision,
            "recipe": self.recipe,
            "device": self.device,
            "gpu": self.gpu,
            "tensor_parallel": self.tensor_parallel,
            "port": params.port,
            "name": "".join(filter(str.isprintable, label)),
            "served_name": "".join(filter(str.isprintable, self.choice.model_id)),
            "flags": self.flags,
        }


def prepare(
    params: ServeParams,
    model: ModelChoice | None,
    artifact: Artifact,
    device: str,
    gpu: int,
    observer: Observer,
) -> Prepared:
    """Choose model (`None` is the artifact's base model), recipe, number of GPUs and drafts, and
    refuse what does not go together or does not fit. A command that is only printed may run on
    another machine."""
    flags = UserFlags(params.of_sglang)
    size = flags.sizes()
    with hardware.one_look():
        choice = model_for(artifact, model, observer, again=params.command_line(model="FOLDER"))
        check_served(choice, None, device, printed=params.print_only and not params.device)
        fitting = ArtifactModel.of(artifact, choice)
        parallel = size.tensor_parallel
        if parallel is None:
            elsewhere = params.print_only and params.device is not None
            parallel = _usual_gpus(choice, gpu, all_here=elsewhere) if device == "cuda" else 1
        free = None if params.print_only else hardware.available_ram()
        layout = sizing.Layout.of_flags(size, tp=parallel)
        asked = flags.last(preflight.SIZE_ON_HOST)
        if params.host_cache is not None:
            host = parse_memory(params.host_cache, "--host-cache")
            flags = flags.after(preflight.host_cache_flag(host, layout, free))
            if params.disk_cache is not None:
                preflight.check_disk_cache(params.disk_cache, layout, make=not params.print_only)
        elif asked and str(asked.text).isdecimal() and flags.last(*ON_HOST):
            preflight.check_host_size(int(str(asked.text)), layout, free)
        prepared = Prepared(
            **vars(fitting) | {"recipe": fitting.recipe.override(clip=params.clip)},
            artifact=artifact,
            device=device,
            gpu=gpu,
            tensor_parallel=parallel,
            flags=flags,
        )
        geometry = fitting.geometry
        if geometry is not None:
            _check_heads(choice.name, geometry, device, layout)
            _check_groups(prepared, geometry)
            if geometry.rotary_key:
                layers = range(len(geometry.attention_layers))
                bits = {prepared.recipe.code_bits("k", layer) for layer in layers}
                check_latents(flags.after(*[f"{ALGORITHM}=?"] * bool(params.drafts)), device, bits)
            if not params.print_only:  # on this machine
                free = preflight.free_memory(device, gpu, parallel)
                preflight.check_memory(prepared.demand(device, gpu, parallel, size), free)
    _choose_drafts(params, prepared, observer)
    if device == "cuda" and prepared.in_half and size.dtype in (None, "auto", "half", "float16"):
        said = f"{choice.name} runs in float16; the kernels for it are slower, and vLLM has none."
        observer.note(Note("serve.dtype", f"{said} Add: -- --dtype=bfloat16", kind="warning"))
    return prepared


def check_asked_gpus(choice: ModelChoice | None, device: str, flags: SizeFlags) -> None:
    """Refuse a number of GPUs that cannot share the heads of a model whose shape the zoo knows,
    before an artifact is fetched or computed. `prepare` does it for every model."""
    known = None if choice is None or Path(choice.source).is_dir() else choice.recipe
    if choice is not None and known is not None and flags.tensor_parallel is not None:
        layout = sizing.Layout.of_flags(flags, tp=flags.tensor_parallel)
        _check_heads(choice.name, known.geometry, device, layout)


def _check_heads(name: str, geometry: Geometry, device: str, layout: sizing.Layout) -> None:
    if device == "cuda":
        check_heads(name, geometry, layout, option="-- --tp={}")


def _check_groups(prepared: Prepared, geometry: Geometry) -> None:
    """Refuse groups that rows of the cache cannot be cut into, of the recipe or of the user's
    flags, before a server finds out."""
    option, name = OPTIONS["group_size"], prepared.choice.name
    given = prepared.flags.text(*option.names)
    size = prepared.recipe.group_size if given is None else option.parse(given, option.flag)
    specs.check_groups(geometry.head_dims, size, name, option=f"-- {option.flag}={{}}")


def _usual_gpus(choice: ModelChoice, gpu: int, *, all_here: bool) -> int:
    """The number of GPUs that the zoo starts this model on; unless `all_here`, halved until this
    machine has as many."""
    usual = choice.recipe.tensor_parallel if choice.recipe else 1
    seen = usual if all_here else len(hardware.visible(hardware.gpus())) - gpu
    while usual > max(1, seen):
        usual //= 2
    return usual


Kind = Literal["mtp", "ngram"]
Wish = Literal["auto", "mtp", "ngram"]
ON_HOST = ("--enable-hierarchical-cache", "--enable-hicache")
OPTION = "--drafts"
STEPS, TOKENS = "--speculative-num-steps", "--speculative-num-draft-tokens"
ALGORITHMS: dict[Kind, str] = {"mtp": "NEXTN", "ngram": "NGRAM"}
"""SGLang's names."""
MTP_STEPS = 3
"""Tokens that a layer of the model guesses in front of a step, where the zoo does not say it.
SGLang chooses as many."""
NGRAM_TOKENS = 8
"""Tokens that a step verifies with a table of n-grams: one that is known, and seven guesses."""
ATTENTION = "--speculative-draft-attention-backend"
MTP_ATTENTION = "triton"
"""SGLang's attention for the layer that drafts. FlashInfer, which drafts of a model have where no
flag says otherwise, is compiled for each shape at the first start, which takes minutes."""
SOURCES: dict[Kind, str] = {
    "mtp": "the model's own layer (MTP)",
    "ngram": "text that repeats itself (n-grams)",
}


def check_wish(wish: Wish | None, flags: UserFlags, device: str) -> None:
    """Refuse what can be refused before the model is known: flags alone, and `--drafts` beside
    flags that contradict it; `wish` is its value, or `None` without it."""
    check_flags(flags, device)
    if wish is None:
        return
    if device == "cpu":
        raise needs_gpu(OPTION)
    algorithm, model = flags.last(ALGORITHM), flags.text(*DRAFT_MODEL)
    if algorithm is None:
        if model is not None:
            raise UsageError(
                f"{OPTION} chooses drafts without a draft model, and {DRAFT_MODEL[0]} names one.",
                hint=f"leave out one of the two; with a draft model, name its {ALGORITHM}",
            )
        check_flags(flags.after(f"{ALGORITHM}=NGRAM"), device)
        return
    named = (algorithm.value or "").upper()
    if wish != "auto" and (named != ALGORITHMS[wish] or model is not None):
        raise UsageError(
            f"{OPTION}={wish} and {ALGORITHM}={named} contradict each other.",
            hint="leave out one of the two",
        )


def _choose_drafts(params: ServeParams, prepared: Prepared, observer: Observer) -> None:
    """Put the flags for what `--drafts` asks for into `prepared`; one note says what was chosen and
    why. Drafts that the flags of the user name, which win, are checked with and without
    `--drafts`."""
    wish, revision = params.drafts, params.revision
    asked = prepared.flags.last(ALGORITHM)
    if asked is None and wish is None:
        return
    config = prepared.config or ConfigFile.kept(prepared.choice.source, revision)
    if params.engine == "vllm":  # whose command has flags of its own
        guesses = NGRAMS["num_speculative_tokens"]
        prepared.drafts = f"{SOURCES['ngram']}, {guesses} tokens a step where no flag says it"
    elif asked is not None:
        _check_named(prepared, config, revision)
        if wish is None:
            return
        prepared.drafts = f"as {ALGORITHM}={asked.value} says; {OPTION} adds no flags"
    elif wish is not None:
        _choose(wish, prepared, config, revision)
    observer.note(Note("serve.drafts", f"Drafts: {prepared.drafts}", kind="step"))


def _choose(
    wish: Wish, prepared: Prepared, config: ConfigFile | None, revision: str | None
) -> None:
    others = _others(prepared, config)
    found = _own_layers(prepared, config, revision)
    if wish == "mtp" and found.state in ("missing", "unknown"):
        raise UnsupportedModel(
            f"{OPTION}=mtp does not work with {prepared.choice.name}: {found.why}.",
            hint=f"drafts without such a layer: {OPTION}=ngram",
        )
    kind: Kind = "mtp" if wish == "mtp" or (wish, found.state) == ("auto", "known") else "ngram"
    if kind == "mtp":
        known = prepared.choice.recipe.drafts if prepared.choice.recipe else None
        words, guesses = mtp_words(prepared.flags, known.steps if known else MTP_STEPS)
    else:
        words, guesses = ngram_words(prepared.flags, chain=others is not None)
    prepared.flags = prepared.flags.after(*words)
    check_flags(prepared.flags, prepared.device)
    _check_layers(prepared.flags, others)
    why = f"{OPTION}={wish}" if wish == kind else f"because {found.why}"
    prepared.drafts = f"up to {guesses} tokens a step from {SOURCES[kind]}, {why}"


def mtp_words(flags: UserFlags, steps: int) -> tuple[tuple[str, ...], int]:
    """The missing flags for a chain of drafts from layers of the model itself, and how many tokens
    are guessed in front of a step: `steps`, unless `flags` say it."""
    told = {name: flags.last(name) for name in (STEPS, BRANCHES, TOKENS)}
    if _number(told[BRANCHES], 1) > 1 and None in (told[STEPS], told[TOKENS]):
        raise UsageError(
            f"{BRANCHES} makes a tree of drafts, whose size {OPTION} does not choose.",
            hint=f"add {STEPS} and {TOKENS}, or leave {BRANCHES} out",
        )
    tokens = _number(told[TOKENS], steps + 1, least=2)
    steps = _number(told[STEPS], tokens - 1)
    wanted = {STEPS: str(steps), BRANCHES: "1", TOKENS: str(steps + 1), ATTENTION: MTP_ATTENTION}
    return _missing("mtp", wanted, flags), steps


def ngram_words(flags: UserFlags, *, chain: bool) -> tuple[tuple[str, ...], int]:
    """The missing flags for drafts from text that repeats itself, and how many tokens are guessed
    in front of a step; with `chain` they must be no tree."""
    tokens = _number(flags.last(TOKENS), NGRAM_TOKENS, least=2)
    wanted = {TOKENS: str(tokens)} | ({BREADTH: "1"} if chain else {})
    return _missing("ngram", wanted, flags), tokens - 1


def _missing(kind: Kind, wanted: dict[str, str], flags: UserFlags) -> tuple[str, ...]:
    wanted = {ALGORITHM: ALGORITHMS[kind]} | wanted
    return tuple(f"{name}={value}" for name, value in wanted.items() if flags.last(name) is None)


def _number(flag: Flag | None, usual: int, *, least: int = 1) -> int:
    if flag is None:
        return usual
    text = flag.value or ""
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise UsageError(f"{flag.name} {text!r} is no whole number from {least} on.")
    return int(text)


def _own_layers(prepared: Prepared, config: ConfigFile | None, revision: str | None) -> MtpLayers:
    """What is known of the layers of the model that guess later tokens. Weights on this machine
    decide, then the zoo, then `config.json`."""
    source, recipe = prepared.choice.source, prepared.choice.recipe
    folder = Path(source) if Path(source).is_dir() else kept_config(source, revision)
    names = None if folder is None else stored_names(folder)
    if names is None and recipe is not None and recipe.drafts is not None:
        return MtpLayers("known", "the zoo knows of one")
    if config is None:
        if recipe is not None and recipe.model_type not in UNTRIED:
            return MtpLayers("missing", "the zoo knows of no MTP layer")
        return MtpLayers("unknown", "nothing is known of such a layer")
    return mtp_layers(config, names)


def _others(prepared: Prepared, config: ConfigFile | None) -> str | None:
    """What layers without full attention keep; where unknown, as models that verify chains."""
    text = config.get_text_config() if config else prepared.choice.recipe
    if text is None or prepared.geometry is None:
        return "states"
    return kept_by_others(text, prepared.geometry)


def _check_named(prepared: Prepared, config: ConfigFile | None, revision: str | None) -> None:
    """Refuse a layer that the model is known not to have, and trees that the flags of the user ask
    for, where it is known that the other layers of the model verify chains alone. How many branches
    SGLang takes by itself differs from one model and release to the next, so then its workers
    check."""
    flags, algorithm = prepared.flags, str(prepared.flags.text(ALGORITHM)).upper()
    if algorithm == "NEXTN" and flags.text(*DRAFT_MODEL) is None:
        found = _own_layers(prepared, config, revision)
        if found.state == "missing":  # before its server loads it
            without = f"{ALGORITHM}=NGRAM, or a model: {DRAFT_MODEL[0]}"
            raise UnsupportedModel(
                f"{ALGORITHM}=NEXTN does not work with {prepared.choice.name}: {found.why}.",
                hint=f"drafts without such a layer: {without}",
            )
    if config is None or (algorithm != "NGRAM" and flags.last(BRANCHES) is None):
        return
    _check_layers(flags, _others(prepared, config) if prepared.geometry else None)


def _check_layers(flags: UserFlags, others: str | None) -> None:
    config = SimpleNamespace(speculative_algorithm=flags.text(ALGORITHM))
    for name in (BREADTH, BRANCHES):
        flag = flags.last(name)
        text = flag.value if flag else None
        setattr(config, name[2:].replace("-", "_"), 1 if text == "1" else text)
    refusals.check_layers(config, others)
