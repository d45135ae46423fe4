"""`--drafts`: SGLang's flags for speculative decoding, chosen for a user who names none of them.

Drafts come from a layer of the model where it has one, else from text that repeats itself. Flags
that the user gives win, so only those that are missing are added.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from oscar_zoo.engines.sglang import refusals
from oscar_zoo.engines.sglang.launch.user_flags import (
    ALGORITHM,
    DRAFT_MODEL,
    Flag,
    UserFlags,
    check_flags,
    needs_gpu,
)
from oscar_zoo.engines.sglang.refusals import BRANCHES, BREADTH
from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.model_hub import kept_config
from oscar_zoo.models.other_layers import UNTRIED, MtpLayers, kept_by_others, mtp_layers
from oscar_zoo.models.weight_files import stored_names
from oscar_zoo.observer import Note, Observer
from oscar_zoo.serving.params import ServeParams
from oscar_zoo.serving.prepared import Prepared

Kind = Literal["mtp", "ngram"]
Wish = Literal["auto", "mtp", "ngram"]
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
    if wish != "auto" and (_algorithm(algorithm) != ALGORITHMS[wish] or model is not None):
        raise UsageError(
            f"{OPTION}={wish} and {ALGORITHM}={_algorithm(algorithm)} contradict each other.",
            hint="leave out one of the two",
        )


def choose_drafts(params: ServeParams, prepared: Prepared, observer: Observer) -> None:
    """Put the flags for what `--drafts` asks for into `prepared`; one note says what was chosen and
    why. Drafts that the flags of the user name, which win, are checked with and without
    `--drafts`."""
    wish, revision = params.drafts, params.revision
    asked = prepared.flags.last(ALGORITHM)
    if asked is None and wish is None:
        return
    config = prepared.config or ConfigFile.kept(prepared.choice.source, revision)
    if asked is not None:
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
    wanted = {
        ALGORITHM: ALGORITHMS["mtp"],
        STEPS: str(steps),
        BRANCHES: "1",
        TOKENS: str(steps + 1),
        ATTENTION: MTP_ATTENTION,
    }
    return _missing(wanted, flags), steps


def ngram_words(flags: UserFlags, *, chain: bool) -> tuple[tuple[str, ...], int]:
    """The missing flags for drafts from text that repeats itself, and how many tokens are guessed
    in front of a step; with `chain` they must be no tree."""
    tokens = _number(flags.last(TOKENS), NGRAM_TOKENS, least=2)
    wanted = {ALGORITHM: ALGORITHMS["ngram"], TOKENS: str(tokens)}
    return _missing(wanted | ({BREADTH: "1"} if chain else {}), flags), tokens - 1


def _missing(wanted: dict[str, str], flags: UserFlags) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in wanted.items() if flags.last(name) is None)


def _algorithm(flag: Flag) -> str:
    return (flag.value or "").upper()


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
        known = recipe is not None and recipe.model_type not in UNTRIED
        return MtpLayers(
            "missing" if known else "unknown",
            "the zoo knows of no MTP layer" if known else "nothing is known of such a layer",
        )
    return mtp_layers(config, names)


def _others(prepared: Prepared, config: ConfigFile | None) -> str | None:
    """What the layers without full attention keep. Where nobody knows it, the answer is that of
    models that verify chains alone."""
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
