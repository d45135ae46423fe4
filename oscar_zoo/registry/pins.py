"""Digests seen before: the project's `oscar-zoo.lock` and the user's `known_artifacts.json`.

Both are JSON files of the same shape, replaced as a whole and never edited in place. A pin names
every byte that may be used under an id: the payload by `digest`, `oscar.json` by its own sha256,
which the digest does not cover.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from oscar_zoo import paths
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.specs import Document, Hex64, Text
from oscar_zoo.errors import AmbiguousName, PathNotFound, malformed_hint
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.index import Listed

SCHEMA: Literal["oscar-zoo.lock/1"] = "oscar-zoo.lock/1"
LOCK_NAME = "oscar-zoo.lock"
KNOWN_NAME = "known_artifacts.json"
REPOSITORY = (".git", ".hg")
"""What the root of a repository has; that of a project may have `PROJECT` besides."""
PROJECT = ("pyproject.toml",)

Source = Literal["index", "manifest", "listing", "content", "computed"]
"""Who promised the digest: an index, `oscar.json`, a hub's listing, or nobody (trust on first use
of the bytes)."""


class Pin(Listed):
    """One artifact as it was first used: `first_seen` (RFC 3339 UTC) on `hub`, at the commit
    `revision` where it has any; `source` says who promised the digest."""

    hub: Text
    revision: Text | None
    first_seen: Text
    source: Source

    def same_bytes(self, digest: str, manifest_sha256: str | None) -> bool:
        return (self.digest, self.manifest_sha256) == (digest, manifest_sha256)


class Pins(Document):
    """The content of a lock file, with the highest index serial seen of each hub, and the
    fingerprint of the key that signs its index."""

    NAME, CODE, MAX_BYTES = LOCK_NAME, "lock", 16 << 20
    REMEDY = "move it away; digests that were seen before are then forgotten"
    schema_: Literal["oscar-zoo.lock/1"] = Field(alias="schema")
    artifacts: tuple[Pin, ...] = ()
    serials: dict[str, Annotated[int, Field(ge=0, lt=1 << 53)]] = Field(default_factory=dict)
    keys: dict[str, Hex64] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        keys = [pin.artifact_id.key for pin in self.artifacts]
        if len(set(keys)) != len(keys):
            raise ValueError("an artifact is pinned twice")
        return self

    @classmethod
    def empty(cls) -> Self:
        return cls(schema=SCHEMA)

    def to_json(self) -> dict[str, Any]:
        value = super().to_json()
        return {name: said for name, said in value.items() if said or name == "artifacts"}

    def pin(self, artifact: ArtifactId) -> Pin | None:
        return next((pin for pin in self.artifacts if pin.artifact_id.key == artifact.key), None)

    def find(self, reference: Reference, model: str | None, default_tag: str | None) -> Pin | None:
        folder = (reference.name.rsplit("/", 1)[-1] if model is None else model).casefold()
        found = [p for p in self.artifacts if _means(p, reference, folder)]
        if len(found) > 1 and default_tag is not None:
            tag = default_tag.casefold()
            found = [p for p in found if p.artifact_id.tag.casefold() == tag] or found
        if len(found) > 1:
            raise AmbiguousName.for_name(str(reference), [p.artifact_id.reference for p in found])
        return found[0] if found else None

    def key_of(self, hub: str) -> str | None:
        found = (mark for name, mark in self.keys.items() if same_hub(name, hub))
        return self.keys.get(hub) or next(found, None)

    def with_pin(self, pin: Pin) -> Pins:
        """These pins and `pin`; an older one of the same id goes, unless it has the same bytes."""
        old = self.pin(pin.artifact_id)
        if old is not None and old.same_bytes(pin.digest, pin.manifest_sha256):
            return self
        others = [p for p in self.artifacts if p.artifact_id.key != pin.artifact_id.key]
        ordered = tuple(sorted([*others, pin], key=lambda p: p.artifact_id.key))
        return self.model_copy(update={"artifacts": ordered})

    def seen_from(self, folder: Path, *, absolute: bool = False) -> Pins:
        """These pins with hubs in folders as seen from `folder`, where the two have a parent in
        common; or all `absolute` again."""

        def named(hub: str) -> str:
            whole = os.path.normpath(folder / hub.removeprefix("file:"))
            near = whole if absolute else os.path.relpath(whole, folder)
            found = f"file:{whole if near.endswith(whole) else near}"
            return found if hub.startswith("file:") else hub

        moved = (p.model_copy(update={"hub": named(p.hub)}) for p in self.artifacts)
        return self.model_copy(update={"artifacts": tuple(moved)})

    def with_index(self, hub: str, serial: int, key: str | None) -> Pins:
        """These pins, and what is known of the index that `hub` offered: its serial, where it is
        not 0, and the fingerprint of the key that signed it."""
        serials = dict(sorted((self.serials | ({hub: serial} if serial else {})).items()))
        keys = dict(sorted((self.keys | ({} if key is None else {hub: key})).items()))
        return self.model_copy(update={"serials": serials, "keys": keys})


class PinFile:
    """The pins in the file `path`, which the first change creates."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @classmethod
    def known(cls) -> Self:
        return cls(paths.state_dir() / KNOWN_NAME)

    @classmethod
    def of_project(cls, folder: Path | None = None) -> Self:
        """The nearest `oscar-zoo.lock` from `folder` up to the root of its repository; where there
        is none, the one that a project gets in its root."""
        start = (folder or Path.cwd()).absolute()
        for place in (start, *start.parents):
            if (place / LOCK_NAME).is_file():
                return cls(place / LOCK_NAME)
            if any((place / name).exists() for name in REPOSITORY) or place == _home():
                break
        return cls((project_root(start) or start) / LOCK_NAME)

    def read(self) -> Pins:
        is_lock = self.path.name == LOCK_NAME
        remedy = "restore it from your repository" if is_lock else Pins.REMEDY
        with malformed_hint(remedy):
            try:
                data = read_file(self.path, max_bytes=Pins.MAX_BYTES)
            except PathNotFound:
                return Pins.empty()
        found = Pins.from_bytes(data, what=str(self.path), remedy=remedy)
        return found.seen_from(self.path.parent, absolute=True) if is_lock else found

    def update(self, change: Callable[[Pins], Pins]) -> None:
        """Replace the file by what `change` makes of it, if that is something else."""
        with (
            durable.storage_errors(f"cannot write {self.path}"),
            durable.held(str(self.path), timeout=30),
        ):
            before = self.read()
            after = change(before)
            if after == before:
                return
            if self.path.name == LOCK_NAME:  # committed, and read on other machines
                after = after.seen_from(self.path.parent)
            durable.make_folders(self.path.parent)
            durable.replace_file(self.path, after.to_bytes())


def project_root(folder: Path | None = None) -> Path | None:
    """The nearest folder from `folder` upwards that is a project, or `None`: a home folder and `/`
    are none."""
    start = (folder or Path.cwd()).absolute()
    for place in (start, *start.parents):
        if place == _home() or place == place.parent:
            return None
        if any((place / name).exists() for name in (*REPOSITORY, *PROJECT)):
            return place
    return None


def _home() -> Path:
    return Path(os.path.expanduser("~"))  # noqa: PTH111  (Path.home raises where there is none)


def same_hub(one: str, two: str) -> bool:
    """Whether two names mean one hub, whatever revision was asked for."""
    named = (h.partition("@")[0].casefold() if address.is_remote(h) else h for h in (one, two))
    return len(set(named)) == 1


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _means(pin: Pin, reference: Reference, folder: str) -> bool:
    artifact = pin.artifact_id
    if artifact.key == reference.name.casefold():
        return True
    tagged = reference.tag is None or artifact.tag.casefold() == reference.tag.casefold()
    digested = pin.digest.startswith(reference.digest or "")
    return artifact.model.casefold() == folder and tagged and digested
