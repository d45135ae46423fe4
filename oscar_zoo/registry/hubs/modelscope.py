"""ModelScope: one listing, then each file at the commit it showed; changes through the hub's own
client.

Reading needs no client. The public hub is two sites; like the client, a source whose address nobody
configured asks the second one when the first has no such repository. The token of the user is for
one of them, the first.

The hub has no compare-and-swap. A change is refused when the branch is not where the caller saw it,
or has one of the new files; what the branch has afterwards is compared with what was sent. Between
the two looks somebody else may write: versions survive that, but the later index wins, and without
the other's entry until that is published once more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.errors import (
    ConflictError,
    DigestMismatchError,
    NetworkError,
    NotFoundError,
    RepositoryNotFound,
    RevisionNotFound,
    StaleRevision,
    UsageError,
)
from oscar_zoo.registry.hubs import modelscope_wire as wire
from oscar_zoo.registry.hubs.base import Change, Commit, HubFile, Limits, is_true
from oscar_zoo.registry.hubs.http import HttpReply, Transport
from oscar_zoo.registry.hubs.modelscope_wire import Client, Listing, Refused
from oscar_zoo.registry.hubs.remote import RemoteHub

BRANCH = "master"
SITES = ("https://modelscope.cn", "https://www.modelscope.ai")
"""The public hub, in the order the client asks."""
LISTING_SECONDS = 60.0
_COOKIE = "m_session_id"


class ModelScopeHub(RemoteHub):
    """The repository `repo` on ModelScope; `master` is the only branch that is written. The default
    of `endpoint` is that of the client; nothing is asked yet."""

    def __init__(
        self,
        repo: str,
        revision: str | None = None,
        *,
        limits: Limits | None = None,
        endpoint: str | None = None,
    ) -> None:
        super().__init__("ms", "ModelScope", repo, revision)
        own = endpoint or _configured_endpoint()
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
        if revision is not None and (known or wire.is_commit(revision)):
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
        asked = {"Revision": wire.name_of(revision), "FilePath": file.path}
        url = wire.address(site.endpoint, self.repo, "repo", **asked)
        try:
            return site.get(url, limit=limit, size=file.size, progress=progress).body
        except Refused as refused:
            refusal = refused
        if refusal.is_missing:
            text = f"{self.title} lists {file.path}, but does not have it."
            raise NotFoundError(text, hint="tell its owner")
        raise refusal.as_error(self.title, doing="reading")

    def create(self, *, private: bool = False) -> None:
        with self._client() as client:
            client.create(private=private)

    def write(self, change: Change) -> Commit:
        if change.propose:
            text = f"{self.title} takes no proposals."
            raise UsageError(text, hint="publish without --create-pr")
        before = self._find(BRANCH)[1]
        new = change.paths.keys() - change.root.keys()
        if change.parent not in (None, before.revision) or not new.isdisjoint(before.files):
            raise StaleRevision.for_hub(self.title)
        with self._client() as client:
            made = client.commit(change.paths, change.message, BRANCH)
        self._last = after = self._find(BRANCH)[1]
        self._check_arrived(change, after)
        return Commit(made or after.revision)

    def tag(self, name: str, revision: str | None, message: str) -> None:
        wanted = self._find(revision or BRANCH)[1]
        with self._client() as client:
            client.tag(name, wanted.commit or wanted.name)
        if not self._find(name)[1].is_same(wanted):
            raise ConflictError(
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
                raise DigestMismatchError.for_content(
                    f"{path} on {self.title}", want=want, got=there.sha256, hint=hint
                )
            raise NetworkError(
                f"{self.title} took the change, but does not have {path} as it was sent.",
                hint="somebody else may have written at the same time: run it again, which is safe",
            )

    def _find(self, revision: str) -> tuple[Transport, Listing]:
        """The site that has the repository, and its listing at `revision`."""
        name = wire.name_of(revision)
        sites = [self._home] if self._home else self._sites
        for site in sites:
            try:
                listing = self._ask(site, name)
            except RepositoryNotFound:
                if site is sites[-1]:
                    raise
                continue
            if name != revision and listing.revision != revision:
                raise RevisionNotFound.for_hub(self.title, revision)
            self._home = site
            return site, listing
        raise AssertionError

    def _ask(self, site: Transport, name: str) -> Listing:
        asked = {"Revision": name, "Recursive": "True"}
        url = wire.address(site.endpoint, self.repo, "repo", "files", **asked)
        try:
            reply = site.get(url, limit=wire.MAX_LISTING_BYTES, seconds=LISTING_SECONDS)
            return wire.parse_listing(wire.data_in(reply.body, self.title), name, self.title)
        except Refused as refused:
            refusal = refused
        if refusal.is_empty and name == BRANCH:  # nothing was committed yet
            return Listing(name, None, {})
        if refusal.is_missing and name != BRANCH and (refusal.is_empty or self._exists(site)):
            raise RevisionNotFound.for_hub(self.title, name)
        raise refusal.as_error(self.title, doing="reading")

    def _exists(self, site: Transport) -> bool:
        url = wire.address(site.endpoint, self.repo)
        try:
            site.get(url, limit=wire.MAX_LISTING_BYTES, seconds=LISTING_SECONDS)
        except Refused:
            return False
        return True

    def _client(self) -> AbstractContextManager[Client]:
        site, token = self._home or self._sites[0], _token()
        if token is None or site is not self._sites[0]:
            raise wire.login_required(self.title)
        return Client.opened(self.repo, title=self.title, endpoint=site.endpoint, token=token)


def _refused(reply: HttpReply, sent_token: bool) -> Refused:
    return Refused(reply.status, wire.code_in(reply.body), sent_token=sent_token)


def _token() -> str | None:
    return os.environ.get("MODELSCOPE_API_TOKEN", "").strip() or None


def _configured_endpoint() -> str | None:
    """As the client reads it: a name without a scheme means https."""
    for variable in ("MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN"):
        text = os.environ.get(variable, "").strip().rstrip("/")
        if text:
            return text if text.lower().startswith(("http://", "https://")) else f"https://{text}"
    return None
