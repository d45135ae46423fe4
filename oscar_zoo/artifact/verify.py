"""From bytes to one of five outcomes: the stages of verification in their order, until the first
failure.

Pure: it sees bytes in memory, the very bytes that are hashed, parsed and later served. Nothing here
trusts a name, a manifest or a file size. A stage returns what it found, or the reason why the
artifact must not be used; the outcome has one `Check` for each, also for those not reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from oscar_zoo.artifact import checks, pairing, statistics
from oscar_zoo.artifact.checks import CheckFinding, Problem, over_cores
from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest
from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.manifest import (
    FILE_NAME,
    STATISTICS_NAME,
    SUFFIX,
    WIDTHS_NAME,
    Manifest,
)
from oscar_zoo.artifact.outcome import (
    Check,
    DigestMismatch,
    Grade,
    Level,
    Outcome,
    Rejected,
    Unsupported,
    Verified,
)
from oscar_zoo.artifact.pairing import PairSide
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import MalformedFile, UnsupportedFormat

PAYLOAD_SUFFIXES = (SUFFIX, ".safetensors", ".gguf")
_NO_WEIGHTS = (
    "not checked: no weights of a model are read; to measure with the model: oscar-zoo eval"
)
_NO_STATISTICS = "not checked: no statistics in this artifact"


_Result = CheckFinding | Problem | DigestMismatch | Unsupported
_ROLES: tuple[Role, ...] = ("k", "v")


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


@dataclass
class Verification:
    """One run over one artifact; arguments as in `verify.verify_files`."""

    files: Mapping[str, bytes]
    manifest: Manifest | None
    expected: Sequence[FileDigest] | None
    geometry: Geometry | None
    name_hint: str
    strict: bool
    sets: dict[str, RotationSet] = field(default_factory=dict)
    sides: dict[Role, PairSide] = field(default_factory=dict)
    grade: Grade = "fp64"
    level: Level = "structural"
    digests: dict[str, FileDigest] = field(default_factory=dict)
    deferred: Problem | None = None

    def run(self) -> Outcome:
        """Run the stages."""
        stages: tuple[tuple[str, Callable[[], _Result]], ...] = (
            ("bytes", self.bytes),
            ("container", self.container),
            ("schema", self.schema),
            ("numeric", self.numeric),
            ("eigenvalues", lambda: self.each(checks.eigenvalues)),
            ("content", lambda: self.each(checks.content)),
            ("roles", lambda: pairing.roles(self.sides, self.manifest, strict=self.strict)),
            ("model", lambda: pairing.model(self.sides, self.known_geometry, self.manifest)),
            ("statistics", self.statistics),
            ("localisation", self.localisation),
            ("probe", lambda: CheckFinding(_NO_WEIGHTS, "not checked")),
        )
        digests = over_cores(lambda item: file_digest(*item), sorted(self.files.items()))
        self.digests = {found.path: found for found in digests}
        done: list[Check] = []
        warnings: list[str] = []
        for position, (stage, check) in enumerate(stages):
            result = check()
            if isinstance(result, CheckFinding):
                done.append(Check(stage, result.state, result.detail))
                warnings += result.warnings
                continue
            done.append(Check(stage, "failed", _detail(result)))
            rest = tuple(
                Check(name, "not checked", "not reached") for name, _ in stages[position + 1 :]
            )
            return _failed(stage, result, (*done, *rest))
        side = {role: self.sides[role].rotations if role in self.sides else None for role in _ROLES}
        return Verified(
            level=self.level,
            grade=self.grade,
            warnings=tuple(dict.fromkeys(warnings)),
            checks=tuple(done),
            files=tuple(self.payload()),
            digest=artifact_digest(self.payload()),
            k=side["k"],
            v=side["v"],
            manifest=self.manifest,
        )

    def bytes(self) -> _Result:
        if self.manifest is None and FILE_NAME in self.files:
            try:
                self.manifest = Manifest.from_bytes(self.files[FILE_NAME])
            except MalformedFile as error:
                return Problem(error.reason, error.message, path=FILE_NAME)
        if self.manifest is not None and (problem := self.unlisted(self.manifest)):
            return problem
        if self.manifest is None and WIDTHS_NAME in self.files:
            message = f"{WIDTHS_NAME} is there without {FILE_NAME}, whose recipe has these bits"
            return Problem("widths.no_manifest", message, path=WIDTHS_NAME)
        wanted = [*(self.expected or ()), *((self.manifest and self.manifest.file_digests) or ())]
        for entry in wanted:
            if entry.path not in self.files:
                return _absent(entry.path)
            got = self.digests[entry.path]
            if got.size != entry.size:
                return DigestMismatch(entry.path, f"{entry.size} bytes", f"{got.size} bytes")
            if got.sha256 != entry.sha256:
                return DigestMismatch(entry.path, f"sha256:{entry.sha256}", f"sha256:{got.sha256}")
        if self.expected is not None:
            known = {entry.path for entry in self.expected}
            for extra in sorted({entry.path for entry in self.payload()} - known):
                message = f"{extra} is not among the files whose digests are known"
                return Problem("unlisted_file", message, path=extra)
        size = sum(entry.size for entry in self.payload())
        count = len(self.payload())
        summary = f"{count} file{'s' if count != 1 else ''}, {size:,} bytes"
        if not wanted:
            return CheckFinding(f"{summary}; no digest is known to compare with", "not checked")
        return CheckFinding(f"{summary}; as listed")

    def container(self) -> _Result:
        if self.manifest is not None and self.manifest.kind != "rotation_pair":
            kind = self.manifest.kind
            return Unsupported(kind, f"artifacts of kind {kind} cannot be served")
        for path in self.rotation_paths():
            try:
                self.sets[path] = read_rotation(self.files[path], what=path)
            except UnsupportedFormat as error:
                return Unsupported(error.reason, error.message)
            except MalformedFile as error:
                problem = Problem(error.reason, error.message, path=path)
                if error.reason.split(".")[0] in ("file", "zip", "pickle"):
                    return problem
                self.deferred = self.deferred or problem
        return CheckFinding("strict archive, all CRCs right, nothing to execute")

    def schema(self) -> _Result:
        if self.deferred is not None:
            return self.deferred
        sets = sorted(self.sets.items())
        if not 1 <= len(sets) <= 2:
            message = f"{len(sets)} rotation files: {', '.join(sorted(self.sets))}"
            return Problem("ambiguous_pair", message)
        self.sides = pairing.assign([PairSide(name, x, self.label(name)) for name, x in sets])
        for side in self.sides.values():
            uncovered = pairing.layer_set(side, self.known_geometry, strict=self.strict)
            if problem := uncovered or self.disagrees(side):
                return problem
        first = next(iter(self.sides.values())).rotations
        heads = f" x {first.num_kv_heads} heads" if first.num_kv_heads else ""
        shape = f"{len(first.layers)} layers{heads} x {first.head_dim}"
        return CheckFinding(f"{shape}, float32, format_version {first.format_version}")

    def numeric(self) -> _Result:
        findings = []
        for side in self.sides.values():
            result = checks.numeric(side.rotations)
            if isinstance(result, Problem):
                return result.at(side.path)
            findings.append(result[0])
            self.grade = "fp32" if "fp32" in (self.grade, result[1]) else "fp64"
        self.level = "numeric"
        return self.joined(findings)

    def statistics(self) -> _Result:
        block = self.manifest.statistics if self.manifest is not None else None
        name = block.file if block is not None else STATISTICS_NAME
        if name not in self.files and block is not None:
            return Problem("statistics.missing", f"{name} is absent", path=name)
        if name not in self.files:
            return _unchecked()
        if self.manifest is None:
            return _unchecked("not checked: without a manifest the model is not known")
        try:
            fingerprint = statistics.read_fingerprint(self.files[name], what=name)
        except MalformedFile as error:
            return Problem(error.reason, error.message, path=name)
        identity = (self.manifest.model.id, self.manifest.model.revision)
        found = []
        for side in self.sides.values():
            one = statistics.compare(side.rotations, fingerprint, *identity)
            both = one or statistics.compare_wush(side.rotations, fingerprint, self.manifest)
            if both is None:
                objective = side.rotations.objective
                return _unchecked(f"not checked: {objective} has no matrix in these statistics")
            results = both if isinstance(both, list) else [both]
            for result in results:
                if result.worst > statistics.LIMIT:
                    return _mismatch(side, result)
                found.append(f"{result.matrix} {result.worst:.1e}")
        self.level = "statistics"
        return CheckFinding(f"relative error {', '.join(found)}")

    def localisation(self) -> _Result:
        return checks.localisation({role: side.rotations for role, side in self.sides.items()})

    @property
    def known_geometry(self) -> Geometry | None:
        told = None if self.manifest is None else self.manifest.model.geometry
        return self.geometry or told

    def payload(self) -> list[FileDigest]:
        if self.manifest is not None:
            names = sorted(entry.path for entry in self.manifest.files)
        else:
            names = [*self.rotation_paths(), *({STATISTICS_NAME} & self.files.keys())]
        return [self.digests[name] for name in sorted(names)]

    def rotation_paths(self) -> list[str]:
        if self.manifest is not None:
            listed = [self.manifest.file("k_rotation"), self.manifest.file("v_rotation")]
            return [entry.path for entry in listed if entry and entry.path in self.files]
        others = (FILE_NAME, STATISTICS_NAME, WIDTHS_NAME)
        names = [name for name in sorted(self.files) if name not in others]
        return [name for name in names if name.endswith(SUFFIX)] or names

    def unlisted(self, manifest: Manifest) -> Problem | None:
        listed = {entry.path for entry in manifest.files}
        for name in sorted(listed - self.files.keys()):
            return _absent(name)
        for name in sorted(self.files.keys() - listed):
            if name.endswith(PAYLOAD_SUFFIXES) or name == WIDTHS_NAME:
                return Problem("unlisted_file", f"{name} is not in the manifest", path=name)
        return None

    def label(self, path: str) -> Role | None:
        if self.manifest is not None:
            entry = self.manifest.file("k_rotation")
            return "k" if entry is not None and entry.path == path else "v"
        return pairing.role_of_name(path) or pairing.role_of_name(self.name_hint)

    def disagrees(self, side: PairSide) -> Problem | None:
        """Where the manifest describes the file wrongly."""
        if self.manifest is None:
            return None
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
                return Problem(f"manifest.{word}", message, path=side.path)
        if missing := set(side.rotations.requires) - set(self.manifest.recipe.requires):
            message = f"recipe.requires lacks {', '.join(sorted(missing))}"
            return Problem("manifest.requires", message, path=side.path)
        return None

    def each(self, check: Callable[[RotationSet], CheckFinding | Problem]) -> _Result:
        findings = []
        for side in self.sides.values():
            result = check(side.rotations)
            if isinstance(result, Problem):
                return result.at(side.path)
            findings.append(result)
        return self.joined(findings)

    def joined(self, findings: Sequence[CheckFinding]) -> CheckFinding:
        """One line for both sides; said once where both say the same."""
        if len({finding.detail for finding in findings}) == 1:
            detail = findings[0].detail
        else:
            detail = "; ".join(
                f"{role.upper()} {f.detail}" for role, f in zip(self.sides, findings, strict=True)
            )
        warnings = tuple(code for finding in findings for code in finding.warnings)
        return CheckFinding(detail, "warning" if warnings else "ok", warnings)


def _absent(path: str) -> Problem:
    return Problem("missing_file", f"{path} is listed and absent", path=path)


def _unchecked(detail: str = _NO_STATISTICS) -> CheckFinding:
    return CheckFinding(detail, "not checked")


def _mismatch(side: PairSide, found: statistics.FingerprintMatch) -> Problem:
    place = f"layer {found.layer}" + (f", KV head {found.head}" if found.head is not None else "")
    return Problem(
        "statistics.mismatch",
        f"the file is not made from the recorded {found.matrix}: relative error {found.worst:.1e}"
        f" at {place}",
        path=side.path,
        layer=found.layer,
        head=found.head,
        measured=found.worst,
        limit=statistics.LIMIT,
    )


def _detail(result: Problem | DigestMismatch | Unsupported) -> str:
    if isinstance(result, DigestMismatch):
        return f"{result.path} is {result.got}, expected {result.want}"
    return result.reason if isinstance(result, Unsupported) else result.message


def _failed(
    stage: str, result: Problem | DigestMismatch | Unsupported, done: tuple[Check, ...]
) -> Outcome:
    if isinstance(result, DigestMismatch):
        return DigestMismatch(result.path, result.want, result.got, done)
    if isinstance(result, Unsupported):
        return Unsupported(result.kind, result.reason, done)
    return rejected(stage, result, done)


def rejected(stage: str, problem: Problem, done: tuple[Check, ...]) -> Rejected:
    """The outcome of a problem, which has its other fields."""
    return Rejected(stage, checks=done, **vars(problem))
