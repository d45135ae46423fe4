"""The artifact to serve: found, verified, and computed first where nobody has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import quote

from oscar_zoo.app.artifacts import Artifact, open_folder, open_named, open_pulled
from oscar_zoo.app.compute_plan import plan_instead
from oscar_zoo.app.compute_wish import ComputeWish, model_to_compute, tell_of_folder
from oscar_zoo.app.obtain import obtain
from oscar_zoo.artifact.artifact_folder import choose_artifact
from oscar_zoo.artifact.names import path_text
from oscar_zoo.errors import OscarZooError, UsageError
from oscar_zoo.observer import Observer
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.targets import ModelChoice, ModelTarget, PathTarget, Target
from oscar_zoo.registry.trust import Trust
from oscar_zoo.registry.verify import artifacts_at


def open_to_serve(
    target: Target,
    model: ModelChoice | None,
    sources: Sources,
    wish: ComputeWish,
    observer: Observer,
    *,
    again: Callable[..., str],
) -> Artifact:
    """Open the artifact that `target` means.

    Args:
        model: the model to serve it with, if the user named one; it also chooses in a tree.
    """
    if isinstance(target, PathTarget):
        return open_folder(_one_of_tree(target, model), observer)
    try:
        return open_named(target, sources, observer)
    except OscarZooError as error:
        choice = model_to_compute(target, error, model)
        if choice is None:
            raise
        tell_of_folder(target, error)
        choice.check_can_be_had(again(model="FOLDER"))
        plan = plan_instead(choice, wish, error, observer, again=again)
    made = obtain(plan, Trust(lock=PinFile.of_project(), write_lock=False), observer)
    folder_model = target.choice if isinstance(target, ModelTarget) else None
    return open_pulled(made.pulled, folder_model, observer)


def _one_of_tree(target: PathTarget, model: ModelChoice | None) -> Path:
    """The folder of the one artifact at or below a path, or of the one for `model`."""
    place = artifacts_at(target.path)
    found = place.artifacts
    if len(found) == 1:
        return found[0]
    if model is None:
        one = quote(path_text(found[0]))
        hint = f"say which with --model MODEL, or name one of them, for example {one}"
        raise UsageError(f"{target} holds {len(found)} artifacts.", hint=hint)
    wanted = model.source if Path(model.source).is_dir() else model.model_id
    return choose_artifact(place.path, found, wanted)
