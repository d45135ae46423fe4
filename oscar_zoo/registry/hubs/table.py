"""The kinds of hubs, one row each, and where the token of each comes from; no token is read or
stored here. A new kind of hub is a file with its opener and a row here."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from oscar_zoo import paths
from oscar_zoo.artifact.names import check_part
from oscar_zoo.errors import InvalidName, UsageError
from oscar_zoo.registry.hubs.base import Hub, Limits, is_true
from oscar_zoo.registry.hubs.local import LocalHub

_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


@dataclass(frozen=True)
class Credential:
    """Where the token of a hub comes from, never the token itself: name of a variable, or path of
    the file that the hub's client wrote, which may be `exposed` to other users."""

    source: str
    is_variable: bool
    exposed: bool = False


@dataclass(frozen=True)
class HubKind:
    """One kind of hub, written `<scheme>:<place>`. `open` opens one and asks nothing; `endpoints`
    are variables that may hold its address, in the order they count, none for what is not reached
    over the network. A hub without commits is written last, because a failed publish may leave
    something behind."""

    scheme: str
    title: str
    place: str
    open: Callable[[str, Limits | None], Hub]
    endpoints: tuple[str, ...] = ()
    credential: Callable[[], Credential | None] | None = None
    token_step: str = ""
    tells_user: bool = False
    has_commits: bool = True

    @property
    def is_remote(self) -> bool:
        return bool(self.endpoints)


def kind_of(text: str) -> HubKind | None:
    scheme, colon, _ = text.partition(":")
    return HUBS.get(scheme.casefold()) if colon else None


def _open_remote(scheme: str, place: str, limits: Limits | None) -> Hub:
    from oscar_zoo.registry.hubs.huggingface import HuggingFaceHub
    from oscar_zoo.registry.hubs.modelscope import ModelScopeHub

    kind = HuggingFaceHub if scheme == "hf" else ModelScopeHub
    return kind(*_repository(scheme, place), limits=limits)


def _repository(scheme: str, place: str) -> tuple[str, str | None]:
    repository, at, revision = place.partition("@")
    organisation, _, name = repository.partition("/")
    try:
        check_part(organisation, "organisation")
        check_part(name, "repository")
        if at and (_REVISION.fullmatch(revision) is None or ".." in revision):
            raise InvalidName("there is no valid revision after @.")
    except InvalidName as error:
        text = f"{f'{scheme}:{place}'[:120]!r} is not a hub: {error.message}"
        raise UsageError(text, hint=f"a hub is written {FORMS}") from None
    return repository, revision or None


def _open_folder(place: str, limits: Limits | None) -> Hub:
    """The hub in the folder `PATH` (absolute, relative or with `~`) or `///PATH`."""
    text = f"file:{place}"[:120]
    if place.startswith("//"):
        host, slash, rest = place[2:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError(
                f"{text!r} names a host.", hint="write file:///absolute/path or file:relative/path"
            )
        place = "/" + unquote(rest)
    if not place or "\0" in place:
        raise UsageError(f"{text!r} has no path.", hint="a hub in a folder is written file:PATH")
    path = Path(place).expanduser().resolve()
    return LocalHub(path, must_exist=path != paths.default_zoo_dir())


def huggingface_credential() -> Credential | None:
    """Where the token comes from, in the order of the hub's client."""
    if is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    found = _variable("HF_OIDC_RESOURCE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    if found is not None:
        return found
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    path = Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")).expanduser()
    try:
        status = path.stat()
    except OSError:
        return None
    if not status.st_size:
        return None
    return Credential(str(path), False, exposed=bool(stat.S_IMODE(status.st_mode) & 0o077))


def modelscope_credential() -> Credential | None:
    return _variable("MODELSCOPE_API_TOKEN")


def _variable(*names: str) -> Credential | None:
    name = next((name for name in names if os.environ.get(name, "").strip()), None)
    return None if name is None else Credential(name, is_variable=True)


HUBS = {
    kind.scheme: kind
    for kind in (
        HubKind("file", "a folder", "PATH", _open_folder),
        HubKind(
            "hf",
            "Hugging Face",
            "ORG/REPO",
            partial(_open_remote, "hf"),
            endpoints=("HF_ENDPOINT",),
            credential=huggingface_credential,
            token_step="oscar-zoo login",
            tells_user=True,
        ),
        HubKind(
            "ms",
            "ModelScope",
            "ORG/REPO",
            partial(_open_remote, "ms"),
            endpoints=("MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN"),
            credential=modelscope_credential,
            token_step="set MODELSCOPE_API_TOKEN",
            has_commits=False,
        ),
    )
}
_WRITTEN = [
    f"{kind.scheme}:{kind.place}"
    for kind in sorted(HUBS.values(), key=lambda kind: not kind.is_remote)
]
FORMS = f"{', '.join(_WRITTEN[:-1])} or {_WRITTEN[-1]}"
"""How every kind is written, for messages and helps."""
WITHOUT_COMMITS = ", ".join(kind.title for kind in HUBS.values() if not kind.has_commits)
