"""What `info` shows about a model and its artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from shlex import quote
from typing import Any

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.names import is_path
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.artifact.width_selection import WidthSelection
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.computing import course, raises, with_windows
from oscar_zoo.cli.render.outcomes import headline
from oscar_zoo.cli.render.scores import score_line
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.recipe import DraftDefaults, ModelRecipe
from oscar_zoo.site import info
from oscar_zoo.site.info import Description, Files, Memory
from oscar_zoo.site.params import InfoParams

_ASKED = {"serve_cpu": "serve on CPU", "serve_gpu": "serve on GPU"}


def run(params: InfoParams, observer: Observer = SILENT) -> Description:
    """What is known, with the words of `verify` for the files of a folder."""
    found = info.run(params, observer)
    if found.verified is None:
        return found
    intact = isinstance(found.verified, Verified)
    return replace(found, files=Files(intact, headline(found.verified)))


def print_facts(found: Description, params: InfoParams, *, quiet: bool) -> None:
    """The text form of `info`."""
    recipe, model = found.recipe, found.model
    terminal.out().print(f"[bold]{terminal.clean(found.name)}[/]")
    if recipe:
        _print_recipe(recipe)
    elif model:
        terminal.fact("model", f"{model.source}; the zoo has no recipe for it")
        unknown = "" if found.works else ", which nobody has tried"
        terminal.fact("architecture", f"{model.model_type}{unknown}")
    works: Mapping[str, Any] = found.works or {}
    for what, answer in works.items():
        joint = ", tried with " if answer.state == "works" else ": "
        detail = f"{joint}{answer.how}" if answer.how else ""
        terminal.fact(_ASKED.get(what, what), f"{answer.state}{detail}")
    if found.memory:
        _print_memory(found.name if recipe else None, found.memory)
    if recipe:
        for topic, source in recipe.sources.items():
            terminal.fact("source", f"{topic}: {source}")
    for copy in found.installed:
        state = copy.path if copy.intact else f"damaged, fetch it again: {copy.fetch_again}"
        terminal.fact("installed", f"{copy.id.reference}  {state}")
        if copy.signature.state != "missing":
            terminal.fact("signature", copy.signature.sentence)
    if found.files is not None:
        terminal.fact("files", ("" if found.files.intact else "FAILED: ") + found.files.outcome)
    for offer in found.offered:
        why = f", {offer.state}: {offer.reason or 'no reason given'}"
        state = "" if offer.state == "active" else why
        state += ", with a signature" if offer.signed else ""
        terminal.fact("offered", f"{offer.id.reference}  {offer.hub}{state}")
    for error in found.unreachable:
        terminal.fact("note", error.message)
    for warning in found.warnings:
        terminal.note(f"warning: {warning}")
    if not (found.artifacts or found.installed or found.offered):
        terminal.labelled("", _none_known(found))
    for manifest in found.artifacts:
        print_manifest(manifest, found.measured[manifest.id])
        for score in found.scores.get(manifest.id, ()):
            terminal.fact("score", score_line(score))


def _print_recipe(recipe: ModelRecipe) -> None:
    also = f", also {', '.join(recipe.aliases)}" if recipe.aliases else ""
    terminal.fact("model", recipe.hf_id + also)
    terminal.fact("geometry", geometry_line(recipe.geometry))
    terminal.fact("recipe", serving_line(recipe.serving))
    terminal.fact("GPUs", f"tensor parallel {recipe.tensor_parallel}")
    if recipe.drafts:
        terminal.fact("drafts", drafts_line(recipe.drafts))


def _none_known(found: Description) -> str:
    """What to do where no rotation is known."""
    source = found.model.source if found.model else ""
    states = [it["compute"].state, it["serve_gpu"].state] if (it := found.works) else []
    if states == ["does not work", "works"]:  # quantized weights
        serve = f"oscar-zoo serve ROTATION --model {quote(source)}"
        return f"No published rotation is known; that of its base model serves it: {serve}"
    if "does not work" in states:
        return "No published rotation is known, and none can be made and served yet."
    if is_path(source):
        make = f"compute {quote(source)}"
    elif found.recipe is None:
        make = f"pull {quote(source)} --compute"
    else:
        make = f"pull {found.name} --compute" if found.recipe.on_hub else "compute FOLDER"
    return f"No published rotation is known; make one: oscar-zoo {make}"


def print_manifest(manifest: Manifest, measured: Measured | None) -> None:
    """One artifact."""
    terminal.out().print(f"\n[bold]{terminal.clean(manifest.id.replace('/', ':', 1))}[/]")
    fit, unknown = manifest.fit, terminal.NOT_REPORTED
    terminal.fact("method", f"{fit.method}, format_version {manifest.format_version}")
    terminal.fact("digest", manifest.digest or f"{unknown}: it is pinned at the first pull")
    for file in manifest.files:
        size = terminal.megabytes(file.size) if file.size else "size not reported"
        terminal.fact("file", f"{file.path}  {size}  sha256 {file.sha256 or unknown}")
    terminal.fact("serving", serving_line(manifest.recipe))
    if (widths := WidthSelection.of(fit.selection)) is not None:
        terminal.fact("bits", f"{widths.kept.bits:.4g} per element, {raises(widths)}")
        terminal.fact("with windows", with_windows(widths))
        terminal.fact("bits to KL", course(widths))
    if (used := fit.calibration) is not None:
        tokens = used.tokens_used or used.tokens_requested
        terminal.fact("calibration", f"{used.dataset or unknown}, {tokens or unknown} tokens")
        if used.overlaps_with:
            seen = ", ".join(used.overlaps_with)
            terminal.fact("warning", f"calibrated on evaluation data: {seen}")
    if measured is not None:
        terminal.fact("perplexity", f"{measured.perplexity_line or unknown}, {measured.by}")
        terminal.fact("recall", f"{measured.recall_line or unknown}, by {measured.tool}")


def geometry_line(geometry: Geometry) -> str:
    """Shape of a model's cache in one line."""
    full = len(geometry.attention_layers)
    some = "" if full == geometry.num_layers else f", full attention in {full} of them"
    return (
        f"{geometry.num_layers} layers{some}; {geometry.num_q_heads} query and "
        f"{geometry.num_kv_heads} KV heads of {geometry.head_dim}"
    )


def drafts_line(drafts: DraftDefaults) -> str:
    """Layers of a model that guess later tokens, in one line."""
    own = "a layer" if drafts.layers == 1 else f"{drafts.layers} layers"
    return f"{own} of its own (MTP), up to {drafts.steps} tokens a step with serve --drafts"


def serving_line(recipe: ServingRecipe) -> str:
    """A serving recipe in one line."""
    k, v, windows = recipe.clip.k or "none", recipe.clip.v or "none", recipe.windows
    return (
        f"INT2, group {recipe.group_size}, K clip {k}, V clip {v}, "
        f"first {windows.sink} and last {windows.recent} tokens in {windows.dtype}"
    )


def _print_memory(name: str | None, memory: Memory) -> None:
    """The lines of `info`; `name` is what `fit-gpu` calls the model, where it knows it."""
    weights = memory["weights_bytes"]
    int2, bf16 = memory["int2_token_bytes"], memory["bf16_token_bytes"]
    size = "weights not known to the zoo"
    if weights is not None:
        size = f"weights {terminal.gigabytes(weights)} ({memory['weights_source']})"
    request = terminal.megabytes(memory["window_bytes_per_request"])
    states = " and its states" if memory["state_bytes_per_request"] else ""
    each = f"cache per token {int2 / 1e3:.1f} kB INT2, {bf16 / 1e3:.1f} kB BF16"
    terminal.fact("memory", f"estimate: {size}; {each}")
    terminal.fact("", f"and {request} per running request for its BF16 tokens{states}")
    if weights is None:
        held = f"{_count(10**9 // int2)} tokens INT2, {_count(10**9 // bf16)} BF16"
        terminal.fact("", f"1 GB of cache holds {held}")
        return
    for card in memory["gpus"]:
        terminal.fact("fits", f"{_cards(card)}: {_fits(name, memory, card)}")
    if not memory["gpus"]:
        terminal.fact("fits", "no GPU is visible here; to ask about one: --gpu 4090, or 24GiB")


def _cards(card: Mapping[str, Any]) -> str:
    many = f"{card['gpus']} x " if card["gpus"] > 1 else ""
    return f"{many}{card['name']} with {terminal.gibibytes(card['memory_bytes'])}"


def _fits(name: str | None, memory: Memory, card: Mapping[str, Any]) -> str:
    """What fits on the GPUs of `card`."""
    tokens, plain = card["int2_tokens"], card["bf16_tokens"]
    if tokens is None:
        missing = f"the zoo does not know {memory['other_layers_unknown']}"
        size = f"{round(card['memory_bytes'] / (1 << 30), 3):g}GiB"
        more = f"; a range: oscar-zoo fit-gpu {name} --gpu-memory {size}"
        return missing + more * bool(name)
    if tokens == 0:
        states = ", windows and states" if memory["state_bytes_per_request"] else " and windows"
        return f"no, weights{states} leave no room for a cache"
    running, others = card["int2_requests"], card["bf16_requests"]
    int2, bf16 = f"about {_count(tokens)} tokens INT2", f"{_count(plain)} BF16"
    if running == others:
        return f"{int2}, {bf16}, with {running} requests at a time"
    return f"{int2} with {running} requests at a time, {bf16} with {others}"


def _count(number: int) -> str:
    if number >= 10**6:
        return f"{number / 1e6:.2f} M"
    return f"{number / 1e3:.0f} k" if number >= 10**4 else f"{number:,}"
