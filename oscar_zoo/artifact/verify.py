"""From bytes to one of five outcomes: the stages of verification in their order, until the first
failure.

Pure: it sees bytes in memory, the very bytes that are hashed, parsed and later served. Nothing here
trusts a name, a manifest or a file size. A stage returns what it found, or raises the reason why
the artifact must not be used; the outcome has one `Check` for each, also for those not reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from oscar_zoo.artifact import checks, pairing, statistics
from oscar_zoo.artifact.checks import Finding, over_cores
from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest
from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.manifest import (
    FILE_NAME,
    STATISTICS_NAME,
    SUFFIX,
    WIDTHS_NAME,
    FileRole,
    Manifest,
)
from oscar_zoo.artifact.outcome import (
    Check,
    DigestMismatch,
    Grade,
    Level,
    Outcome,
    Refused,
    Rejected,
    Unsupported,
    Verified,
    reject,
)
from oscar_zoo.artifact.pairing import PairSide
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import MalformedFile, UnsupportedFormat

PAYLOAD_SUFFIXES = (SUFFIX, ".safetensors", ".gguf")
_NO_WEIGHTS = (
    "not checked: no weights of a model are read; to measure with the model: oscar-zoo eval"
)


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
    outcome = _Verification(files, manifest, expected, geometry, name_hint, strict).run()
    listed = bool(expected) or manifest is not None or FILE_NAME in files
    if expected_digest is None or listed or not isinstance(outcome, Verified):
        return outcome
    seen = outcome.checks[0].detail.split(";")[0]
    checked = Check("bytes", "ok", f"{seen}; the digest is the expected one")
    return replace(outcome, checks=(checked, *outcome.checks[1:]))


def _compare_digest(name: str, files: Mapping[str, bytes], want: str) -> DigestMismatch | None:
    payload = [file_digest(name, data) for name, data in files.items() if name != FILE_NAME]
    got = artifact_digest(payload)
    of_one = "sha256:" + payload[0].sha256 if len(payload) == 1 else got
    if "sha256:" + want.removeprefix("sha256:") in (got, of_one):
        return None
    failed = Check("bytes", "failed", f"digest is {of_one}, expected {want}")
    return DigestMismatch(name, want, of_one, (failed,))


@contextmanager
def _of_file(path: str) -> Iterator[None]:
    """Make a refusal of what the reader of the file `path` refuses."""
    try:
        yield
    except UnsupportedFormat as error:
        raise Refused(Unsupported(error.reason, error.message)) from None
    except MalformedFile as error:
        reject(error.reason, error.message, path=path)


class _Verification:
    """One run over one artifact; arguments as of `verify_files`."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        manifest: Manifest | None,
        expected: Sequence[FileDigest] | None,
        geometry: Geometry | None,
        name_hint: str,
        strict: bool,
    ) -> None:
        self.files, self.manifest, self.expected = files, manifest, expected
        self.geometry, self.name_hint, self.strict = geometry, name_hint, strict
        self.sets: dict[str, RotationSet] = {}
        self.sides: dict[Role, PairSide] = {}
        self.grade: Grade = "fp64"
        self.level: Level = "structural"
        self.deferred: Refused | None = None
        digests = over_cores(lambda item: file_digest(*item), sorted(files.items()))
        self.digests = {found.path: found for found in digests}

    def run(self) -> Outcome:
        stages: dict[str, Callable[[], Finding]] = {
            "bytes": self.bytes,
            "container": self.container,
            "schema": self.schema,
            "numeric": lambda: self.each(self.numeric),
            "eigenvalues": lambda: self.each(checks.eigenvalues),
            "content": lambda: self.each(checks.content),
            "roles": lambda: pairing.roles(self.sides, self.manifest, strict=self.strict),
            "model": lambda: pairing.model(self.sides, self.known_geometry, self.manifest),
            "statistics": self.statistics,
            "localisation": self.localisation,
            "probe": lambda: Finding(_NO_WEIGHTS, checked=False),
        }
        done: list[Check] = []
        warnings: list[str] = []
        for stage, check in stages.items():
            try:
                found = check()
            except Refused as refused:
                done.append(Check(stage, "failed", _detail(refused.failure)))
                done += [
                    Check(name, "not checked", "not reached") for name in [*stages][len(done) :]
                ]
                failure = replace(refused.failure, checks=tuple(done))
                return replace(failure, stage=stage) if isinstance(failure, Rejected) else failure
            done.append(Check(stage, found.state, found.detail))
            warnings += found.warnings
        k, v = (self.sides[role].rotations if role in self.sides else None for role in ("k", "v"))
        if self.of_latents:
            v = k
        return Verified(
            level=self.level,
            grade=self.grade,
            warnings=tuple(dict.fromkeys(warnings)),
            checks=tuple(done),
            files=tuple(self.payload()),
            digest=artifact_digest(self.payload()),
            k=k,
            v=v,
            manifest=self.manifest,
        )

    def bytes(self) -> Finding:
        if self.manifest is None and FILE_NAME in self.files:
            with _of_file(FILE_NAME):
                self.manifest = Manifest.from_bytes(self.files[FILE_NAME])
        if self.manifest is not None:
            self.refuse_unlisted(self.manifest)
        elif WIDTHS_NAME in self.files:
            message = f"{WIDTHS_NAME} is there without {FILE_NAME}, whose recipe has these bits"
            reject("widths.no_manifest", message, path=WIDTHS_NAME)
        wanted = [*(self.expected or ()), *((self.manifest and self.manifest.file_digests) or ())]
        for entry in wanted:
            if entry.path not in self.files:
                _reject_absent(entry.path)
            got = self.digests[entry.path]
            for want, has in (
                (f"{entry.size} bytes", f"{got.size} bytes"),
                (f"sha256:{entry.sha256}", f"sha256:{got.sha256}"),
            ):
                if want != has:
                    raise Refused(DigestMismatch(entry.path, want, has))
        payload = self.payload()
        if self.expected is not None:
            known = {entry.path for entry in self.expected}
            for extra in sorted({entry.path for entry in payload} - known):
                message = f"{extra} is not among the files whose digests are known"
                reject("unlisted_file", message, path=extra)
        size, count = sum(entry.size for entry in payload), len(payload)
        summary = f"{count} file{'s' if count != 1 else ''}, {size:,} bytes"
        if not wanted:
            return Finding(f"{summary}; no digest is known to compare with", checked=False)
        return Finding(f"{summary}; as listed")

    def container(self) -> Finding:
        if self.manifest is not None and self.manifest.kind == "gguf":
            kind = self.manifest.kind
            raise Refused(Unsupported(kind, f"artifacts of kind {kind} cannot be served"))
        for path in self.rotation_paths():
            try:
                with _of_file(path):
                    self.sets[path] = read_rotation(self.files[path], what=path)
            except Refused as refused:
                code = refused.failure.code if isinstance(refused.failure, Rejected) else "file"
                if code.split(".")[0] in ("file", "zip", "pickle"):
                    raise
                self.deferred = self.deferred or refused
        return Finding("strict archive, all CRCs right, nothing to execute")

    def schema(self) -> Finding:
        if self.deferred is not None:
            raise self.deferred
        sets = sorted(self.sets.items())
        if not 1 <= len(sets) <= 2:
            message = f"{len(sets)} rotation files: {', '.join(sorted(self.sets))}"
            reject("ambiguous_pair", message)
        self.sides = pairing.assign([PairSide(name, x, self.label(name)) for name, x in sets])
        for side in self.sides.values():
            pairing.check_layers(side, self.known_geometry, strict=self.strict)
            self.refuse_other_manifest(side)
        first = next(iter(self.sides.values())).rotations
        heads = f" x {first.num_kv_heads} heads" if first.num_kv_heads else ""
        shape = f"{len(first.layers)} layers{heads} x {first.head_dim}"
        return Finding(f"{shape}, float32, format_version {first.format_version}")

    def numeric(self, rotations: RotationSet) -> Finding:
        found, grade = checks.numeric(rotations)
        self.grade = "fp32" if grade == "fp32" else self.grade
        self.level = "numeric"
        return found

    def statistics(self) -> Finding:
        block = self.manifest.statistics if self.manifest is not None else None
        name = block.file if block is not None else STATISTICS_NAME
        if name not in self.files:
            if block is not None:
                reject("statistics.missing", f"{name} is absent", path=name)
            return Finding("not checked: no statistics in this artifact", checked=False)
        if self.manifest is None:
            return Finding("not checked: without a manifest the model is not known", checked=False)
        with _of_file(name):
            fingerprint = statistics.read_fingerprint(self.files[name], what=name)
        identity = self.manifest.model.id, self.manifest.model.revision
        found = []
        for side in self.sides.values():
            one = statistics.compare(side.rotations, fingerprint, *identity)
            wush = statistics.compare_wush(side.rotations, fingerprint, self.manifest)
            results = [one] if one else wush
            if results is None:
                objective = side.rotations.objective
                detail = f"not checked: {objective} has no matrix in these statistics"
                return Finding(detail, checked=False)
            for result in results:
                if result.worst > statistics.LIMIT:
                    head = "" if result.head is None else f", KV head {result.head}"
                    reject(
                        "statistics.mismatch",
                        f"the file is not made from the recorded {result.matrix}: relative error"
                        f" {result.worst:.1e} at layer {result.layer}{head}",
                        path=side.path,
                        layer=result.layer,
                        head=result.head,
                        measured=result.worst,
                        limit=statistics.LIMIT,
                    )
                found.append(f"{result.matrix} {result.worst:.1e}")
        self.level = "statistics"
        return Finding(f"relative error {', '.join(found)}")

    def localisation(self) -> Finding:
        if self.of_latents:
            return Finding("not checked: only for rotations of heads", checked=False)
        return checks.localisation({role: side.rotations for role, side in self.sides.items()})

    @property
    def of_latents(self) -> bool:
        return self.manifest is not None and self.manifest.kind == "mla_latent"

    @property
    def known_geometry(self) -> Geometry | None:
        told = None if self.manifest is None else self.manifest.model.geometry
        return self.geometry or told

    def payload(self) -> list[FileDigest]:
        if self.manifest is not None:
            names = [entry.path for entry in self.manifest.files]
        else:
            names = [*self.rotation_paths(), *({STATISTICS_NAME} & self.files.keys())]
        return [self.digests[name] for name in sorted(names)]

    def rotation_paths(self) -> list[str]:
        if self.manifest is not None:
            roles: tuple[FileRole, ...] = ("k_rotation", "v_rotation", "latent_rotation")
            listed = [self.manifest.file(role) for role in roles]
            return [entry.path for entry in listed if entry and entry.path in self.files]
        others = (FILE_NAME, STATISTICS_NAME, WIDTHS_NAME)
        names = [name for name in sorted(self.files) if name not in others]
        return [name for name in names if name.endswith(SUFFIX)] or names

    def refuse_unlisted(self, manifest: Manifest) -> None:
        listed = {entry.path for entry in manifest.files}
        for name in sorted(listed - self.files.keys()):
            _reject_absent(name)
        for name in sorted(self.files.keys() - listed):
            if name.endswith(PAYLOAD_SUFFIXES) or name == WIDTHS_NAME:
                reject("unlisted_file", f"{name} is not in the manifest", path=name)

    def label(self, path: str) -> Role | None:
        if self.manifest is not None:
            entry = self.manifest.file("v_rotation")
            return "v" if entry is not None and entry.path == path else "k"
        return pairing.role_of_name(path) or pairing.role_of_name(self.name_hint)

    def refuse_other_manifest(self, side: PairSide) -> None:
        """Refuse a manifest that describes the file wrongly."""
        if self.manifest is None:
            return
        said = self.manifest.transform.k if side.label == "k" else self.manifest.transform.v
        claims = (
            ("format_version", self.manifest.format_version, side.rotations.format_version),
            ("grouping", self.manifest.grouping, side.rotations.grouping),
            ("orthogonal", said.orthogonal, side.rotations.orthogonal),
            ("centered", said.centered, side.rotations.centered),
        )
        for word, theirs, ours in claims:
            if theirs != ours:
                message = f"the manifest says {word} {theirs}, the file {ours}"
                reject(f"manifest.{word}", message, path=side.path)
        if missing := set(side.rotations.requires) - set(self.manifest.recipe.requires):
            message = f"recipe.requires lacks {', '.join(sorted(missing))}"
            reject("manifest.requires", message, path=side.path)

    def each(self, check: Callable[[RotationSet], Finding]) -> Finding:
        """Both sides in one line; said once where both say the same."""
        found: dict[Role, Finding] = {}
        for role, side in self.sides.items():
            try:
                found[role] = check(side.rotations)
            except Refused as refused:
                assert isinstance(refused.failure, Rejected)
                raise Refused(replace(refused.failure, path=side.path)) from None
        details = {one.detail for one in found.values()}
        if len(details) > 1:
            details = {"; ".join(f"{role.upper()} {one.detail}" for role, one in found.items())}
        return Finding(details.pop(), tuple(x for one in found.values() for x in one.warnings))


def _reject_absent(path: str) -> NoReturn:
    reject("missing_file", f"{path} is listed and absent", path=path)


def _detail(failure: DigestMismatch | Rejected | Unsupported) -> str:
    if isinstance(failure, DigestMismatch):
        return f"{failure.path} is {failure.got}, expected {failure.want}"
    return failure.reason if isinstance(failure, Unsupported) else failure.message
