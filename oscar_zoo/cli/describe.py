"""The facts behind `info`, and how people see them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from oscar_zoo.app.targets import parse_name
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.memory import print_memory
from oscar_zoo.errors import ArtifactNotFound, IntegrityError
from oscar_zoo.registry import known_names
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hub_queries import look
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.notices import status_warnings
from oscar_zoo.registry.record import Record
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.view import HubView


def describe(name: str, hubs: tuple[str, ...] = (), *, offline: bool = False) -> dict[str, Any]:
    """The recipe of a model and the manifests of its artifacts, or of the one that a tag or an
    alias names.

    Args:
        name: as for `pull`.
        hubs: to look at; default the configured ones.
        offline: hubs in folders only.

    Raises:
        ArtifactNotFound: nothing known has this name.
    """
    reference, catalog = parse_name(name).reference, Catalog.packaged()
    views, troubles = look(hubs, offline=offline)
    reference = known_names.expand(reference, views)
    recipe = catalog.recipe(reference.name)
    model = recipe.name if recipe else reference.name.rsplit("/", 1)[-1]
    manifests = {m.artifact_id.key: m for m in catalog.manifests(model)}
    manifests |= _local_manifests(model, views)
    offered = _offered(model, views)
    copies = _installed(model)
    tags = {m.artifact_id.reference for m in manifests.values()} | {
        record.id.reference for record in copies
    }
    tags |= {row["id"].replace("/", ":", 1) for row in offered}
    manifests = {k: m for k, m in manifests.items() if _means(reference, m.artifact_id, m.digest)}
    copies = [record for record in copies if _means(reference, record.id, record.digest)]
    offered = [
        row for row in offered if _means(reference, ArtifactId.parse(row["id"]), row["digest"])
    ]
    narrowed = reference.tag is not None or reference.digest is not None
    if not manifests and not copies and not offered and (recipe is None or narrowed):
        if tags:
            raise ArtifactNotFound(
                f"no artifact is called {name!r}.", hint=f"known: {', '.join(sorted(tags))}"
            )
        known = {a.model for view in views for a in view.hub.artifacts()}
        raise ArtifactNotFound.for_name(name, () if recipe else catalog.close_matches(name, known))
    return {
        "name": model,
        "recipe": recipe.model_dump(mode="json") if recipe else None,
        "artifacts": [manifests[key].to_json() for key in sorted(manifests)],
        "measured": {manifests[key].id: _measured(manifests[key]) for key in sorted(manifests)},
        "installed": [_copy(record) for record in copies],
        "offered": offered,
        "notes": [trouble.message for trouble in troubles],
        "warnings": [sentence for record in copies for sentence in status_warnings(record)],
    }


def _measured(manifest: Manifest) -> dict[str, Any] | None:
    found = Measured.of(manifest)
    return found.model_dump(mode="json") if found else None


def _offered(model: str, views: Sequence[HubView]) -> list[dict[str, Any]]:
    """Where the versions of `model` can be had, as the hubs say now: a row per hub and version."""
    rows = []
    for view in views:
        for artifact in view.hub.artifacts():
            if artifact.model.casefold() == model.casefold():
                entry, status = view.index.entry(artifact), view.status(artifact)
                row = {
                    "id": str(artifact),
                    "hub": view.hub.name,
                    "digest": entry.digest if entry else None,
                }
                rows.append(row | {"state": status.state, "reason": status.reason})
    return rows


def _means(reference: Reference, artifact: ArtifactId, digest: str | None) -> bool:
    """Whether tag and digest of `reference`, where it has them, are those of `artifact`."""
    tagged = reference.tag is None or artifact.tag.casefold() == reference.tag.casefold()
    return tagged and (reference.digest is None or (digest or "").startswith(reference.digest))


def _local_manifests(model: str, views: Sequence[HubView]) -> dict[str, Manifest]:
    """Manifests of `model` on hubs and in the store, by id key; the packaged `registry` block is
    not repeated."""
    found: dict[str, Manifest] = {}
    store = Store()
    for hub in (view.hub for view in views):
        for artifact in hub.artifacts():
            listed = artifact.model.casefold() == model.casefold() and artifact.key not in found
            if listed and any(f.path == FILE_NAME for f in hub.files(artifact)):
                found[artifact.key] = Manifest.from_bytes(
                    hub.fetch(artifact, FILE_NAME, limit=1 << 20)
                )
    for record in _installed(model):
        with contextlib.suppress(
            IntegrityError
        ):  # a rotten copy takes nothing away from what is known
            stored = store.open(record.digest, record.id)
            if stored.manifest is not None:
                found[record.id.key] = stored.manifest
    return found


def _installed(model: str) -> list[Record]:
    return [
        record for record in Store().installed() if record.id.model.casefold() == model.casefold()
    ]


def _copy(record: Record) -> dict[str, Any]:
    """A copy in the store as JSON, hashed just now."""
    try:
        Store().open(record.digest, record.id)
        intact = True
    except IntegrityError:
        intact = False
    return {
        "id": str(record.id),
        "digest": record.digest,
        "path": str(record.path),
        "intact": intact,
    }


def print_facts(facts: dict[str, Any]) -> None:
    """The text form of `describe`."""
    console = terminal.out()
    recipe = facts["recipe"]
    console.print(f"[bold]{terminal.clean(facts['name'])}[/]")
    if recipe:
        serving = recipe["serving"]
        _line(
            "model",
            recipe["hf_id"]
            + (f", also {', '.join(recipe['aliases'])}" if recipe["aliases"] else ""),
        )
        _line("geometry", geometry_line(recipe["geometry"]))
        _line("serving", serving_line(serving))
        _line("GPUs", f"tensor parallel {recipe['tensor_parallel']}")
    if facts.get("memory"):
        print_memory(facts["memory"])
    if recipe:
        for topic, source in recipe["sources"].items():
            _line("source", f"{topic}: {source}")
    for copy in facts["installed"]:
        reference = copy["id"].replace("/", ":", 1)
        state = (
            copy["path"]
            if copy["intact"]
            else f"damaged, fetch it again: oscar-zoo pull {reference}"
        )
        _line("installed", f"{reference}  {state}")
    for row in facts["offered"]:
        state = (
            ""
            if row["state"] == "active"
            else f", {row['state']}: {row['reason'] or 'no reason given'}"
        )
        _line("offered", f"{row['id'].replace('/', ':', 1)}  {row['hub']}{state}")
    for note in facts["notes"]:
        _line("note", note)
    for warning in facts["warnings"]:
        terminal.note(f"warning: {warning}")
    if not facts["artifacts"] and not facts["installed"] and not facts["offered"]:
        on_hub = recipe is None or recipe["on_hub"]
        make = f"pull {facts['name']} --compute" if on_hub else "compute FOLDER"
        console.print(f"No published rotation is known; make one: oscar-zoo {terminal.clean(make)}")
    for manifest in facts["artifacts"]:
        figures = facts["measured"][manifest["id"]]
        _print_manifest(manifest, Measured.model_validate(figures) if figures else None)


def _print_manifest(manifest: dict[str, Any], measured: Measured | None) -> None:
    terminal.out().print(f"\n[bold]{terminal.clean(manifest['id'].replace('/', ':', 1))}[/]")
    fit = manifest["fit"]
    _line("method", f"{fit['method']}, format_version {manifest['format_version']}")
    _line(
        "digest", manifest["digest"] or f"{terminal.NOT_REPORTED}: it is pinned at the first pull"
    )
    for entry in manifest["files"]:
        size = terminal.megabytes(entry["size"]) if entry["size"] else "size not reported"
        _line("file", f"{entry['path']}  {size}  sha256 {entry['sha256'] or terminal.NOT_REPORTED}")
    _line("serving", serving_line(manifest["recipe"]))
    calibration = fit["calibration"]
    if calibration:
        used = calibration["tokens_used"] or calibration["tokens_requested"]
        _line(
            "calibration",
            f"{calibration['dataset'] or terminal.NOT_REPORTED}, {used or terminal.NOT_REPORTED}"
            " tokens",
        )
        if calibration["overlaps_with"]:
            _line(
                "warning",
                f"calibrated on evaluation data: {', '.join(calibration['overlaps_with'])}",
            )
    if measured is not None:
        for label, text in (
            ("perplexity", measured.perplexity_line),
            ("recall", measured.recall_line),
        ):
            _line(label, f"{text or terminal.NOT_REPORTED}, {measured.by}")
    for score in manifest.get("registry", {}).get("scores", []):
        _line("score", score_line(score))


def geometry_line(geometry: dict[str, Any]) -> str:
    """Shape of a model's cache in one line."""
    layers = geometry["attention_layers"]
    some = (
        ""
        if len(layers) == geometry["num_layers"]
        else f", full attention in {len(layers)} of them"
    )
    return (
        f"{geometry['num_layers']} layers{some}; {geometry['num_q_heads']} query and "
        f"{geometry['num_kv_heads']} KV heads of {geometry['head_dim']}"
    )


def serving_line(recipe: dict[str, Any]) -> str:
    """A serving recipe in one line."""
    clip, windows = recipe["clip"], recipe["windows"]
    return (
        f"INT2, group {recipe['group_size']}, K clip {clip['k']}, V clip {clip['v']}, "
        f"first {windows['sink']} and last {windows['recent']} tokens in {windows['dtype']}"
    )


def score_line(score: dict[str, Any]) -> str:
    """A score with its baseline, who reports it, what is unknown, and its earlier values."""
    value = terminal.NOT_REPORTED if score["value"] is None else f"{score['value']:.2f}"
    base = score["baseline"]["value"] if score["baseline"] else None
    before = terminal.NOT_REPORTED if base is None else f"{base:.2f}"
    runs = f"{score['repeats']} runs" if score["repeats"] else "runs not reported"
    history = "".join(
        f", earlier {entry['value']:.2f} ({entry['source']})" for entry in score["history"]
    )
    return (
        f"{score['task']}: BF16 {before}, INT2 {value}; reported by {score['reporter']},"
        f" {runs}{history}"
    )


def _line(label: str, text: str) -> None:
    terminal.out().print(f"  {label:<12} {terminal.clean(text)}")
