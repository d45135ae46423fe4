"""Hugging Face: model repositories, read by our own requests and written by the hub's client.

Writing is one commit on top of a known parent, so that nobody's change is lost and nothing is
published by half. The client has no time limits, so it runs under a deadline; what it raises holds
requests and stays in here. Its cache is not used.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from oscar_zoo import errors
from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import mistaken_content
from oscar_zoo.artifact.strict_json import Json
from oscar_zoo.registry.hubs import http
from oscar_zoo.registry.hubs.base import (
    CARD_NAME,
    Change,
    Commit,
    HubFile,
    Limits,
    is_commit,
    is_true,
    within,
)
from oscar_zoo.registry.hubs.http import HttpReply, Origin, Transport
from oscar_zoo.registry.hubs.remote import Listing, RemoteHub, by_path, listed_file

T = TypeVar("T")

MAX_PAGES = 200
LISTING_SECONDS = 60.0
WRITE_SECONDS = 60.0
"""How long a change may take, on top of its bytes at `http.WRITE_RATE`."""
_SMALL = (".json", ".md")
"""Files that travel in the commit itself."""


class HuggingFaceHub(RemoteHub):
    """The model repository `org/name`. The defaults of endpoint and token are those of the client;
    nothing is asked yet."""

    def __init__(
        self, repo: str, revision: str | None = None, *, limits: Limits | None = None
    ) -> None:
        super().__init__("hf", "Hugging Face", repo, revision)
        self._limits = limits or Limits()

    @property
    def endpoint(self) -> str:
        from huggingface_hub import constants

        return str(os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")

    @property
    def key(self) -> str:
        return f"{self.plain_name} {self.endpoint}"

    def resolve(self, revision: str | None) -> str:
        if revision is not None and is_commit(revision):
            return revision
        named = "" if revision is None else f"/revision/{quote(revision, safe='')}"
        seconds = min(http.ANSWER_SECONDS, self._limits.read)
        address = f"{self._api}{named}"
        reply = self._transport(revision).get(address, limit=MAX_PAGE_BYTES, seconds=seconds)
        return parse_commit(reply.body, self.title)

    def listing(self, revision: str) -> Listing:
        return by_path(self.title, self._listed(revision))

    def _listed(self, revision: str) -> Iterator[HubFile]:
        transport = self._transport(revision)
        end = time.monotonic() + LISTING_SECONDS
        address: str | None = f"{self._api}/tree/{quote(revision, safe='')}?recursive=true"
        for _ in range(MAX_PAGES):
            left = end - time.monotonic()
            reply = transport.get(str(address), limit=MAX_PAGE_BYTES, seconds=left)
            yield from parse_page(reply.body, self.title)
            address = next_page(reply.headers, str(address), self.title)
            if address is None:
                return
        raise errors.HubUnreachable.for_hub(
            self.title, f"its listing has more than {MAX_PAGES} pages"
        )

    def read(
        self,
        revision: str,
        file: HubFile,
        *,
        limit: int,
        progress: Callable[[int], None] | None = None,
    ) -> bytes:
        place = f"resolve/{quote(revision, safe='')}/{quote(file.path)}"
        get = self._transport(revision, file.path).get
        address = f"{self.endpoint}/{self.repo}/{place}"
        return get(address, limit=limit, size=file.size, progress=progress).body

    def create(self) -> None:
        self._write("creating it", lambda api: api.create_repo(self.repo, exist_ok=True))

    def write(self, change: Change) -> Commit:
        from huggingface_hub import CommitOperationAdd

        # Files in memory go the plain way of LFS: hubs without Xet take them too.
        paths = sorted(change.paths.items())
        added = [CommitOperationAdd(path, io.BytesIO(data)) for path, data in paths]

        def send(api: Any) -> Any:
            # Several at once would go on threads that a process has to wait for at its end.
            for each in added:
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

        info = self._write("writing", send, size=sum(len(data) for _, data in paths))
        if not is_commit(info.oid):
            raise errors.HubUnreachable.for_hub(self.title, "its answer names no commit")
        if change.propose and not info.pr_url:  # nothing would change
            text = f"{self.title} has all of this already: there is nothing to propose."
            raise errors.ConflictError(text)
        return Commit(info.oid, info.pr_url if change.propose else None)

    def tag(self, name: str, revision: str | None, message: str) -> None:
        target = revision or self.resolve(None)

        def put(api: Any) -> str:
            api.create_tag(self.repo, tag=name, tag_message=message, revision=target, exist_ok=True)
            tags = api.list_repo_refs(self.repo).tags
            found = (str(tag.target_commit) for tag in tags if tag.name == name)
            return next(found, "that nobody names")

        found = self._write("tagging", put)
        if found != target:
            raise errors.ConflictError(
                f"the tag {name} of {self.title} is on commit {found}, not {target}.",
                hint="tags of versions never move; see what happened to it on the hub",
            )

    @property
    def _api(self) -> str:
        return f"{self.endpoint}/api/models/{self.repo}"

    def _transport(self, revision: str | None, path: str | None = None) -> Transport:
        def refuse(reply: HttpReply, sent_token: bool) -> Exception:
            given = (self.title, reply.status, reply.headers)
            return refusal(*given, sent_token=sent_token, revision=revision, path=path)

        return Transport(
            self.title, self.endpoint, token=user_token, refusal=refuse, limits=self._limits
        )

    def _write(self, doing: str, call: Callable[[Any], T], *, size: int = 0) -> T:
        """What `call` returns, which may use the client; its failures in our words."""
        seconds = WRITE_SECONDS + size / http.WRITE_RATE
        late = errors.HubTimeout.for_hub(
            self.title, f"was not done with {doing} within {seconds:.0f} s"
        )
        client = http.http_client()
        try:
            return within(seconds, partial(self._run, client, doing, call), error=lambda: late)
        except http.Failed as failed:
            error = failed.error
        raise error

    def _run(self, client: Any, doing: str, call: Callable[[Any], T]) -> T:
        from huggingface_hub import HfApi

        build = partial(client.build_request, "GET", self.endpoint)
        home = Origin.of(http.reached(self.title, client, build).url)
        if not home.is_private:
            message = f"the hub's address, {home.scheme}://{home.host}, is no https address."
            raise errors.UsageError(message, hint="a token is sent over https only")
        token = http.checked_token(self.title, client, user_token)
        if token is None:
            raise errors.LoginRequired(
                f"{self.title} takes changes from users only.", hint="log in: oscar-zoo login"
            )
        api = HfApi(endpoint=self.endpoint, token=token)
        with _quiet():
            answer = partial(self._understood, doing, partial(call, api))
            return http.reached(self.title, client, answer)

    def _understood(self, doing: str, call: Callable[[], T]) -> T:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            try:
                return call()
            except RuntimeError as error:  # uploads hide behind one what happened
                raise error.__cause__ or error from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            headers = {name.lower(): value for name, value in error.response.headers.items()}
            failure: Exception = refusal(self.title, status, headers, sent_token=True, doing=doing)
            if status in (409, 412):
                failure = errors.StaleRevision.for_hub(self.title)
        except HFValidationError:
            failure = errors.UsageError(
                f"{self.repo!r} is no repository of Hugging Face.", hint="write hf:ORG/NAME"
            )
        except (KeyError, ValueError) as error:  # of which those of JSON are
            failure = errors.HubUnreachable.for_hub(self.title, "its answer makes no sense")
            if CARD_NAME in str(error):
                message = f"{self.title} does not take the metadata at the top of {CARD_NAME}."
                failure = errors.UsageError(message, hint=f"repair {CARD_NAME} on the hub")
        raise failure


def user_token() -> str | None:
    if is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    from huggingface_hub import errors as theirs
    from huggingface_hub import get_token

    with contextlib.suppress(theirs.OIDCError, theirs.DeviceCodeError, OSError):
        return get_token()
    raise errors.LoginRequired(
        "the token for Hugging Face cannot be read.", hint="log in again: oscar-zoo login"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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


MAX_PAGE_BYTES = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEXT = re.compile(r'<([^<>]*)>\s*;\s*rel="?next"?')
_DISABLED = "Access to this resource is disabled."
_WRONG_TOKEN = "Invalid credentials in Authorization header"


def parse_commit(body: bytes, title: str) -> str:
    about = _parse(body, title)
    commit = about.get("sha") if isinstance(about, dict) else None
    if not is_commit(commit):
        raise errors.HubUnreachable.for_hub(title, "its answer names no commit")
    return str(commit)


def parse_page(body: bytes, title: str) -> Iterator[HubFile]:
    """The files of one page of a listing; a file in LFS has a sha256, another one its git oid."""
    rows = _parse(body, title)
    if not isinstance(rows, list):
        raise errors.HubUnreachable.for_hub(title, "its answer is no listing")
    for row in rows:
        if not isinstance(row, dict) or type(row.get("type")) is not str:
            raise errors.HubUnreachable.for_hub(title, "its listing has an entry without a type")
        if row["type"] == "file":
            yield _file(row, title)


def next_page(headers: Mapping[str, str], here: str, title: str) -> str | None:
    match = _NEXT.search(headers.get("link", ""))
    if match is None:
        return None
    try:
        same = urlsplit(match[1])[:2] == urlsplit(here)[:2]
    except ValueError:
        same = False
    if not same:
        raise errors.HubUnreachable.for_hub(title, "its listing goes on at another host")
    return match[1]


def refusal(
    title: str,
    status: int,
    headers: Mapping[str, str],
    *,
    sent_token: bool,
    doing: str = "reading",
    revision: str | None = None,
    path: str | None = None,
) -> errors.OscarZooError:
    code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "")
    if code == "GatedRepo":
        return errors.GatedRepository.for_hub(title)
    if message == _DISABLED:
        return errors.Forbidden(
            f"{title} was disabled by Hugging Face.",
            hint="its web page may say why; try another hub",
        )
    if code == "RevisionNotFound":
        return errors.RevisionNotFound.for_hub(title, revision or "main")
    if code == "EntryNotFound" or (status == 404 and not code and path is not None):
        return errors.NotFoundError(
            f"{title} has no file {path}.", hint="see what is there: oscar-zoo list"
        )
    if status == 401 and sent_token and (message == _WRONG_TOKEN or not code):
        return errors.LoginRequired.for_hub(title, sent_token=True)
    if status == 401:  # the hub says no more to strangers: a private repository or none
        return errors.LoginRequired.for_hub(title, sent_token=False)
    if code == "RepoNotFound" or status in (404, 410):
        return errors.RepositoryNotFound.for_hub(title)
    if status == 403:
        return errors.Forbidden.for_hub(title, doing)
    if status == 429:
        return errors.RateLimited.for_hub(title, None)
    return errors.HubUnreachable.for_hub(title, f"it answers with status {status}")


def _parse(body: bytes, title: str) -> Json:
    try:
        return strict_json.loads(body, max_bytes=MAX_PAGE_BYTES)
    except errors.MalformedFile:
        pass  # said in our own words
    mistaken = mistaken_content(body)
    seen = "an empty answer" if not body else mistaken[1] if mistaken else "something else"
    raise errors.HubUnreachable.for_hub(title, f"it sends {seen} instead of JSON")


def _file(row: dict[str, Json], title: str) -> HubFile:
    path, size, oid, lfs = (row.get(key) for key in ("path", "size", "oid", "lfs"))
    if lfs is None:
        if not is_commit(oid):
            raise errors.HubUnreachable.for_hub(title, "its listing has a file without an oid")
        return listed_file(title, path, size, git_oid=oid)
    told = lfs if isinstance(lfs, dict) else {}
    sha256 = told.get("oid")
    if type(sha256) is not str or not _SHA256.fullmatch(sha256) or told.get("size") != size:
        raise errors.HubUnreachable.for_hub(title, "its listing has a file in LFS without a sha256")
    return listed_file(title, path, size, sha256=sha256)
