"""What ModelScope answers: the envelope around everything, listings, the codes of its errors.

A listing names every file with size and sha256. It abbreviates the id of the commit it shows and
says of each file which commit changed it last; the two together give the full id, and the hub takes
that for a revision. Where they do not, a listing is named by its branch and a digest of itself, so
that a branch which moved is noticed all the same.

Source: modelscope-hub 0.5 for addresses and shapes; public measurements of the hub for what its
client does not say: the abbreviated commit, reading by commit, the codes, and that a listing ends
at 3,000 entries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.strict_json import Json
from oscar_zoo.errors import (
    Forbidden,
    HubUnreachable,
    LoginRequired,
    MalformedFile,
    OscarZooError,
    RepositoryNotFound,
    StaleRevision,
)
from oscar_zoo.registry.hubs.base import HubFile

MAX_LISTING_BYTES = 8 << 20
MAX_ENTRIES = 3000

_NO_ACCESS = 10010200001  # with 404: private or gated; with 400: bad input
_NO_TREE = 10990101004
_BAD_TOKEN = 10010103009
_BRANCH_MOVED = 10030000001
_TOKEN_HINT = "set MODELSCOPE_API_TOKEN to an access token of your account"
_IF_PRIVATE = f"check the name; if it is private: {_TOKEN_HINT}"
_MARK = "~"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ABBREVIATED = re.compile(r"[0-9a-f]{7,40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Refused(Exception):
    """The hub said no; what that means depends on the question. `code` is the envelope's, where
    there is one.

    `is_missing` says whether there is no such repository, revision or file, or the hub will not say
    that there is; `is_empty`, whether the repository is there, and nothing in it at that
    revision."""

    def __init__(self, status: int, code: int | None, *, sent_token: bool) -> None:
        super().__init__(f"status {status}, code {code}")
        self.status, self.code, self.sent_token = status, code, sent_token
        self.is_missing = status == 404 and code != _NO_ACCESS
        self.is_empty = status == 404 and code == _NO_TREE

    def as_error(self, title: str, *, doing: str) -> OscarZooError:
        """What to tell the user, without a word of the hub: its messages are long, Chinese, and not
        to be trusted."""
        no_access = self.status == 404 and self.code == _NO_ACCESS
        if self.sent_token and (self.status == 401 or self.code == _BAD_TOKEN):
            return LoginRequired(f"{title} refused the token.", hint=_TOKEN_HINT)
        if self.status == 401 or (no_access and not self.sent_token):
            return LoginRequired(f"{title} does not exist, or is private.", hint=_IF_PRIVATE)
        if self.status == 403 or no_access:
            return Forbidden.for_hub(title, doing)
        if self.status == 404:
            return RepositoryNotFound(f"{title} does not exist, or is private.", hint=_IF_PRIVATE)
        if self.status == 409 or self.code == _BRANCH_MOVED:
            return StaleRevision.for_hub(title)
        code = "" if self.code is None else f", code {self.code}"
        return HubUnreachable.for_hub(title, f"it answers with status {self.status}{code}")


def login_required(title: str) -> LoginRequired:
    """The error for writing without a token; there is no login but the variable."""
    return LoginRequired(f"{title} takes changes with a token only.", hint=_TOKEN_HINT)


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
        """Whether both are one commit; one content, where the hub does not tell commits."""
        if self.commit is None or other.commit is None:
            return self.files == other.files
        return self.commit == other.commit


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def name_of(revision: str) -> str:
    """What to ask the hub for: `revision` without the digest of `Listing.revision`."""
    return revision.partition(_MARK)[0]


def address(endpoint: str, repo: str, *path: str, **query: str) -> str:
    parts = "/".join(quote(part, safe="") for part in (*repo.split("/"), *path))
    return f"{endpoint}/api/v1/models/{parts}" + (f"?{urlencode(query)}" if query else "")


def code_in(body: Any) -> int | None:
    """The code in an envelope, parsed or as bytes, or `None` when it is none or has none."""
    if isinstance(body, bytes):
        try:
            body = strict_json.loads(body, what="the answer")
        except MalformedFile:
            return None
    code = body.get("Code") if isinstance(body, dict) else None
    return code if type(code) is int else None


def data_in(body: bytes, title: str) -> Json:
    """What is in the envelope of an answer with status 200."""
    try:
        envelope = strict_json.loads(body, what="the answer", max_bytes=MAX_LISTING_BYTES)
    except MalformedFile as error:
        cause = f"its answer is no JSON of its own ({error.reason})"
        raise HubUnreachable.for_hub(title, cause) from None
    found = envelope if isinstance(envelope, dict) else {}
    if found.get("Success") is False or found.get("Code", 200) != 200:
        raise Refused(200, code_in(found), sent_token=False)
    if "Data" not in found:
        raise HubUnreachable.for_hub(title, "its answer has no envelope")
    return found["Data"]


def parse_listing(data: Json, name: str, title: str) -> Listing:
    entries = (data["Files"] or []) if isinstance(data, dict) and "Files" in data else None
    if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        raise HubUnreachable.for_hub(title, "its answer is no listing")
    if len(entries) >= MAX_ENTRIES:
        cause = f"it lists {len(entries):,} files and folders, and may leave out others"
        raise HubUnreachable.for_hub(title, cause)
    files: dict[str, HubFile] = {}
    for entry in entries:
        if entry.get("Type") == "tree":
            continue
        file = _file(entry, title)
        if file.path in files:
            raise HubUnreachable.for_hub(title, "its listing names a file twice")
        files[file.path] = file
    commit = name if is_commit(name) else _commit(data.get("LatestCommitter"), entries)
    return Listing(name, commit, files)


def _file(entry: Mapping[str, Json], title: str) -> HubFile:
    path, size, sha256 = entry.get("Path"), entry.get("Size"), entry.get("Sha256") or None
    if type(path) is not str or type(size) is not int or size < 0:
        raise HubUnreachable.for_hub(title, "its listing has a file without path or size")
    if sha256 is None:
        return HubFile(path, size, None)
    if type(sha256) is not str or _SHA256.fullmatch(sha256.lower()) is None:
        raise HubUnreachable.for_hub(title, "its listing has a sha256 that is none")
    return HubFile(path, size, sha256.lower())


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
