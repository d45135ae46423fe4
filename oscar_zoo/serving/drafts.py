"""Where the drafts of a server come from that is asked for drafts without SGLang's flags: from a
layer of the model where it has one, else from text that repeats itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from oscar_zoo.engines.sglang import refusals
from oscar_zoo.engines.sglang.launch import flag_refusals
from oscar_zoo.engines.sglang.launch.flag_refusals import ALGORITHM, OPTION, Kind, Wish, check_flags
from oscar_zoo.engines.sglang.launch.plan import DRAFT_MODEL
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.refusals import BRANCHES, BREADTH
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.model_hub import kept_config
from oscar_zoo.models.other_layers import UNTRIED, MtpLayers, kept_by_others, mtp_layers
from oscar_zoo.models.weight_files import stored_names
from oscar_zoo.observer import Note, Observer
from oscar_zoo.serving.prepared import Prepared

SOURCES: dict[Kind, str] = {
    "mtp": "the model's own layer (MTP)",
    "ngram": "text that repeats itself (n-grams)",
}


@dataclass(frozen=True)
class DraftChoice:
    """The flags of a server with its drafts.

    Attributes:
        flags: those of the user, behind the ones that were missing.
        told: what was chosen, and why; `None` where nobody asked for drafts.
    """

    flags: UserFlags
    told: str | None = None


def choose_drafts(
    wish: Wish | None,
    prepared: Prepared,
    flags: UserFlags,
    revision: str | None,
    observer: Observer,
) -> DraftChoice:
    """The flags for what `--drafts` asks for; one note says what was chosen and why. Drafts that
    the flags of the user name are checked with and without `--drafts`.

    Args:
        wish: the value of `--drafts`, or `None` without it.
        flags: those of the user, which win; `draft_flags.check_wish` has passed them.
    """
    asked = flags.last(ALGORITHM)
    if asked is not None:
        _check_named(prepared, flags, revision)
    if wish is None:
        return DraftChoice(flags)
    if asked is not None:
        chosen = DraftChoice(flags, f"as {ALGORITHM}={asked.value} says; {OPTION} adds no flags")
    else:
        chosen = _chosen(wish, prepared, flags, revision)
    observer.note(Note("serve.drafts", f"Drafts: {chosen.told}", kind="step"))
    return chosen


def _chosen(wish: Wish, prepared: Prepared, flags: UserFlags, revision: str | None) -> DraftChoice:
    config = prepared.config or ConfigFile.kept(prepared.choice.source, revision)
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
        steps = known.steps if known else flag_refusals.MTP_STEPS
        words, guesses = flag_refusals.mtp_words(flags, steps)
    else:
        words, guesses = flag_refusals.ngram_words(flags, chain=others is not None)
    all_flags = flags.after(*words)
    check_flags(all_flags, prepared.device)
    _check_layers(all_flags, others)
    why = f"{OPTION}={wish}" if wish == kind else f"because {found.why}"
    return DraftChoice(all_flags, f"up to {guesses} tokens a step from {SOURCES[kind]}, {why}")


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


def _check_named(prepared: Prepared, flags: UserFlags, revision: str | None) -> None:
    """Refuse a layer that the model is known not to have, and trees that the flags of the user ask
    for, where it is known that the other layers of the model verify chains alone. How many branches
    SGLang takes by itself differs from one model and release to the next, so then its workers
    check."""
    config = prepared.config or ConfigFile.kept(prepared.choice.source, revision)
    algorithm = str(flags.text(ALGORITHM)).upper()
    if algorithm == "NEXTN" and flags.text(*DRAFT_MODEL) is None:
        _check_own_layer(prepared, config, revision)
    of_eagle = algorithm != "NGRAM"
    if config is None or (of_eagle and flags.last(BRANCHES) is None):
        return
    _check_layers(flags, _others(prepared, config) if prepared.geometry else None)


def _check_own_layer(prepared: Prepared, config: ConfigFile | None, revision: str | None) -> None:
    """Refuse a model that is known to have no layer to draft with, before its server loads it."""
    found = _own_layers(prepared, config, revision)
    if found.state == "missing":
        raise UnsupportedModel(
            f"{ALGORITHM}=NEXTN does not work with {prepared.choice.name}: {found.why}.",
            hint=f"drafts without such a layer: {ALGORITHM}=NGRAM, or a model: {DRAFT_MODEL[0]}",
        )


def _check_layers(flags: UserFlags, others: str | None) -> None:
    """As the server will check the flags; raises `UnsupportedModel`."""
    config = SimpleNamespace(speculative_algorithm=flags.text(ALGORITHM))
    for name in (BREADTH, BRANCHES):
        flag = flags.last(name)
        text = flag.value if flag else None
        setattr(config, name[2:].replace("-", "_"), 1 if text == "1" else text)
    refusals.check_trees(config, others)
