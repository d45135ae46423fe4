"""Writing to ModelScope through its own client (extra `modelscope`): a repository, one commit, a
tag.

The client's folder upload is not used: it prints, splits a change into several commits and trusts a
cache. Its parts are: store what is large, then one commit, sent once. It works in an empty folder
of its own, so it neither loads the saved login, which is a pickle, nor leaves anything behind. What
it raises holds the request and with it the token, so nothing of that leaves this module, and no
word of the hub either.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.errors import (
    HubTimeout,
    HubUnreachable,
    MissingDependency,
    OscarZooError,
    RateLimited,
    UsageError,
)
from oscar_zoo.hubs.base import CARD_NAME
from oscar_zoo.hubs.deadline import within
from oscar_zoo.hubs.modelscope_wire import Refused, code_in, is_commit
from oscar_zoo.hubs.origin import Origin

T = TypeVar("T")

_ANSWER_SECONDS = 90.0
"""How long the hub may take for a request, with the tries the client makes."""
_INLINE_BYTES = 64 << 10
"""Up to here a file travels inside the commit, as the client does it; rotations and their like
never do."""


class Client:
    """The client, for one repository; `opened` makes it.

    Args:
        min_rate: bytes per second that the hub must take.
    """

    def __init__(self, api: Any, repo: str, *, title: str, min_rate: int) -> None:
        self._api, self._repo, self._title, self._min_rate = api, repo, title, min_rate

    @classmethod
    @contextmanager
    def opened(
        cls, repo: str, *, title: str, endpoint: str, token: str, min_rate: int
    ) -> Iterator[Self]:
        """The client while it is needed.

        Args:
            token: the token of the user.
            min_rate: bytes per second that the hub must take.
        """
        log = logging.getLogger("modelscope_hub")
        if not log.handlers:  # else it makes one, which writes to stderr
            log.addHandler(logging.NullHandler())
        try:
            from modelscope_hub import HubApi, HubConfig
        except ImportError:
            raise MissingDependency.for_extra("modelscope-hub", "modelscope") from None
        if not _origin(endpoint).is_private:
            raise UsageError(
                f"{title} has an address without encryption; no token is sent there.",
                hint="use https",
            )
        with tempfile.TemporaryDirectory(prefix="oscar-zoo-", ignore_cleanup_errors=True) as folder:
            own = Path(folder)
            api = HubApi(HubConfig(endpoint=endpoint, token=token, config_dir=own, cache_dir=own))
            for session in vars(
                api.legacy
            ).values():  # made now, while the folder is there: it keeps an id in it
                if hasattr(session, "max_redirects"):
                    session.max_redirects = (
                        0  # its cookie would go to every port of the host, in the open too
                    )
            yield cls(api, repo, title=title, min_rate=min_rate)

    def create(self, *, private: bool) -> None:
        """Create the repository; one that exists is success."""
        visibility = "private" if private else "public"
        self._call(
            _unless_it_exists(
                partial(self._api.create_repo, self._repo, "model", visibility=visibility)
            )
        )

    def commit(self, files: Mapping[str, bytes], message: str, branch: str) -> str | None:
        """Write `files` in one commit on `branch`; its id, where the hub tells it."""
        large = {path for path, data in files.items() if _is_large(path, data)}
        self._store({sha256_hex(files[path]): files[path] for path in large})
        actions = [_action(path, data, large=path in large) for path, data in sorted(files.items())]
        send = partial(
            self._api.legacy.create_commit, self._repo, "model", actions, message, revision=branch
        )
        reply = self._call(send)
        told = [reply.get(key) for key in ("oid", "CommitId")] if isinstance(reply, dict) else []
        return next((text for text in told if isinstance(text, str) and is_commit(text)), None)

    def tag(self, name: str, revision: str) -> None:
        """Put the tag `name` on `revision`; one of that name, wherever it is, stays as it is."""
        self._call(
            _unless_it_exists(
                partial(self._api.create_repo_tag, self._repo, "model", name, revision=revision)
            )
        )

    def _store(self, objects: Mapping[str, bytes]) -> None:
        """Have the hub keep the large files `objects`, by sha256."""
        if not objects:
            return
        asked = [{"oid": oid, "size": len(data)} for oid, data in objects.items()]
        addresses = self._call(partial(self._api.legacy.validate_blobs, self._repo, "model", asked))
        for oid, data in objects.items():
            address = addresses.get(oid)
            if address is not None:  # else the hub has it
                self._put(str(address), data)

    def _put(self, address: str, data: bytes) -> None:
        """Send a file to where the hub wants it. The token goes along only to the hub itself and
        its subdomains."""
        home, target = _origin(self._api.legacy.endpoint), _origin(address)
        if not target.is_private:
            raise HubUnreachable.for_hub(
                self._title, "it wants files at an address without encryption"
            )
        below = target.scheme == "https" and target.host.endswith(
            "." + home.host.removeprefix("www.")
        )
        headers = {} if target == home or below else {"Authorization": None, "Cookie": None}
        send = partial(self._api.legacy.upload_blob, address, data, len(data), headers=headers)
        self._call(send, len(data) / self._min_rate)

    def _call(self, call: Callable[[], T], least: float = 0) -> T:
        """What `call` returns, in time."""
        from modelscope_hub.errors import HubError

        seconds = max(_ANSWER_SECONDS, least)
        late = HubTimeout.for_hub(self._title, f"did not finish within {seconds:.0f} s")
        try:
            return within(seconds, call, error=lambda: late)
        except OscarZooError:
            raise
        except HubError as error:
            failure = _failure(error, self._title)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            failure = HubUnreachable.for_hub(
                self._title, "its client does not understand the answer"
            )
        raise failure


def _failure(error: Any, title: str) -> OscarZooError:
    from modelscope_hub import errors

    status = getattr(error, "status_code", None)
    if isinstance(error, errors.RateLimitError):
        return RateLimited.for_hub(title, getattr(error, "retry_after", None))
    if isinstance(error, errors.RequestTimeoutError):
        return HubTimeout.for_hub(title, "did not answer in time")
    if isinstance(status, int):
        code = code_in(getattr(error, "response_body", None))
        return Refused(status, code, sent_token=True).as_error(title, doing="writing")
    return HubUnreachable.for_hub(title, "the connection broke off")


def _unless_it_exists(call: Callable[[], object]) -> Callable[[], None]:
    from modelscope_hub.errors import AlreadyExistsError

    def run() -> None:
        with contextlib.suppress(AlreadyExistsError):
            call()

    return run


def _action(path: str, data: bytes, *, large: bool) -> dict[str, object]:
    """One file of a commit, as the client writes it; `create` replaces, too."""
    content = "" if large else base64.b64encode(data).decode()
    return {
        "action": "create",
        "path": path,
        "type": "lfs" if large else "normal",
        "size": len(data),
        "sha256": sha256_hex(data) if large else "",
        "content": content,
        "encoding": "" if large else "base64",
    }


def _is_large(path: str, data: bytes) -> bool:
    return path != CARD_NAME and (path.endswith(".pt") or len(data) > _INLINE_BYTES)


def _origin(address: str) -> Origin:
    """The origin of an address as the client's HTTP library reads it; of what is none, one that is
    not private."""
    from urllib3.util import parse_url

    try:
        return Origin.of(parse_url(address))
    except ValueError:
        return Origin("", "", None)
