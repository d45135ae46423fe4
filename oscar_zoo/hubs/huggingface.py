"""Hugging Face: model repositories, read by our own requests and written by the hub's client.

Writing is one commit on top of a known parent, so that nobody's change is lost and nothing is
published by half. The client has no time limits, so it runs under a deadline; what it raises holds
requests and stays in here. Its cache is not used.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from oscar_zoo.errors import (
    ConflictError,
    HubTimeout,
    HubUnreachable,
    LoginRequired,
    StaleRevision,
    UsageError,
)
from oscar_zoo.hubs import huggingface_wire as wire
from oscar_zoo.hubs import session
from oscar_zoo.hubs.base import CARD_NAME, Change, Commit, HubFile
from oscar_zoo.hubs.deadline import Patience, within
from oscar_zoo.hubs.origin import Origin
from oscar_zoo.hubs.remote import Listing, RemoteHub
from oscar_zoo.hubs.transport import HttpReply, Limits, Transport

T = TypeVar("T")

MAX_PAGES = 200
LISTING_SECONDS = 60.0
WRITE_SECONDS = 60.0
"""How long a change may take, on top of its bytes at the minimum rate."""
_SMALL = (".json", ".md")
"""Files that travel in the commit itself."""
_TRUE = ("1", "on", "yes", "true")


def open_huggingface(
    repo: str, revision: str | None = None, *, limits: Limits | None = None
) -> RemoteHub:
    """The model repository `repo` (`org/name`) as a hub; nothing is asked yet.

    Args:
        revision: branch, tag or commit to look at; default the main branch.
        limits: how long things may take.
    """
    return RemoteHub(HuggingFaceSource(repo, limits=limits), revision=revision)


class HuggingFaceSource:
    """One model repository; see `remote.Source`.

    Args:
        endpoint: address of the hub; default `HF_ENDPOINT`, else that of the client.
        token: default that of the client: `HF_TOKEN`, its own login.
        limits: how long things may take.
    """

    def __init__(
        self,
        repo: str,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.repo = repo
        self.name = f"hf:{repo}"
        self.title = f"Hugging Face {repo}"
        self._endpoint = endpoint
        self._own_token = token
        self._limits = limits or Limits()

    @property
    def endpoint(self) -> str:
        """Address of the hub, without a final slash."""
        address = self._endpoint or os.environ.get("HF_ENDPOINT")
        if not address:
            from huggingface_hub import constants

            address = constants.ENDPOINT
        return address.rstrip("/")

    @property
    def key(self) -> str:
        """Name and address."""
        return f"{self.name} {self.endpoint}"

    def resolve(self, revision: str | None) -> str:
        """The commit that `revision` is; a full commit is taken at its word."""
        if revision is not None and wire.COMMIT.fullmatch(revision):
            return revision
        address = (
            f"{self._api}/revision/{quote(revision, safe='')}"
            if revision is not None
            else self._api
        )
        budget = self._limits.answer + 1
        reply = self._transport(revision).get(address, limit=wire.MAX_PAGE_BYTES, budget=budget)
        return wire.parse_commit(reply.body, self.title)

    def listing(self, revision: str) -> Listing:
        """Every file at the commit `revision`."""
        transport = self._transport(revision)
        patience = Patience(LISTING_SECONDS)
        files: dict[str, HubFile] = {}
        address = f"{self._api}/tree/{quote(revision, safe='')}?recursive=true"
        for _ in range(MAX_PAGES):
            reply = transport.get(address, limit=wire.MAX_PAGE_BYTES, budget=patience)
            for file in wire.parse_page(reply.body, self.title):
                if file.path in files:
                    raise HubUnreachable.for_hub(self.title, "its listing names a file twice")
                files[file.path] = file
            following = wire.next_page(reply.headers, address, self.title)
            if following is None:
                return files
            address = following
        raise HubUnreachable.for_hub(self.title, f"its listing has more than {MAX_PAGES} pages")

    def read(
        self,
        revision: str,
        file: HubFile,
        *,
        limit: int,
        progress: Callable[[int], None] | None = None,
    ) -> bytes:
        """What the hub sends for `file`, compared with nothing."""
        address = (
            f"{self.endpoint}/{self.repo}/resolve/{quote(revision, safe='')}/{quote(file.path)}"
        )
        transport = self._transport(revision, file.path)
        return transport.get(address, limit=limit, size=file.size, progress=progress).body

    def create(self, *, private: bool) -> None:
        """Create the repository; one that exists stays as it is."""
        self._write(
            "creating it", lambda api: api.create_repo(self.repo, private=private, exist_ok=True)
        )

    def commit(self, change: Change) -> Commit:
        """Write `change` in one commit on top of `change.parent`, or propose it."""
        from huggingface_hub import CommitOperationAdd

        # Files in memory go the plain way of LFS: hubs without Xet take them too.
        added = [
            CommitOperationAdd(path, io.BytesIO(data))
            for path, data in sorted(change.paths.items())
        ]

        def send(api: Any) -> Any:
            for each in (
                added
            ):  # several at once would go on threads that a process has to wait for at its end
                if not each.path_in_repo.endswith(_SMALL):
                    api.preupload_lfs_files(
                        self.repo, [each], create_pr=change.propose, free_memory=False
                    )
            return api.create_commit(
                self.repo,
                added,
                commit_message=change.message,
                parent_commit=change.parent,
                create_pr=change.propose,
            )

        info = self._write("writing", send, size=sum(map(len, change.paths.values())))
        if not wire.COMMIT.fullmatch(str(info.oid)):
            raise HubUnreachable.for_hub(self.title, "its answer names no commit")
        if (
            change.propose and not info.pr_url
        ):  # the client sends nothing where nothing would change
            raise ConflictError(
                f"{self.title} has all of this already: there is nothing to propose."
            )
        return Commit(info.oid, info.pr_url if change.propose else None)

    def tag(self, name: str, revision: str | None, message: str) -> None:
        """Put the tag `name` on `revision`; an equal one is success."""
        target = revision or self.resolve(None)
        put = partial(_put_tag, self.repo, name, target, message)
        found = self._write("tagging", put)
        if found != target:
            raise ConflictError(
                f"the tag {name} of {self.title} is on commit {found}, not {target}.",
                hint="tags of versions never move; see what happened to it on the hub",
            )

    @property
    def _api(self) -> str:
        return f"{self.endpoint}/api/models/{self.repo}"

    def _transport(self, revision: str | None, path: str | None = None) -> Transport:
        def refuse(reply: HttpReply, sent_token: bool) -> Exception:
            return wire.refusal(
                self.title,
                reply.status,
                reply.headers,
                sent_token=sent_token,
                revision=revision,
                path=path,
            )

        return Transport(
            self.title, self.endpoint, token=self._token, refusal=refuse, limits=self._limits
        )

    def _token(self) -> str | None:
        return self._own_token or user_token()

    def _write(self, doing: str, call: Callable[[Any], T], *, size: int = 0) -> T:
        """What `call` returns, which may use the client; its failures in our words."""
        seconds = WRITE_SECONDS + size / self._limits.min_rate
        late = HubTimeout.for_hub(self.title, f"was not done with {doing} within {seconds:.0f} s")
        from huggingface_hub import HfApi

        client = (
            session.http_client()
        )  # importing and making these takes time that is not the hub's
        try:
            return within(
                seconds,
                partial(self._run, HfApi, client, doing, call),
                error=lambda: late,
            )
        except session.Failed as failed:
            error = failed.error
        raise error

    def _run(
        self, make: Callable[..., Any], client: Any, doing: str, call: Callable[[Any], T]
    ) -> T:
        home = Origin.of(
            session.reached(
                self.title, client, 1, lambda: client.build_request("GET", self.endpoint)
            ).url
        )
        if not home.is_private:
            message = f"the hub's address, {home.scheme}://{home.host}, is no https address."
            raise UsageError(message, hint="a token is sent over https only")
        token = session.token(self.title, client, self._token)
        if token is None:
            raise LoginRequired(
                f"{self.title} takes changes from users only.", hint="log in: oscar-zoo login"
            )
        api = make(endpoint=self.endpoint, token=token)
        with _quiet():
            return session.reached(
                self.title, client, 1, partial(self._understood, doing, partial(call, api))
            )

    def _understood(self, doing: str, call: Callable[[], T]) -> T:
        """`call`, with what the client makes of answers turned into our errors."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            return _unwrapped(call)
        except HfHubHTTPError as error:
            status = error.response.status_code
            headers = {name.lower(): value for name, value in error.response.headers.items()}
            failure: Exception = wire.refusal(
                self.title, status, headers, sent_token=True, doing=doing
            )
            if status in (409, 412):
                failure = StaleRevision.for_hub(self.title)
        except HFValidationError:
            failure = UsageError(
                f"{self.repo!r} is no repository of Hugging Face.", hint="write hf:ORG/NAME"
            )
        except json.JSONDecodeError:
            failure = HubUnreachable.for_hub(self.title, "it sends something else instead of JSON")
        except KeyError as error:
            failure = HubUnreachable.for_hub(self.title, f"its answer has no {error.args[0]!r}")
        except ValueError as error:
            failure = HubUnreachable.for_hub(self.title, "its answer makes no sense")
            if CARD_NAME in str(error):
                message = f"{self.title} does not take the metadata at the top of {CARD_NAME}."
                failure = UsageError(message, hint=f"repair {CARD_NAME} on the hub")
        raise failure


def user_token() -> str | None:
    """The token of the user as the client finds it, or `None`."""
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").strip().lower() in _TRUE:
        return None
    from huggingface_hub import errors, get_token

    with contextlib.suppress(errors.OIDCError, errors.DeviceCodeError, OSError):
        return get_token()
    raise LoginRequired(
        "the token for Hugging Face cannot be read.", hint="log in again: oscar-zoo login"
    )


def _put_tag(repo: str, name: str, target: str, message: str, api: Any) -> str:
    """Create a tag, and tell which commit it is on now: `target`, or where it was before."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.create_tag(repo, tag=name, tag_message=message, revision=target)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        found = [tag.target_commit for tag in api.list_repo_refs(repo).tags if tag.name == name]
        return str(found[0]) if found else "that nobody names"
    return target


def _unwrapped(call: Callable[[], T]) -> T:
    """`call`, whose uploads hide what happened behind a `RuntimeError`."""
    try:
        return call()
    except RuntimeError as error:
        cause = error.__cause__
        if cause is None:
            raise
    raise cause


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the client says and draws on stderr."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            with disable_progress_bars():
                yield
        finally:
            logger.setLevel(level)
