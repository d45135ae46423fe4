"""A hub as people write it, `file:PATH`, `hf:ORG/REPO[@REVISION]` or `ms:ORG/REPO[@REVISION]`, and
those configured."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from oscar_zoo import paths
from oscar_zoo.artifact.names import check_part
from oscar_zoo.errors import InvalidName, UsageError
from oscar_zoo.hubs import config, origin
from oscar_zoo.hubs.base import Hub
from oscar_zoo.hubs.local import LocalHub

if TYPE_CHECKING:
    from oscar_zoo.hubs.transport import Limits

_FORMS = "a hub is written hf:ORG/REPO, ms:ORG/REPO or file:PATH"
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


def is_remote(text: str) -> bool:
    """Whether asking the hub that `text` names needs the network."""
    return text.partition(":")[0].casefold() in ("hf", "ms")


def is_nearby(text: str) -> bool:
    """Whether the hub that `text` names is on this machine, so that it is as busy as everything
    here."""
    scheme = text.partition(":")[0].casefold()
    variables = {"hf": ("HF_ENDPOINT",), "ms": ("MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN")}.get(
        scheme
    )
    if variables is None:
        return True
    return origin.is_nearby(
        next((os.environ[name] for name in variables if os.environ.get(name)), "")
    )


def open_hub(
    text: str | None = None, *, network: config.NetworkSettings | None = None, sharing: int = 1
) -> Hub:
    """The hub that `text` names; nothing is asked or created yet.

    Args:
        text: `file:PATH` (absolute, relative or with `~`), `file:///PATH`,
            `hf:ORG/REPO[@REVISION]`, `ms:ORG/REPO[@REVISION]`, or `None` for the zoo of this user,
            a folder that the first publish creates.
        network: limits of requests; default those of the configuration.
        sharing: how many remote hubs may have to be asked in turn: each gets its share of the
            waiting time.

    Raises:
        UsageError: not a hub.
    """
    if text is None:
        return LocalHub(paths.default_zoo_dir(), must_exist=False)
    scheme, colon, rest = text.partition(":")
    scheme = scheme.casefold() if colon else ""
    if scheme == "file":
        path = _file_path(text, rest)
        return LocalHub(path, must_exist=path != paths.default_zoo_dir())
    if scheme in ("hf", "ms"):
        return _open_remote(text, scheme, rest, network or config.load().network, sharing)
    text = re.sub(
        r"//[^/@]*@", "//***@", text
    )  # somebody's password, in an address of another kind
    form = f"a hub in a folder is written file:{text}" if os.path.lexists(text) else _FORMS
    raise UsageError(f"{text[:120]!r} is not a hub.", hint=form)


def open_hubs(texts: Sequence[str] = (), *, offline: bool = False) -> tuple[Hub, ...]:
    """The hubs to read from, in order: those of `texts`, of the environment, of `config.toml`, or
    the defaults; see `hubs_to_read`."""
    return hubs_to_read(config.load(texts, offline=offline))


def hubs_to_read(settings: config.HubSettings) -> tuple[Hub, ...]:
    """Open the hubs that `settings` reads from, in order; in offline mode only hubs in folders.

    Raises:
        UsageError: one of them is not a hub.
    """
    wanted = [text for text in settings.read if not (settings.offline and is_remote(text))]
    remote = sum(map(is_remote, wanted))
    return tuple(
        open_hub(text, network=settings.network, sharing=max(remote, 1)) for text in wanted
    )


def publishing_hubs(texts: Sequence[str] = ()) -> tuple[Hub, ...]:
    """The hubs to publish to, those without commits (ModelScope) last; default the zoo of this
    user."""
    settings = config.load(texts)
    wanted = sorted(settings.publish, key=lambda text: text.casefold().startswith("ms:"))
    return tuple(open_hub(text, network=settings.network) for text in wanted) or (open_hub(),)


def request_limits(network: config.NetworkSettings, *, sharing: int = 1) -> Limits:
    """Limits of requests to one of `sharing` remote hubs that may have to be waited for in turn."""
    from oscar_zoo.hubs.transport import Limits

    limits = Limits(**network.model_dump(exclude_none=True))
    share = limits.answer / sharing
    return replace(limits, answer=share, connect=min(limits.connect, share))


def _open_remote(
    text: str, scheme: str, rest: str, network: config.NetworkSettings, sharing: int
) -> Hub:
    repository, at, revision = rest.partition("@")
    organisation, _, name = repository.partition("/")
    try:
        check_part(organisation, "organisation")
        check_part(name, "repository")
    except InvalidName as error:
        raise UsageError(f"{text[:120]!r} is not a hub: {error.message}", hint=_FORMS) from None
    if at and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise UsageError(
            f"{text[:120]!r} has no valid revision after @.",
            hint="name a branch, a tag or a commit",
        )
    limits = request_limits(network, sharing=sharing)
    if scheme == "hf":
        from oscar_zoo.hubs.huggingface import open_huggingface

        return open_huggingface(repository, revision or None, limits=limits)
    from oscar_zoo.hubs.modelscope import open_modelscope

    return open_modelscope(repository, revision or None, limits=limits)


def _file_path(text: str, rest: str) -> Path:
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError(
                f"{text[:120]!r} names a host.",
                hint="write file:///absolute/path or file:relative/path",
            )
        rest = "/" + unquote(path)
    if not rest or "\0" in rest:
        raise UsageError(
            f"{text[:120]!r} has no path.", hint="a hub in a folder is written file:PATH"
        )
    return Path(rest).expanduser().resolve()
