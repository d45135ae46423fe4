"""From bytes to one of five outcomes: the stages of verification, until the first failure.

Pure: it sees bytes in memory, the very bytes that are hashed, parsed and later served. Nothing here
trusts a name, a manifest or a file size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from oscar_zoo.artifact.digest import FileDigest, artifact_digest, file_digest
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.outcome import (
    Check,
    DigestMismatch,
    Outcome,
    Verified,
)
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.artifact.stages import Verification


def verify_files(
    files: Mapping[str, bytes],
    *,
    manifest: Manifest | None = None,
    expected: Sequence[FileDigest] | None = None,
    expected_digest: str | None = None,
    geometry: Geometry | None = None,
    name_hint: str = "",
    what: str = "the artifact",
    strict: bool = False,
) -> Outcome:
    """Verify an artifact, or one rotation file, whose bytes are in memory.

    Args:
        files: relative POSIX path -> content. `oscar.json` is the manifest unless `manifest` is
            given.
        expected: digests from a lock or an index; every one of them is compared, and there must be
            no other file.
        expected_digest: digest of the artifact, or sha256 of the one file; `sha256:` may be left
            out.
        geometry: of the model; names the attention layers of hybrid models and is checked against
            the manifest.
        name_hint: original name of a single file, where `files` calls it something else.
    """
    if expected_digest is not None and (mismatch := _compare_digest(what, files, expected_digest)):
        return mismatch
    outcome = Verification(files, manifest, expected, geometry, name_hint, strict).run()
    listed = bool(expected) or manifest is not None or FILE_NAME in files
    if expected_digest is None or listed or not isinstance(outcome, Verified):
        return outcome
    checked = Check(
        "bytes", "ok", f"{outcome.checks[0].detail.split(';')[0]}; the digest is the expected one"
    )
    return replace(outcome, checks=(checked, *outcome.checks[1:]))


def _compare_digest(name: str, files: Mapping[str, bytes], want: str) -> DigestMismatch | None:
    payload = [file_digest(name, data) for name, data in files.items() if name != FILE_NAME]
    got = artifact_digest(payload)
    accepted = {got} | ({"sha256:" + payload[0].sha256} if len(payload) == 1 else set())
    if "sha256:" + want.removeprefix("sha256:") in accepted:
        return None
    shown = min(accepted - {got}, default=got)
    return DigestMismatch(
        name, want, shown, (Check("bytes", "failed", f"digest is {shown}, expected {want}"),)
    )
