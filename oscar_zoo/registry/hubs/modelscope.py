"""ModelScope: one listing, then each file at the commit it showed; changes through the hub's own
client.

Reading needs no client. The public hub is two sites; like the client, a source whose address nobody
configured asks the second one when the first has no such repository. The token of the user is for
one of them, the first.

The hub has no compare-and-swap. A change is refused when the branch is not where the caller saw it,
or has one of the new files; what the branch has afterwards is compared with what was sent. Between
the two looks somebody else may write: versions survive that, but the later index wins, and without
the other's entry until that is published once more.

A listing names every file with size and sha256. It abbreviates the id of the commit it shows and
says of each file which commit changed it last; the two together give the full id, and the hub takes
that for a revision. Where they do not, a listing is named by its branch and a digest of itself, so
that a branch which moved is noticed all the same.

Source: modelscope-hub 0.5 for addresses and shapes; public measurements of the hub for what its
client does not say: the abbreviated commit, reading by commit, the codes, and that a listing ends
at 3,000 entries.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from oscar_zoo import errors
from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.strict_json import Json
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
from oscar_zoo.registry.hubs.http import WRITE_RATE, HttpReply, Origin, Transport
from oscar_zoo.registry.hubs.remote import RemoteHub, by_path, listed_file

T = TypeVar("T")

BRANCH = "master"
SITES = ("https://modelscope.cn", "https://www.modelscope.ai")
"""The public hub, in the order the client asks."""
LISTING_SECONDS = 60.0
_COOKIE = "m_session_id"
_ANSWER_SECONDS = 90.0
"""How long the hub may take for a request, with the tries the client makes."""
_INLINE_BYTES = 64 << 10
"""Up to here a file travels inside the commit, as the client does it; rotations and their like
never do."""

MAX_LISTING_BYTES = 8 << 20
MAX_ENTRIES = 3000

_NO_ACCESS = 10010200001  # with 404: private or gated; with 400: bad input
_NO_TREE = 10990101004
_BAD_TOKEN = 10010103009
_BRANCH_MOVED = 10030000001
_TOKEN_HINT = "set MODELSCOPE_API_TOKEN to an access token of your account"
_IF_PRIVATE = f"check the name; if it is private: {_TOKEN_HINT}"
_MARK = "~"
_ABBREVIATED = re.compile(r"[0-9a-f]{7,40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelScopeHub(RemoteHub):
    """The repository `repo` on ModelScope; `master` is the only branch that is written. The default
    of `endpoint` is that of the client; nothing is asked yet."""

    def __init__(
        self, repo: str, revision: str | None = None, *, limits: Limits | None = None
    ) -> None:
        super().__init__("ms", "ModelScope", repo, revision)
        own = _configured_endpoint()
        second_first = is_true("MODELSCOPE_PREFER_AI_SITE")
        addresses = (own,) if own else SITES[::-1] if second_first else SITES
        self._sites = [
            Transport(
                self.title,
                address,
                token=_token if address == addresses[0] else lambda: None,
                refusal=_refused,
                cookie=_COOKIE,
                limits=limits,
            )
            for address in addresses
        ]
        self._home = self._sites[0] if own else None
        self._last: Listing | None = None

    @property
    def key(self) -> str:
        return " ".join((self.plain_name, *(site.endpoint for site in self._sites)))

    def resolve(self, revision: str | None) -> str:
        known = self._last is not None and self._last.revision == revision
        if revision is not None and (known or is_commit(revision)):
            return revision
        self._last = self._find(revision or BRANCH)[1]
        return self._last.revision

    def listing(self, revision: str) -> Mapping[str, HubFile]:
        listed = self._last
        if listed is None or listed.revision != revision:
            listed = self._last = self._find(revision)[1]
        return listed.files

    def read(
        self,
        revision: str,
        file: HubFile,
        *,
        limit: int,
        progress: Callable[[int], None] | None = None,
    ) -> bytes:
        site = self._home or self._find(revision)[0]
        asked = {"Revision": name_of(revision), "FilePath": file.path}
        url = address(site.endpoint, self.repo, "repo", **asked)
        try:
            return site.get(url, limit=limit, size=file.size, progress=progress).body
        except Refused as refused:
            refusal = refused
        if refusal.is_missing:
            text = f"{self.title} lists {file.path}, but does not have it."
            raise errors.NotFoundError(text, hint="tell its owner")
        raise refusal.as_error(self.title, doing="reading")

    def create(self) -> None:
        with self._client() as api:
            self._make(partial(api.create_repo, self.repo, "model", visibility="public"))

    def write(self, change: Change) -> Commit:
        if change.propose:
            text = f"{self.title} takes no proposals."
            raise errors.UsageError(text, hint="publish without --create-pr")
        before = self._find(BRANCH)[1]
        new = change.paths.keys() - change.root.keys()
        if change.parent not in (None, before.revision) or not new.isdisjoint(before.files):
            raise errors.StaleRevision.for_hub(self.title)
        with self._client() as api:
            made = self.send(api, change.paths, change.message)
        self._last = after = self._find(BRANCH)[1]
        self._check_arrived(change, after)
        return Commit(made or after.revision)

    def tag(self, name: str, revision: str | None, message: str) -> None:
        wanted = self._find(revision or BRANCH)[1]
        at = wanted.commit or wanted.name
        with self._client() as api:  # a tag of that name, wherever it is, stays as it is
            self._make(partial(api.create_repo_tag, self.repo, "model", name, revision=at))
        if not self._find(name)[1].is_same(wanted):
            raise errors.ConflictError(
                f"{self.title} has the tag {name} on another commit.",
                hint="a tag is never moved; ask its owner",
            )

    def _check_arrived(self, change: Change, after: Listing) -> None:
        for path, data in change.paths.items():
            there, want = after.files.get(path), sha256_hex(data)
            if there is not None and there.size == len(data) and there.sha256 in (want, None):
                continue
            if there is not None and there.sha256 is not None and path not in change.root:
                hint = "the hub changed it; tell its owner, and give the version another tag"
                raise errors.DigestMismatchError.for_content(
                    f"{path} on {self.title}", want=want, got=there.sha256, hint=hint
                )
            raise errors.NetworkError(
                f"{self.title} took the change, but does not have {path} as it was sent.",
                hint="somebody else may have written at the same time: run it again, which is safe",
            )

    def _find(self, revision: str) -> tuple[Transport, Listing]:
        name = name_of(revision)
        sites = [self._home] if self._home else self._sites
        for site in sites:
            try:
                listing = self._ask(site, name)
            except errors.RepositoryNotFound:
                if site is sites[-1]:
                    raise
                continue
            if name != revision and listing.revision != revision:
                raise errors.RevisionNotFound.for_hub(self.title, revision)
            self._home = site
            return site, listing
        raise AssertionError

    def _ask(self, site: Transport, name: str) -> Listing:
        asked = {"Revision": name, "Recursive": "True"}
        url = address(site.endpoint, self.repo, "repo", "files", **asked)
        try:
            reply = site.get(url, limit=MAX_LISTING_BYTES, seconds=LISTING_SECONDS)
            return parse_listing(data_in(reply.body, self.title), name, self.title)
        except Refused as refused:
            refusal = refused
        if refusal.is_empty and name == BRANCH:  # nothing was committed yet
            return Listing(name, None, {})
        if refusal.is_missing and name != BRANCH and (refusal.is_empty or self._exists(site)):
            raise errors.RevisionNotFound.for_hub(self.title, name)
        raise refusal.as_error(self.title, doing="reading")

    def _exists(self, site: Transport) -> bool:
        url = address(site.endpoint, self.repo)
        try:
            site.get(url, limit=MAX_LISTING_BYTES, seconds=LISTING_SECONDS)
        except Refused:
            return False
        return True

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        site, token = self._home or self._sites[0], _token()
        if token is None or site is not self._sites[0]:
            text = f"{self.title} takes changes with a token only."
            raise errors.LoginRequired(text, hint=_TOKEN_HINT)
        log = logging.getLogger("modelscope_hub")
        if not log.handlers:  # else it makes one, which writes to stderr
            log.addHandler(logging.NullHandler())
        try:
            from modelscope_hub import HubApi, HubConfig
        except ImportError:
            raise errors.MissingDependency.for_extra("modelscope-hub", "modelscope") from None
        if not _origin(site.endpoint).is_private:
            text = f"{self.title} has an address without encryption; no token is sent there."
            raise errors.UsageError(text, hint="use https")
        with tempfile.TemporaryDirectory(prefix="oscar-zoo-", ignore_cleanup_errors=True) as folder:
            own = {"config_dir": Path(folder), "cache_dir": Path(folder)}
            api = HubApi(HubConfig(endpoint=site.endpoint, token=token, **own))
            # Made now, while the folder is there: it keeps an id in it.
            for session in vars(api.legacy).values():
                if hasattr(session, "max_redirects"):
                    # Its cookie would go to every port of the host, in the open too.
                    session.max_redirects = 0
            yield api

    def send(self, api: Any, files: Mapping[str, bytes], message: str) -> str | None:
        """Write `files` in one commit with the client `api`; its id, where the hub tells it."""
        large = [data for path, data in files.items() if _is_large(path, data)]
        objects = {sha256_hex(data): data for data in large}
        if objects:
            asked = [{"oid": oid, "size": len(data)} for oid, data in objects.items()]
            addresses = self._call(partial(api.legacy.validate_blobs, self.repo, "model", asked))
            for oid, data in objects.items():
                if addresses.get(oid) is not None:  # else the hub has it
                    self._put(api, str(addresses[oid]), data)
        actions = [_action(path, data) for path, data in sorted(files.items())]
        commit = api.legacy.create_commit
        reply = self._call(partial(commit, self.repo, "model", actions, message, revision=BRANCH))
        told = [reply.get(key) for key in ("oid", "CommitId")] if isinstance(reply, dict) else []
        return next((text for text in told if isinstance(text, str) and is_commit(text)), None)

    def _put(self, api: Any, address: str, data: bytes) -> None:
        """Send a file to where the hub wants it. The token goes along only to the hub itself and
        its subdomains."""
        home, target = _origin(api.legacy.endpoint), _origin(address)
        if not target.is_private:
            cause = "it wants files at an address without encryption"
            raise errors.HubUnreachable.for_hub(self.title, cause)
        domain = "." + home.host.removeprefix("www.")
        below = target.scheme == "https" and target.host.endswith(domain)
        headers = {} if target == home or below else {"Authorization": None, "Cookie": None}
        upload = partial(api.legacy.upload_blob, address, data, len(data), headers=headers)
        self._call(upload, len(data) / WRITE_RATE)

    def _make(self, call: Callable[[], object]) -> None:
        """`call`, to which a thing that exists is success."""
        from modelscope_hub.errors import AlreadyExistsError

        def run() -> None:
            with contextlib.suppress(AlreadyExistsError):
                call()

        self._call(run)

    def _call(self, call: Callable[[], T], least: float = 0) -> T:
        from modelscope_hub.errors import HubError

        seconds = max(_ANSWER_SECONDS, least)
        late = errors.HubTimeout.for_hub(self.title, f"did not finish within {seconds:.0f} s")
        try:
            return within(seconds, call, error=lambda: late)
        except errors.OscarZooError:
            raise
        except HubError as error:
            failure = _failure(error, self.title)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            cause = "its client does not understand the answer"
            failure = errors.HubUnreachable.for_hub(self.title, cause)
        raise failure


def _refused(reply: HttpReply, sent_token: bool) -> Refused:
    return Refused(reply.status, code_in(reply.body), sent_token=sent_token)


def _token() -> str | None:
    return os.environ.get("MODELSCOPE_API_TOKEN", "").strip() or None


def _configured_endpoint() -> str | None:
    """As the client reads it: a name without a scheme means https."""
    for variable in ("MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN"):
        text = os.environ.get(variable, "").strip().rstrip("/")
        if text:
            return text if text.lower().startswith(("http://", "https://")) else f"https://{text}"
    return None


def _failure(error: Any, title: str) -> errors.OscarZooError:
    from modelscope_hub import errors as theirs

    status = getattr(error, "status_code", None)
    if isinstance(error, theirs.RateLimitError):
        return errors.RateLimited.for_hub(title, getattr(error, "retry_after", None))
    if isinstance(error, theirs.RequestTimeoutError):
        return errors.HubTimeout.for_hub(title, "did not answer in time")
    if isinstance(status, int):
        code = code_in(getattr(error, "response_body", None))
        return Refused(status, code, sent_token=True).as_error(title, doing="writing")
    return errors.HubUnreachable.for_hub(title, "the connection broke off")


def _action(path: str, data: bytes) -> dict[str, object]:
    """One file of a commit, as the client writes it; `create` replaces, too."""
    action = {"action": "create", "path": path, "size": len(data)}
    if _is_large(path, data):
        return action | {"type": "lfs", "sha256": sha256_hex(data), "content": "", "encoding": ""}
    content = base64.b64encode(data).decode()
    return action | {"type": "normal", "sha256": "", "content": content, "encoding": "base64"}


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


class Refused(Exception):
    """The hub said no; what that means depends on the question. `code` is the envelope's.
    `is_missing`: there is no such repository, revision or file, or the hub will not say;
    `is_empty`: the repository has nothing at that revision."""

    def __init__(self, status: int, code: int | None, *, sent_token: bool) -> None:
        super().__init__(f"status {status}, code {code}")
        self.status, self.code, self.sent_token = status, code, sent_token
        self.is_missing = status == 404 and code != _NO_ACCESS
        self.is_empty = status == 404 and code == _NO_TREE

    def as_error(self, title: str, *, doing: str) -> errors.OscarZooError:
        """What to tell the user, without a word of the hub: its messages are long, Chinese, and not
        to be trusted."""
        no_access = self.status == 404 and self.code == _NO_ACCESS
        if self.sent_token and (self.status == 401 or self.code == _BAD_TOKEN):
            return errors.LoginRequired(f"{title} refused the token.", hint=_TOKEN_HINT)
        if self.status == 401 or (no_access and not self.sent_token):
            return errors.LoginRequired(f"{title} does not exist, or is private.", hint=_IF_PRIVATE)
        if self.status == 403 or no_access:
            return errors.Forbidden.for_hub(title, doing)
        if self.status == 404:
            return errors.RepositoryNotFound(
                f"{title} does not exist, or is private.", hint=_IF_PRIVATE
            )
        if self.status == 409 or self.code == _BRANCH_MOVED:
            return errors.StaleRevision.for_hub(title)
        code = "" if self.code is None else f", code {self.code}"
        return errors.HubUnreachable.for_hub(title, f"it answers with status {self.status}{code}")


@dataclass(frozen=True)
class Listing:
    """Every file at the branch, tag or commit `name`, and its commit where the hub tells it."""

    name: str
    commit: str | None
    files: Mapping[str, HubFile]

    @property
    def revision(self) -> str:
        """What this listing is called: its commit, else `name~` and a digest of the listing."""
        if self.commit is not None:
            return self.commit
        entries = [[file.path, file.size, file.sha256] for file in sorted(self.files.values())]
        return f"{self.name}{_MARK}{sha256_hex(strict_json.canonical_bytes(entries))}"

    def is_same(self, other: Listing) -> bool:
        if self.commit is None or other.commit is None:
            return self.files == other.files
        return self.commit == other.commit


def name_of(revision: str) -> str:
    """What to ask the hub for: `revision` without the digest of `Listing.revision`."""
    return revision.partition(_MARK)[0]


def address(endpoint: str, repo: str, *path: str, **query: str) -> str:
    parts = "/".join(quote(part, safe="") for part in (*repo.split("/"), *path))
    return f"{endpoint}/api/v1/models/{parts}" + (f"?{urlencode(query)}" if query else "")


def code_in(body: Any) -> int | None:
    if isinstance(body, bytes):
        try:
            body = strict_json.loads(body, what="the answer")
        except errors.MalformedFile:
            return None
    code = body.get("Code") if isinstance(body, dict) else None
    return code if type(code) is int else None


def data_in(body: bytes, title: str) -> Json:
    try:
        envelope = strict_json.loads(body, what="the answer", max_bytes=MAX_LISTING_BYTES)
    except errors.MalformedFile as error:
        cause = f"its answer is no JSON of its own ({error.reason})"
        raise errors.HubUnreachable.for_hub(title, cause) from None
    found = envelope if isinstance(envelope, dict) else {}
    if found.get("Success") is False or found.get("Code", 200) != 200:
        raise Refused(200, code_in(found), sent_token=False)
    if "Data" not in found:
        raise errors.HubUnreachable.for_hub(title, "its answer has no envelope")
    return found["Data"]


def parse_listing(data: Json, name: str, title: str) -> Listing:
    entries = (data["Files"] or []) if isinstance(data, dict) and "Files" in data else None
    if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        raise errors.HubUnreachable.for_hub(title, "its answer is no listing")
    if len(entries) >= MAX_ENTRIES:
        cause = f"it lists {len(entries):,} files and folders, and may leave out others"
        raise errors.HubUnreachable.for_hub(title, cause)
    files = (_file(entry, title) for entry in entries if entry.get("Type") != "tree")
    commit = name if is_commit(name) else _commit(data.get("LatestCommitter"), entries)
    return Listing(name, commit, by_path(title, files))


def _file(entry: Mapping[str, Json], title: str) -> HubFile:
    sha256 = entry.get("Sha256") or None
    if sha256 is not None:
        sha256 = sha256.lower() if isinstance(sha256, str) else ""
        if _SHA256.fullmatch(sha256) is None:
            raise errors.HubUnreachable.for_hub(title, "its listing has a sha256 that is none")
    return listed_file(title, entry.get("Path"), entry.get("Size"), sha256=sha256)


def _commit(latest: Json, entries: Sequence[Mapping[str, Json]]) -> str | None:
    """The full id of the last commit: told, or its beginning told and all of it known from a file
    it changed."""
    if not isinstance(latest, dict):
        return None
    told = latest.get("Id") or latest.get("ShortId")
    if type(told) is not str or _ABBREVIATED.fullmatch(told) is None:
        return None
    if is_commit(told):
        return told
    texts = {text for entry in entries if isinstance(text := entry.get("Revision"), str)}
    found = [text for text in texts if is_commit(text) and text.startswith(told)]
    return found[0] if len(found) == 1 else None
