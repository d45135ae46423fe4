"""Where `eval` leaves perplexity and recall: a score file in the user's own artifact folder, or in
the state folder for an artifact that was named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.errors import OscarZooError
from oscar_zoo.evaluate.records import Circumstances, Compared, scores
from oscar_zoo.evaluate.texts import NAMES
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry import score_file
from oscar_zoo.registry.score_file import ScoreFile
from oscar_zoo.registry.store import Store


def keep_record(
    artifact: Artifact,
    model: LoadedModel,
    compared: Sequence[Compared],
    facts: Mapping[str, object],
    settings: Mapping[str, object],
    changes: Mapping[str, str],
    observer: Observer,
) -> Path | None:
    """Keep what was measured, and say where; a record that cannot be kept costs no result.

    Args:
        facts: of the report, with `text_sha256`.
        settings: `data`, `windows`, `length` and `answers` of the request.

    Returns:
        The score file, or `None` without one.
    """
    if artifact.id is None or not compared:
        return None
    if not made_for(artifact, model.block):
        text = f"no scores are recorded: {artifact.label} was not made for {model.block.id}."
        observer.note(Note("eval.no_record", text))
        return None
    around = Circumstances(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        source=_command(artifact, settings, changes),
        text_sha256=str(facts["text_sha256"]),
        digest=artifact.digest,
        recipe_changes=changes,
    )
    found = scores(compared, model, around)
    if not found:
        return None
    identity = ArtifactId.parse(artifact.id)
    path = place_of(artifact, identity)
    try:
        score_file.keep(path, ScoreFile.of(identity, artifact.digest, found))
    except OscarZooError as error:
        text = f"the scores are not kept in {path_text(path)}: {error.message}"
        observer.note(Note("eval.no_record", text, {"path": str(path)}))
        return None
    return path


def place_of(artifact: Artifact, identity: ArtifactId) -> Path:
    """The score file of an artifact: in its folder where that is the user's own, else in the state
    folder."""
    stored = artifact.path.resolve().is_relative_to(Store().root.resolve())
    if artifact.installed or stored:
        return score_file.in_state(identity)
    return score_file.in_folder(artifact.path)


def made_for(artifact: Artifact, model: ModelBlock) -> bool:
    """Whether the model is the one that the artifact was made for, by its name or its
    `config.json`."""
    made = artifact.manifest.model if artifact.manifest else None
    if made and made.config_sha256 and made.config_sha256 == model.config_sha256:
        return True
    base = made.id if made else artifact.base_model
    return base is not None and base.casefold() == model.id.casefold()


def _command(artifact: Artifact, settings: Mapping[str, object], changes: Mapping[str, str]) -> str:
    """The command that measures the same again; a file of the user is not named."""
    data = settings["data"] if settings["data"] in NAMES else "FILE"
    rest = {name: settings[name] for name in ("windows", "length", "answers")} | dict(changes)
    words = (f"--{name.replace('_', '-')} {value}" for name, value in rest.items())
    return " ".join(("oscar-zoo eval", artifact.label, f"--data {data}", *words))
