"""What `info` shows about a model and its artifacts."""

from __future__ import annotations

import json
from dataclasses import asdict
from shlex import quote
from typing import Any

from oscar_zoo.app.browse import Description
from oscar_zoo.artifact.names import is_path
from oscar_zoo.artifact.outcome import Outcome, Verified
from oscar_zoo.artifact.specs import Score
from oscar_zoo.artifact.width_selection import WidthSelection
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.memory import print_memory
from oscar_zoo.cli.render.outcomes import headline
from oscar_zoo.cli.render.scores import score_line
from oscar_zoo.cli.render.widths import course, raises, with_windows
from oscar_zoo.registry.architectures import Architecture
from oscar_zoo.registry.measured import Measured
from oscar_zoo.verb import as_json

_ASKED = {
    "compute": "compute",
    "eval": "eval",
    "serve_cpu": "serve on CPU",
    "serve_gpu": "serve on GPU",
}


def facts_of(found: Description) -> dict[str, Any]:
    """The JSON of `info`."""
    measured = {
        name: figures.model_dump(mode="json") if figures else None
        for name, figures in found.measured.items()
    }
    return {
        "name": found.name,
        "model": asdict(found.model) if found.model else None,
        "recipe": found.recipe.model_dump(mode="json") if found.recipe else None,
        "works": _works(found.architecture),
        "artifacts": [manifest.to_json() for manifest in found.manifests],
        "measured": measured,
        "scores": {
            name: [score.model_dump(mode="json") for score in scores]
            for name, scores in found.scores.items()
        },
        "installed": [
            {
                "id": str(copy.record.id),
                "digest": copy.record.digest,
                "path": str(copy.record.path),
                "intact": copy.intact,
                "fetch_again": copy.record.fetch_again,
                "signature": as_json(copy.signature),
            }
            for copy in found.installed
        ],
        "offered": [
            {
                "id": str(offer.id),
                "hub": offer.hub,
                "digest": offer.digest,
                "state": offer.state,
                "reason": offer.reason,
                "signed": offer.signed,
            }
            for offer in found.offered
        ],
        "files": _files(found.verified),
        "notes": [error.message for error in found.unreachable],
        "warnings": list(found.warnings),
        "memory": found.memory,
    }


def print_facts(facts: dict[str, Any]) -> None:
    """The text form of `describe`."""
    console = terminal.out()
    recipe, model = facts["recipe"], facts["model"]
    console.print(f"[bold]{terminal.clean(facts['name'])}[/]")
    if recipe:
        serving = recipe["serving"]
        terminal.fact(
            "model",
            recipe["hf_id"]
            + (f", also {', '.join(recipe['aliases'])}" if recipe["aliases"] else ""),
        )
        terminal.fact("geometry", geometry_line(recipe["geometry"]))
        terminal.fact("recipe", serving_line(serving))
        terminal.fact("GPUs", f"tensor parallel {recipe['tensor_parallel']}")
        if recipe["drafts"]:
            terminal.fact("drafts", drafts_line(recipe["drafts"]))
    elif model:
        terminal.fact("model", f"{model['source']}; the zoo has no recipe for it")
        unknown = "" if facts["works"] else ", which nobody has tried"
        terminal.fact("architecture", f"{model['model_type']}{unknown}")
    for what, answer in (facts["works"] or {}).items():
        joint = ", tried with " if answer["state"] == "works" else ": "
        detail = f"{joint}{answer['how']}" if answer["how"] else ""
        terminal.fact(_ASKED[what], f"{answer['state']}{detail}")
    if facts.get("memory"):
        print_memory(facts["name"] if recipe else None, facts["memory"])
    if recipe:
        for topic, source in recipe["sources"].items():
            terminal.fact("source", f"{topic}: {source}")
    for copy in facts["installed"]:
        reference = copy["id"].replace("/", ":", 1)
        state = (
            copy["path"] if copy["intact"] else f"damaged, fetch it again: {copy['fetch_again']}"
        )
        terminal.fact("installed", f"{reference}  {state}")
        if (signed := copy["signature"])["state"] != "missing":
            terminal.fact("signature", _signature_line(signed))
    if (files := facts["files"]) is not None:
        word = "" if files["intact"] else "FAILED: "
        terminal.fact("files", f"{word}{files['outcome']}")
    for row in facts["offered"]:
        state = (
            ""
            if row["state"] == "active"
            else f", {row['state']}: {row['reason'] or 'no reason given'}"
        )
        state += ", with a signature" if row["signed"] else ""
        terminal.fact("offered", f"{row['id'].replace('/', ':', 1)}  {row['hub']}{state}")
    for note in facts["notes"]:
        terminal.fact("note", note)
    for warning in facts["warnings"]:
        terminal.note(f"warning: {warning}")
    if not facts["artifacts"] and not facts["installed"] and not facts["offered"]:
        terminal.labelled("", _none_known(facts))
    for manifest in facts["artifacts"]:
        figures = facts["measured"][manifest["id"]]
        print_manifest(manifest, Measured.model_validate(figures) if figures else None)
        for score in facts["scores"].get(manifest["id"], ()):
            terminal.fact("score", score_line(Score.model_validate_json(json.dumps(score))))


def _files(outcome: Outcome | None) -> dict[str, Any] | None:
    """What verification says of the files in a folder."""
    if outcome is None:
        return None
    intact = isinstance(outcome, Verified)
    return {"intact": intact, "outcome": headline(outcome)}


def _signature_line(signed: dict[str, Any]) -> str:
    """A signature in one line, from its JSON."""
    if signed["state"] == "valid":
        return f"signed by {signed['fingerprint']} ({signed['known_by']})"
    return str(signed["message"])


def _works(row: Architecture | None) -> dict[str, dict[str, str | None]] | None:
    """What works for models of this kind, and how that was tested or why it does not."""
    if row is None:
        return None
    answers = (row.compute, row.evaluate, row.serve_cpu, row.serve_gpu)
    return {
        what: {"state": answer.state, "how": answer.tested or answer.reason}
        for what, answer in zip(_ASKED, answers, strict=True)
    }


def _none_known(facts: dict[str, Any]) -> str:
    """What to do where no rotation is known."""
    if facts["works"] and facts["works"]["compute"]["state"] == "does not work":
        return "No published rotation is known, and computing one does not work yet."
    recipe, source = facts["recipe"], facts["model"]["source"]
    if is_path(source):
        make = f"compute {quote(source)}"
    elif recipe is None:
        make = f"pull {quote(source)} --compute"
    else:
        make = f"pull {facts['name']} --compute" if recipe["on_hub"] else "compute FOLDER"
    return f"No published rotation is known; make one: oscar-zoo {make}"


def print_manifest(manifest: dict[str, Any], measured: Measured | None) -> None:
    """One artifact, from the JSON of its manifest."""
    terminal.out().print(f"\n[bold]{terminal.clean(manifest['id'].replace('/', ':', 1))}[/]")
    fit = manifest["fit"]
    terminal.fact("method", f"{fit['method']}, format_version {manifest['format_version']}")
    terminal.fact(
        "digest", manifest["digest"] or f"{terminal.NOT_REPORTED}: it is pinned at the first pull"
    )
    for entry in manifest["files"]:
        size = terminal.megabytes(entry["size"]) if entry["size"] else "size not reported"
        digest = entry["sha256"] or terminal.NOT_REPORTED
        terminal.fact("file", f"{entry['path']}  {size}  sha256 {digest}")
    terminal.fact("serving", serving_line(manifest["recipe"]))
    if (widths := WidthSelection.of(fit["selection"])) is not None:
        terminal.fact("bits", f"{widths.kept.bits:.4g} per element, {raises(widths)}")
        terminal.fact("with windows", with_windows(widths))
        terminal.fact("bits to KL", course(widths))
    calibration = fit["calibration"]
    if calibration:
        used = calibration["tokens_used"] or calibration["tokens_requested"]
        terminal.fact(
            "calibration",
            f"{calibration['dataset'] or terminal.NOT_REPORTED}, {used or terminal.NOT_REPORTED}"
            " tokens",
        )
        if calibration["overlaps_with"]:
            terminal.fact(
                "warning",
                f"calibrated on evaluation data: {', '.join(calibration['overlaps_with'])}",
            )
    if measured is not None:
        for label, text in (
            ("perplexity", measured.perplexity_line),
            ("recall", measured.recall_line),
        ):
            terminal.fact(label, f"{text or terminal.NOT_REPORTED}, {measured.by}")


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


def drafts_line(drafts: dict[str, Any]) -> str:
    """Layers of a model that guess later tokens, in one line."""
    layers, steps = drafts["layers"], drafts["steps"]
    own = "a layer" if layers == 1 else f"{layers} layers"
    return f"{own} of its own (MTP), up to {steps} tokens a step with serve --drafts"


def serving_line(recipe: dict[str, Any]) -> str:
    """A serving recipe in one line."""
    clip, windows = recipe["clip"], recipe["windows"]
    return (
        f"INT2, group {recipe['group_size']}, K clip {clip['k']}, V clip {clip['v']}, "
        f"first {windows['sink']} and last {windows['recent']} tokens in {windows['dtype']}"
    )
