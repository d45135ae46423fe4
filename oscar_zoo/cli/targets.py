"""What `PATH|NAME` on a command line means, for every command that takes one.

How it is written decides, never what happens to lie in the current folder: see
`artifact.names.is_path`. A file or folder of the same name is mentioned, in the error when there is
no such name, else in a note.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.names import Reference, is_path, path_text
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import InvalidName, NetworkError, NotFoundError, UsageError
from oscar_zoo.registry.verification import (
    Checked,
    check_installed,
    check_path,
    existing_path,
    model_geometry,
    namesake,
    suggest_path,
)


def artifact_name(text: str) -> Reference:
    """The reference that `text` is, for commands that take names only; raises `UsageError` for a
    path."""
    if is_path(text):
        raise UsageError(
            f"{text} is a path; this takes a name.", hint=f"oscar-zoo verify {shlex.quote(text)}"
        )
    return Reference.parse(text)


def model_folder(text: str) -> Path | None:
    """The folder that `text` names, if `text` is written as a path and the folder holds a model and
    no artifact."""
    return _model_folder(Path(text).expanduser()) if is_path(text) else None


def wanted_reference(text: str) -> Reference:
    """The artifact that `text` asks for: a name, or a folder with a model, whose name is meant;
    raises `UsageError`."""
    folder = model_folder(text)
    if folder is None:
        return artifact_name(text)
    from oscar_zoo.cli.models import choose_model

    return Reference(choose_model(folder).name)


@contextmanager
def looking_up(text: str) -> Iterator[None]:
    """While the name `text` is looked up: mention a file or folder of that name, in the error or in
    a note.

    Raises:
        OscarZooError: what the block raises, with another hint.
    """
    place = namesake(text)
    try:
        yield
    except (NotFoundError, NetworkError, InvalidName) as error:
        if place is not None:
            suggest_path(place, error)
        raise
    if place is not None:
        tell_namesake(place)


def tell_namesake(place: Path) -> None:
    """Note that a name was taken although `place` has the same one."""
    kind = "folder" if place.is_dir() else "file"
    tell(f"{place} is taken as a name; the {kind} of that name is {shlex.quote(path_text(place))}")


def model_namesake(text: str) -> Path | None:
    """The folder with a model that has the name `text`, for commands that take names and folders of
    models."""
    return None if is_path(text) else _model_folder(Path(text))


def tell(text: str) -> None:
    """A note for people, once per command line; none with `-q` or `--json`."""
    context = click.get_current_context(silent=True)
    if context is not None:
        told: set[str] = context.meta.setdefault("oscar_zoo.told", set())
        if text in told or context.params.get("quiet") or context.params.get("as_json"):
            return
        told.add(text)
    terminal.note(f"note: {text}")


def verify_targets(
    targets: Sequence[str], *, model: str | None, digest: str | None, strict: bool
) -> list[Checked]:
    """Verify every target; a tree gives one result per artifact in it.

    Raises:
        PathNotFound, ArtifactNotFound, UsageError: a target that means nothing.
    """
    from oscar_zoo.models.folder_geometry import geometry_of_folder

    geometry = model_geometry(model, geometry_of_folder) if model else None
    results: list[Checked] = []
    for text in targets:
        if is_path(text):
            results += check_path(
                existing_path(text), geometry=geometry, digest=digest, strict=strict
            )
        else:
            with looking_up(text):
                results.append(
                    check_installed(
                        Reference.parse(text), geometry=geometry, digest=digest, strict=strict
                    )
                )
    return results


def holds_model(path: Path) -> bool:
    """Whether `path` is a folder with a `config.json`."""
    return os.path.isfile(path / "config.json")  # noqa: PTH113 (any text: no errors)


def _model_folder(path: Path) -> Path | None:
    if not holds_model(path) or (path / FILE_NAME).exists():
        return None
    from oscar_zoo.artifact.verify import find_artifacts

    return None if find_artifacts(path) else path
