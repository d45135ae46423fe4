"""Publish an artifact folder on hubs, as a version that never changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.report.page import HEAD
from oscar_zoo.errors import PathNotFound, UsageError
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry import publish as registry
from oscar_zoo.registry import score_file
from oscar_zoo.registry.catalog import can_be_found
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.publish import Publishable, PublishResult, Shown, check_quality
from oscar_zoo.registry.signing_key import VARIABLE as SIGN_VARIABLE
from oscar_zoo.registry.signing_key import SigningKey
from oscar_zoo.registry.writing import WriteReport, Written, ignore, writable_hubs, write_to_each

_LEAST_PARAMETERS = 100_000_000
"""Smaller models are not asked whole questions: perplexity and recall say more about them."""


@dataclass(frozen=True)
class PublishRequest:
    """What to publish, and where.

    Attributes:
        folder: rotation files and their `oscar.json`.
        hubs: where to, in order, as people write hubs; without any, see `writing.writable_hubs`.
        create: create a repository or a folder that is not there.
        propose: open a pull request instead of committing.
        aliases: other names of exactly this artifact.
        scores: score files to attach beside `scores.json` of the folder, if it has one.
        allow_warnings: publish although verification has warnings.
        allow_poor: publish although perplexity is more than 5 % above BF16; the index says so.
        unmeasured: publish although perplexity or recall was not measured; the index says so.
        dry_run: send nothing; the plan of each result says what would be sent.
        sign: refuse to publish without a key for artifact and index; with one, both are signed.
    """

    folder: Path
    hubs: tuple[str, ...] = ()
    create: bool = False
    propose: bool = False
    aliases: tuple[str, ...] = ()
    scores: tuple[Path, ...] = ()
    allow_warnings: bool = False
    allow_poor: bool = False
    unmeasured: bool = False
    dry_run: bool = False
    sign: bool = False


def publish_all(
    request: PublishRequest,
    observer: Observer = SILENT,
    told: Callable[[Written[PublishResult]], None] = ignore,
) -> WriteReport[PublishResult]:
    """Read and verify the folder once, and publish it on one hub after the other."""
    folder = request.folder
    if folder.is_file():
        raise UsageError(
            f"{path_text(folder)} is a file, not an artifact folder.",
            hint="give the folder that holds it",
        )
    if not folder.is_dir():
        raise PathNotFound.for_path(path_text(folder), "artifact folder")

    key = SigningKey.configured()
    if request.sign and key is None:
        raise UsageError("no key to sign with is named.", hint=f"export {SIGN_VARIABLE}=zoo.pem")
    hubs = writable_hubs(request.hubs)
    made = Publishable.read(folder, allow_warnings=request.allow_warnings, aliases=request.aliases)
    made = _past_gate(_with_scores(made, folder, request.scores), request)
    made = made if key is None else made.signed(key)
    made = _with_report(made, folder, observer)

    def write(hub: Hub) -> PublishResult:
        return registry.publish(
            made, hub, create=request.create, propose=request.propose, dry_run=request.dry_run
        )

    report = write_to_each(hubs, write, "Publishing to", observer, told)
    shown = Shown.by(made)
    asked_for = not (shown.gpqa or shown.imported or made.accepted)
    if report.error is None and asked_for and _may_answer(made.manifest.model.geometry):
        text = f"no GPQA was measured, which is recommended: {_measure(made, folder)}"
        observer.note(Note("publish.gpqa", f"{text} --task gpqa_diamond"))
    return report


def _may_answer(geometry: Geometry) -> bool:
    """Whether a model of this shape is large enough for questions of a benchmark. It has about
    twelve numbers for every layer and pair of channels."""
    channels = geometry.num_q_heads * geometry.head_dim
    return 12 * geometry.num_layers * channels**2 >= _LEAST_PARAMETERS


def _with_scores(made: Publishable, folder: Path, files: Sequence[Path]) -> Publishable:
    """The artifact with the scores of the folder's own score file and of `files`."""
    own = score_file.in_folder(folder)
    for path in ([own] if own.exists() else []) + [*files]:
        made = made.with_scores(score_file.load(path), what=path_text(path))
    return made


def _with_report(made: Publishable, folder: Path, observer: Observer) -> Publishable:
    """The artifact with the page that `compute` left beside its folder, if that is about these
    bytes and can run nothing."""
    place = folder.resolve()
    path = place.with_name(f"{place.name}.report.html")
    if not path.is_file():
        return made
    page = read_file(path)
    if page.startswith(HEAD.encode()) and made.verified.digest.encode() in page:
        return replace(made, report=page)
    again = f"oscar-zoo plot {quote(path_text(folder))}.report.json --output {quote(str(path))}"
    text = f"{path.name} is left out: it is no report of this artifact. Draw it again: {again}"
    observer.note(Note("publish.report", text))
    return made


def _past_gate(made: Publishable, request: PublishRequest) -> Publishable:
    """The artifact with what is accepted about its quality; raises `UsageError` for any other."""
    accepted = check_quality(
        made,
        _measure(made, request.folder),
        allow_poor=request.allow_poor,
        unmeasured=request.unmeasured,
    )
    return replace(made, accepted=accepted)


def _measure(made: Publishable, folder: Path) -> str:
    """The command that measures the artifact in `folder`."""
    model = "" if can_be_found(made.manifest.model.id) else " --model FOLDER"
    return f"oscar-zoo eval {quote(path_text(folder))}{model}"


def publish(
    folder: str | Path,
    *,
    hub: str | None = None,
    create: bool = False,
    propose: bool = False,
    aliases: Sequence[str] = (),
    scores: Sequence[str | Path] = (),
    allow_warnings: bool = False,
    allow_poor: bool = False,
    unmeasured: bool = False,
    dry_run: bool = False,
) -> PublishResult:
    """Verify an artifact folder strictly and publish it as a version that never changes.

    Args:
        folder: rotation files and their `oscar.json`.
        hub: where to; default the zoo of this user.
        create: create a repository that is not there.
        propose: open a pull request instead.
        aliases: other names of exactly this artifact.
        scores: score files to attach beside `scores.json` of the folder, if it has one.
        allow_warnings: publish although verification has warnings.
        allow_poor: publish although perplexity is more than 5 % above BF16; the index says so.
        unmeasured: publish although perplexity or recall was not measured; the index says so.
        dry_run: send nothing; `result.plan` says what would be sent.

    Raises:
        UsageError: perplexity or recall was not measured under the recipe, or is poor.
        VersionExists: the version exists with other content.
        VerificationFailed: the artifact must not be used.
        NetworkError: no answer; publishing the same again is safe.
    """
    report = publish_all(
        PublishRequest(
            Path(folder),
            (hub,) if hub else (),
            create=create,
            propose=propose,
            aliases=tuple(aliases),
            scores=tuple(map(Path, scores)),
            allow_warnings=allow_warnings,
            allow_poor=allow_poor,
            unmeasured=unmeasured,
            dry_run=dry_run,
        )
    )
    return report.done[0].result
