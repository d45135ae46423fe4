"""What `pull` is asked for, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.app.arguments import command_line, option_words
from oscar_zoo.app.compute_plan import ComputePlan
from oscar_zoo.app.compute_wish import ComputeWish
from oscar_zoo.errors import OscarZooError, UsageError
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.hubs.base import HubFile
from oscar_zoo.registry.pins import PinFile, project_root
from oscar_zoo.registry.pull import PullResult
from oscar_zoo.registry.signatures import SignatureWish
from oscar_zoo.registry.targets import ModelTarget, NameTarget
from oscar_zoo.registry.trust import Trust

if TYPE_CHECKING:
    from oscar_zoo.app.obtain import Computed

Named = ModelTarget | NameTarget


@dataclass(frozen=True)
class PullRequest:
    """What to fetch, from where, and which promises of the past must hold.

    Attributes:
        targets: names, and folders of models that stand for one.
        sources: the hubs.
        everything: every artifact of the hubs; excludes `targets`.
        output: also copy the files to `<output>/<Model>/<tag>`.
        force: replace a copy with other content.
        dry_run: fetch nothing; say what would be fetched.
        lock: `None` uses the lock of the project, `True` pins outside of a project too, `False`
            uses no lock, and a path names the lock file.
        locked: take only what the lock has, and never write it.
        accept_new_digest: take bytes that differ from those seen before, and pin them.
        allow_downgrade: accept an index that is older than one seen before.
        wish: what to do about a model for which nobody has published an artifact.
        signing: whether a signature is required, and keys that are known.
    """

    targets: tuple[Named, ...]
    sources: Sources
    everything: bool = False
    output: Path | None = None
    force: bool = False
    dry_run: bool = False
    lock: Path | bool | None = None
    locked: bool = False
    accept_new_digest: bool = False
    allow_downgrade: bool = False
    wish: ComputeWish = field(default_factory=ComputeWish)
    signing: SignatureWish = field(default_factory=SignatureWish)

    def command_line(self, name: str, **changes: Any) -> str:
        """The command line that means this request for `name` alone, with options to add or to
        replace."""
        options: dict[str, Any] = {
            "hub": self.sources.named,
            "compute": self.wish.compute,
            "calib-data": self.wish.calib_data,
            "device": self.wish.device,
            "output": self.output,
            "force": self.force,
            "dry-run": self.dry_run,
            "lock": self.lock is True,
            "no-lock": self.lock is False,
            "accept-new-digest": self.accept_new_digest,
            "allow-downgrade": self.allow_downgrade,
            "offline": self.sources.asked_offline,
            "require-signature": self.signing.required and not changes.get("compute"),
            "key": self.signing.keys,
        }
        return command_line(["pull", name, *option_words(options | changes)])


@dataclass(frozen=True)
class Pulled:
    """An artifact that is in the store now.

    Attributes:
        result: what `registry.pull` did.
        output: the folder that the files were copied to, if any.
        computed: what was computed for it, if nobody had it.
    """

    result: PullResult
    output: Path | None = None
    computed: Computed | None = None


@dataclass(frozen=True)
class Offered:
    """An artifact that would be fetched: `files` are missing here, from `hub` at `revision`."""

    id: str
    digest: str | None
    already_present: bool
    hub: str
    revision: str | None
    warnings: tuple[str, ...]
    files: tuple[HubFile, ...]


Result = Pulled | Offered | ComputePlan | OscarZooError


@dataclass(frozen=True)
class PullReport:
    """One result for each target, in order, and the lock file if it was created now."""

    results: tuple[Result, ...]
    new_lock: Path | None


def check_request(request: PullRequest) -> None:
    """Raise `UsageError` when the request contradicts itself."""
    if bool(request.targets) == request.everything:
        raise UsageError(
            "name artifacts, or ask for --all of them.", hint="oscar-zoo list shows what there is"
        )
    if request.locked and request.lock is False:
        raise UsageError(
            "--locked needs the lock that --no-lock leaves out.", hint="drop one of the two"
        )
    if request.wish.compute and request.locked:
        raise UsageError(
            "--locked takes what the lock has; --compute makes something new.",
            hint="drop one of the two",
        )
    if request.wish.compute and request.signing.required:
        raise UsageError(
            "--require-signature takes what somebody signed; --compute makes something new.",
            hint="drop one of the two",
        )
    request.wish.check()


def trust_of(request: PullRequest) -> Trust:
    """The promises that the request wants to be kept."""
    lock: PinFile | None
    if isinstance(request.lock, Path):
        lock, write = PinFile(request.lock), True
    elif request.lock is False:
        lock, write = None, False
    else:
        lock = PinFile.of_project()
        write = bool(request.lock) or project_root() is not None or lock.path.exists()
    return Trust(
        lock=lock,
        locked=request.locked,
        write_lock=write,
        accept_new=request.accept_new_digest,
        allow_downgrade=request.allow_downgrade,
    )
