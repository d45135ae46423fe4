"""What Hugging Face answers, read strictly: the commit of a repository, pages of a listing, and
refusals.

An answer that cannot be what was asked for, such as the web page of a proxy, counts as no answer:
another hub may be asked. Refusals are told apart by status and `X-Error-Code`; of their text only
two known sentences are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import mistaken_content
from oscar_zoo.artifact.strict_json import Json
from oscar_zoo.errors import (
    Forbidden,
    GatedRepository,
    HubUnreachable,
    LoginRequired,
    MalformedFile,
    NotFoundError,
    OscarZooError,
    RateLimited,
    RepositoryNotFound,
    RevisionNotFound,
)
from oscar_zoo.hubs.base import HubFile

MAX_PAGE_BYTES = 8 << 20
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEXT = re.compile(r'<([^<>]*)>\s*;\s*rel="?next"?')
_DISABLED = "Access to this resource is disabled."
_WRONG_TOKEN = "Invalid credentials in Authorization header"


def parse_commit(body: bytes, title: str) -> str:
    """The commit that the description of a repository names."""
    about = _parse(body, title)
    commit = about.get("sha") if isinstance(about, dict) else None
    if not _matches(COMMIT, commit):
        raise HubUnreachable.for_hub(title, "its answer names no commit")
    return str(commit)


def parse_page(body: bytes, title: str) -> Iterator[HubFile]:
    """The files of one page of a listing; a file in LFS has a sha256, another one its git oid."""
    rows = _parse(body, title)
    if not isinstance(rows, list):
        raise HubUnreachable.for_hub(title, "its answer is no listing")
    for row in rows:
        if not isinstance(row, dict) or type(row.get("type")) is not str:
            raise HubUnreachable.for_hub(title, "its listing has an entry without a type")
        if row["type"] == "file":
            yield _file(row, title)


def next_page(headers: Mapping[str, str], here: str, title: str) -> str | None:
    """Address of the page after the one at `here`, or `None`."""
    match = _NEXT.search(headers.get("link", ""))
    if match is None:
        return None
    try:
        same = urlsplit(match[1])[:2] == urlsplit(here)[:2]
    except ValueError:
        same = False
    if not same:
        raise HubUnreachable.for_hub(title, "its listing goes on at another host")
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
) -> OscarZooError:
    """The error for an answer that refuses.

    Args:
        sent_token: whether a token had been sent.
    """
    code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "")
    if code == "GatedRepo":
        return GatedRepository.for_hub(title)
    if message == _DISABLED:
        return Forbidden(
            f"{title} was disabled by Hugging Face.",
            hint="its web page may say why; try another hub",
        )
    if code == "RevisionNotFound":
        return RevisionNotFound.for_hub(title, revision or "main")
    if code == "EntryNotFound" or (status == 404 and not code and path is not None):
        return NotFoundError(
            f"{title} has no file {path}.", hint="see what is there: oscar-zoo list"
        )
    if status == 401 and sent_token and (message == _WRONG_TOKEN or not code):
        return LoginRequired.for_hub(title, sent_token=True)
    if status == 401:  # the hub says no more to strangers: a private repository or none
        return LoginRequired.for_hub(title, sent_token=False)
    if code == "RepoNotFound" or status in (404, 410):
        return RepositoryNotFound.for_hub(title)
    if status == 403:
        return Forbidden.for_hub(title, doing)
    if status == 429:
        return RateLimited.for_hub(title, None)
    return HubUnreachable.for_hub(title, f"it answers with status {status}")


def _parse(body: bytes, title: str) -> Json:
    try:
        return strict_json.loads(body, max_bytes=MAX_PAGE_BYTES)
    except MalformedFile:
        pass  # said in our own words
    mistaken = mistaken_content(body)
    seen = "an empty answer" if not body else mistaken[1] if mistaken else "something else"
    raise HubUnreachable.for_hub(title, f"it sends {seen} instead of JSON")


def _file(row: dict[str, Json], title: str) -> HubFile:
    path, size, oid, lfs = (row.get(key) for key in ("path", "size", "oid", "lfs"))
    if type(path) is not str or type(size) is not int or size < 0:
        raise HubUnreachable.for_hub(title, "its listing has a file without path or size")
    if lfs is None:
        if not _matches(COMMIT, oid):
            raise HubUnreachable.for_hub(title, "its listing has a file without an oid")
        return HubFile(path, size, None, str(oid))
    if (
        not isinstance(lfs, dict)
        or not _matches(_SHA256, lfs.get("oid"))
        or lfs.get("size") != size
    ):
        raise HubUnreachable.for_hub(title, "its listing has a file in LFS without a sha256")
    return HubFile(path, size, lfs["oid"])


def _matches(pattern: re.Pattern[str], value: Json) -> bool:
    return type(value) is str and pattern.fullmatch(value) is not None
