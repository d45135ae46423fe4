"""Copy artifacts from hub to hub, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oscar_zoo.errors import UsageError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import mirror as registry
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.mirror import MirrorOptions, MirrorResult
from oscar_zoo.registry.writing import check_online, ignore


@dataclass(frozen=True)
class MirrorRequest:
    """What to copy, from where and to where.

    Attributes:
        source, target: hubs as people write them.
        names: `NAME` (all its versions), `NAME:TAG` or `NAME@sha256:PREFIX`.
        everything: copy every artifact of `source`; excludes `names`.
        create: create the target if it is not there.
        propose: open pull requests instead of committing.
        dry_run: only say what would be copied.
    """

    source: str
    target: str
    names: tuple[str, ...] = ()
    everything: bool = False
    create: bool = False
    propose: bool = False
    dry_run: bool = False


def mirror_all(
    request: MirrorRequest,
    observer: Observer = SILENT,
    told: Callable[[MirrorResult], None] = ignore,
) -> tuple[MirrorResult, ...]:
    """Copy artifacts between hubs and compare the digests of both.

    Args:
        observer: told about bytes that are fetched.
    """
    if bool(request.names) == request.everything:
        raise UsageError(
            "name artifacts, or ask for --all of them.",
            hint=f"see them: oscar-zoo list --hub {request.source}",
        )
    source, target = address.open_hub(request.source), address.open_hub(request.target)
    check_online(source)
    check_online(target)

    def tell(result: MirrorResult) -> None:
        observer.begin((), timed=False)
        told(result)

    return registry.mirror(
        source,
        target,
        request.names,
        options=MirrorOptions(
            create=request.create, propose=request.propose, dry_run=request.dry_run
        ),
        told=tell,
        progress=lambda name, done, total: observer.advance(name, done, total, "bytes"),
    )


def mirror(
    source: str,
    target: str,
    names: Sequence[str] = (),
    *,
    create: bool = False,
    dry_run: bool = False,
) -> tuple[MirrorResult, ...]:
    """Copy artifacts (all of them, or `names`) between hubs, byte for byte, and compare the digests
    of both.

    Raises:
        VersionExists: the target has other content under an id.
        IntegrityError: bytes are not what they must be.
    """
    wanted = tuple(names)
    return mirror_all(
        MirrorRequest(source, target, wanted, everything=not wanted, create=create, dry_run=dry_run)
    )
