"""What an artifact is: where it comes from, how it was made, its settings and its files."""

from __future__ import annotations

import re
from collections.abc import Iterable

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.registry.entries import Entry
from oscar_zoo.site import numbers, tables
from oscar_zoo.site.html import Html, element
from oscar_zoo.site.tables import Row

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUGGING_FACE = "https://huggingface.co/"

Fact = tuple[str, str | Html | None]


def fact_section(entry: Entry) -> Html:
    """The facts, and the files with their checksums."""
    manifest = entry.manifest
    listed = [*_of_entry(entry), *(_of_manifest(manifest) if manifest else ())]
    parts = [
        part
        for name, value in listed
        if value is not None
        for part in (element("dt", name), element("dd", value))
    ]
    return element(
        "section",
        element("h2", "Facts", id="facts"),
        element("dl", parts, class_="facts"),
        _files(manifest) if manifest else None,
    )


def contamination(entry: Entry) -> str | None:
    """The sentence that a score needs whose questions the fit has seen; `None` without such."""
    calibration = entry.manifest.fit.calibration if entry.manifest else None
    if calibration is None or not calibration.overlaps_with:
        return None
    seen = ", ".join(calibration.overlaps_with)
    return (
        f"Its calibration text has questions of {seen}: scores in these sets are not independent."
    )


def hub_link(repo: str, text: str | None = None) -> Html | str:
    """A link to a repository of Hugging Face, or only its name where that is no name of one."""
    shown = text or repo
    if _REPO.fullmatch(repo) is None:
        return shown
    return element("a", shown, href=_HUGGING_FACE + repo, rel="noopener noreferrer")


def _of_entry(entry: Entry) -> Iterable[Fact]:
    recipe = entry.recipe
    on_hub = recipe is not None and recipe.on_hub
    model = entry.model_id
    yield "Model", hub_link(model) if model and on_hub else model
    yield "Family", entry.family
    yield "Digest", element("code", entry.digest) if entry.digest else "nobody has seen the files"
    yield "Hubs", ", ".join(entry.hubs) or None


def _of_manifest(manifest: Manifest) -> Iterable[Fact]:
    fit, recipe, source = manifest.fit, manifest.recipe, manifest.provenance
    yield "Method", fit.method
    yield "Format", None if manifest.format_version is None else str(manifest.format_version)
    yield "Bits per number", f"{recipe.bits_per_element:.2f} ({recipe.group_size} share a scale)"
    yield "Clip", f"keys {recipe.clip.k:g}, values {recipe.clip.v:g} ({recipe.origin} settings)"
    windows = recipe.windows
    yield "In BF16", f"the first {windows.sink} and the last {windows.recent} tokens"
    yield "Needs", ", ".join(recipe.requires) or None
    yield "Shape", _shape(manifest)
    yield "Calibration", _calibration(manifest)
    if fit.numerics is not None:
        engine = fit.numerics.engine
        yield "Made with", " ".join(filter(None, (engine.name, engine.version)))
    if source.hub == "hf" and source.repo:
        yield "Source", hub_link(source.repo)
    elif source.repo:
        yield "Source", source.repo
    yield "Licence", manifest.license.artifact or numbers.UNKNOWN
    yield "Note", manifest.license.note
    yield "Created", manifest.created[:10]


def _shape(manifest: Manifest) -> str:
    model = manifest.model
    widths = " and ".join(dict.fromkeys(map(str, model.head_dims)))
    return (
        f"{len(model.attention_layers)} of {model.num_layers} layers have full attention, with"
        f" {model.num_kv_heads} KV heads of {widths} channels"
    )


def _calibration(manifest: Manifest) -> str | None:
    used = manifest.fit.calibration
    if used is None:
        return None
    tokens = used.tokens_used or used.tokens_requested
    facts = (
        used.dataset or "text that is not named",
        f"{tokens:,} tokens" if tokens else None,
        f"{used.sequences} sequences" if used.sequences else None,
    )
    return ", ".join(fact for fact in facts if fact)


def _files(manifest: Manifest) -> Html:
    rows = [
        Row(
            element("code", file.path),
            (numbers.size(file.size), element("code", file.sha256) if file.sha256 else None),
        )
        for file in manifest.files
    ]
    return tables.table("Files", ("File", "Size", "sha256"), rows, right=("Size",))
