"""The artifact to serve: found, verified, and computed first where nobody has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote

from oscar_zoo.app import targets
from oscar_zoo.app.artifact_model import model_argument
from oscar_zoo.app.artifacts import Artifact, open_artifact, open_reference
from oscar_zoo.app.compute_plan import (
    ComputeWish,
    compute_command,
    model_to_compute,
    plan_computing,
    refusal,
)
from oscar_zoo.app.obtain import obtain
from oscar_zoo.app.progress import Observer
from oscar_zoo.app.sources import Sources
from oscar_zoo.app.targets import ModelTarget, PathTarget, Target
from oscar_zoo.artifact.names import Reference, path_text
from oscar_zoo.artifact.tree import artifact_of_model
from oscar_zoo.artifact.verify import find_artifacts
from oscar_zoo.errors import ArtifactNotFound, OscarZooError, UsageError
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.trust import Trust


def open_to_serve(
    text: str | Path,
    model: str | None,
    sources: Sources,
    wish: ComputeWish,
    observer: Observer,
) -> Artifact:
    """Open the artifact that `text` means.

    Args:
        text: name of an artifact, its folder, a tree of artifacts, or the folder of a model.
        model: the model to serve it with, if the user named one; it also chooses in a tree.
        wish: what to do where nobody has an artifact.

    Raises:
        PathNotFound, ArtifactNotFound, AmbiguousName: `text` means nothing, or too much.
        OscarZooError: as `open_artifact`, `plan_computing` and `obtain`.
    """
    target = _one_of_tree(targets.parse(text), model, observer)
    try:
        return open_artifact(target, sources, observer)
    except OscarZooError as error:
        if isinstance(target, PathTarget):
            raise
        choice = model_to_compute(target, error, observer, model=model)
        if choice is None:
            raise
        if model is None:
            choice.check_can_be_had(with_folder("serve", target.text))
        ask = wish.ask and isinstance(error, ArtifactNotFound)
        plan = plan_computing(choice, wish, error, observer) if wish.compute or ask else None
        if plan is None or not (wish.compute or observer.confirm(plan.question)):
            at = "" if model is None else f" --model {model_argument(model)}"
            command = compute_command("serve", target.text) + at
            raise refusal(error, command, choice) from None
    made = obtain(plan, Trust(lock=PinFile.of_project(), write_lock=False), observer)
    record = made.pulled.artifact.record
    reference = Reference(record.id.model, record.id.tag, record.digest)
    folder = target.path if isinstance(target, ModelTarget) else None
    return open_reference(reference, Sources(), observer, folder=folder)


def with_folder(command: str, text: str) -> str:
    """The command line that uses the artifact `text` with a model in a folder."""
    return f"oscar-zoo {command} {quote(text)} --model FOLDER"


def _one_of_tree(target: Target, model: str | None, observer: Observer) -> Target:
    """The artifact of `model`, where `target` is a folder that holds several; else `target`.

    Raises:
        UsageError: the folder holds several, and no model was named.
        ArtifactNotFound, AmbiguousName: none of them is for `model`, or several are.
    """
    if not isinstance(target, PathTarget) or not target.path.is_dir():
        return target
    found = find_artifacts(target.path)
    if len(found) < 2:
        return target
    if model is None:
        one = quote(path_text(found[0]))
        hint = f"say which with --model MODEL, or name one: oscar-zoo serve {one}"
        raise UsageError(f"{target} holds {len(found)} artifacts.", hint=hint)
    wanted = model if Path(model).is_dir() else targets.parse_model(model, observer).model_id
    return replace(target, path=artifact_of_model(target.path, wanted))
