"""The files of one offered artifact: fetched in parallel, hashed, and verified before anybody may
use them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from oscar_zoo.artifact import signature_file
from oscar_zoo.artifact.files import MAX_ARTIFACT_BYTES, FileDigest, sha256_hex
from oscar_zoo.artifact.outcome import Verified, refuse
from oscar_zoo.errors import DigestMismatchError, MalformedFile
from oscar_zoo.registry.hubs.base import HubFile, Progress
from oscar_zoo.registry.hubs.threads import in_parallel
from oscar_zoo.registry.view import ResolvedArtifact

PARALLEL_FILES = 4


def fetch_files(resolved: ResolvedArtifact, progress: Progress | None = None) -> dict[str, bytes]:
    """The payload of `resolved`, every file as its hub lists it.

    A file that differs from the listing is fetched once more from the same hub, then refused.
    """
    if resolved.size > MAX_ARTIFACT_BYTES:
        raise MalformedFile(
            "file.size",
            f"{resolved.id} has {resolved.size} bytes, at most {MAX_ARTIFACT_BYTES} are fetched.",
        )
    calls = [partial(_fetch, resolved, file, progress) for file in resolved.files]
    bodies = (
        in_parallel(calls, workers=PARALLEL_FILES) if len(calls) > 1 else [call() for call in calls]
    )
    return {file.path: data for file, data in zip(resolved.files, bodies, strict=True)}


def fetch_signature(resolved: ResolvedArtifact) -> bytes | None:
    """The signature file of `resolved`, or `None` where its hub lists none."""
    file = resolved.signature
    if file is None:
        return None
    if file.size > signature_file.MAX_BYTES:
        raise MalformedFile(
            "file.size",
            f"{file.path} of {resolved.id} has {file.size:,} bytes, at most"
            f" {signature_file.MAX_BYTES:,} are read.",
        )
    return _fetch(resolved, file, None)


def verify_payload(resolved: ResolvedArtifact, payload: dict[str, bytes]) -> Verified:
    """Verify fetched files; raises `VerificationFailed` for anything but `Verified`."""
    from oscar_zoo.artifact.verify import (
        verify_files,
    )  # numpy: a pull of what is here already does without

    outcome = verify_files(
        payload,
        manifest=resolved.manifest,
        expected=_promised(resolved),
        geometry=resolved.geometry,
        name_hint=str(resolved.id),
    )
    if not isinstance(outcome, Verified):
        refuse(str(resolved.id), outcome)
    return outcome


def _fetch(resolved: ResolvedArtifact, file: HubFile, progress: Progress | None) -> bytes:
    hub = resolved.hub
    for _ in range(2):
        data = hub.fetch(resolved.id, file.path, limit=file.size, progress=progress)
        got = sha256_hex(data)
        if len(data) == file.size and file.sha256 in (None, got):
            return data
    want = file.sha256 or f"{file.size} bytes"
    seen = got if file.sha256 else f"{len(data)} bytes"
    raise DigestMismatchError.for_content(
        f"{file.path} of {resolved.id} on {hub.title}", want=want, got=seen
    )


def _promised(resolved: ResolvedArtifact) -> Sequence[FileDigest] | None:
    return resolved.packaged.file_digests if resolved.packaged else None
