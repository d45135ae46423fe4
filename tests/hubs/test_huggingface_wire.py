import json
from typing import Any

import pytest

from oscar_zoo import errors
from oscar_zoo.registry.hubs import huggingface as wire
from oscar_zoo.registry.hubs.base import HubFile

HUB = "Hugging Face org/name"
OID, SHA = "a" * 40, "b" * 64
PAGE = b"<!DOCTYPE html><html><title>Sign in</title></html>"


def file(path: str = "a/b/k.pt", *, drop: str = "", **changes: Any) -> dict[str, Any]:
    lfs = {"oid": SHA, "size": 3}
    row = {"type": "file", "path": path, "size": 3, "oid": OID, "lfs": lfs} | changes
    return {key: value for key, value in row.items() if key != drop}


def page(*rows: object) -> list[HubFile]:
    return list(wire.parse_page(json.dumps(rows).encode(), HUB))


@pytest.mark.parametrize(
    "body, seen",
    [
        (PAGE, "a web page"),
        (b"", "an empty answer"),
        (b"upstream timed out", "something else"),
        (b'{"sha": "', "something else"),
        (b'{"sha": 1, "sha": 2}', "something else"),
        (b'{"sha": NaN}', "something else"),
        (b"[" * 5000, "something else"),
        (b"\xff\xfe{}", "something else"),
        (b'{"sha": "\\ud800"}', "something else"),
    ],
)
def test_an_answer_that_is_no_json_is_named(body: bytes, seen: str) -> None:
    for parse in (wire.parse_commit, lambda body, hub: list(wire.parse_page(body, hub))):
        with pytest.raises(errors.HubUnreachable) as caught:
            parse(body, HUB)
        assert caught.value.message == f"{HUB} cannot be reached: it sends {seen} instead of JSON."


def test_files_have_the_sha256_of_lfs_or_the_oid_of_git() -> None:
    rows = [
        {"type": "directory", "path": "a", "oid": OID, "size": 0},
        file(xetHash="x", lastCommit={}),
        file("README.md", drop="lfs"),
        {"type": "submodule", "path": "other"},
        file("empty", lfs=None, size=0),
    ]
    assert page(*rows) == [
        HubFile("a/b/k.pt", 3, SHA),
        HubFile("README.md", 3, None, OID),
        HubFile("empty", 0, None, OID),
    ]
    assert page() == []


@pytest.mark.parametrize(
    "row",
    [
        *(7, "file", None, {}, {"type": None}),
        file(drop="path"),
        file(drop="size"),
        file(path=7),  # type: ignore[arg-type]
        file(size=-1),
        file(size="3"),
        file(size=True),
        file(size=3.0),
        file(lfs=[]),
        file(lfs={}),
        file(lfs={"oid": SHA}),
        file(lfs={"oid": SHA, "size": 4}),
        file(lfs={"oid": OID, "size": 3}),
        file(lfs={"oid": SHA.upper(), "size": 3}),
        file(lfs=None, oid="x"),
        file(lfs=None, drop="oid"),
    ],
)
def test_a_listing_that_is_none(row: object) -> None:
    with pytest.raises(errors.HubUnreachable, match=f"{HUB} cannot be reached: its listing has"):
        page(file("good"), row)
    with pytest.raises(errors.HubUnreachable, match="its answer is no listing"):
        list(wire.parse_page(b'{"error": "none"}', HUB))


HERE = "https://hub.example/api/models/org/name/tree/main?recursive=true"


@pytest.mark.parametrize(
    "address",
    [
        "https://evil.example/x",
        "http://hub.example/x",
        "https://hub.example:444/x",
        "https://hub.example@evil.example/x",
        "//hub.example/x",
        "/x",
        "https://[hub/x",
    ],
)
def test_a_listing_never_goes_on_elsewhere(address: str) -> None:
    with pytest.raises(errors.HubUnreachable, match="its listing goes on at another host"):
        wire.next_page({"link": f'<{address}>; rel="next"'}, HERE, HUB)


WRONG_TOKEN = "Invalid credentials in Authorization header"


def said(
    status: int, code: str = "", message: str = "", *, token: bool = False, path: str | None = None
) -> Exception:
    headers = {"x-error-code": code, "x-error-message": message}
    return wire.refusal(HUB, status, headers, sent_token=token, revision="v1", path=path)


@pytest.mark.parametrize(
    "error, kind, words",
    [
        (said(401, "GatedRepo"), errors.GatedRepository, "is gated"),
        (said(403, "GatedRepo", token=True), errors.GatedRepository, "is gated"),
        (said(403, "", "Access to this resource is disabled."), errors.Forbidden, "was disabled"),
        (said(404, "RevisionNotFound"), errors.RevisionNotFound, "has no revision v1"),
        (said(404, "EntryNotFound", path="a/k.pt"), errors.NotFoundError, "has no file a/k.pt"),
        (said(404, path="a/k.pt"), errors.NotFoundError, "has no file a/k.pt"),
        (said(404), errors.RepositoryNotFound, "does not exist"),
        (said(410), errors.RepositoryNotFound, "does not exist"),
        (said(404, "RepoNotFound", path="a"), errors.RepositoryNotFound, "does not exist"),
        # all that strangers are told
        (said(401, "RepoNotFound"), errors.LoginRequired, "does not exist, or is private"),
        (said(401), errors.LoginRequired, "does not exist, or is private"),
        (said(401, token=True), errors.LoginRequired, "refused the token"),
        (
            said(401, "RepoNotFound", WRONG_TOKEN, token=True),
            errors.LoginRequired,
            "refused the token",
        ),
        (said(403, token=True), errors.Forbidden, "does not allow reading with this account"),
        (said(429), errors.RateLimited, "limits the rate"),
        (said(400), errors.HubUnreachable, "it answers with status 400"),
        (said(500), errors.HubUnreachable, "it answers with status 500"),
    ],
)
def test_every_refusal_is_its_own_sentence(
    error: Exception, kind: type[errors.OscarZooError], words: str
) -> None:
    assert type(error) is kind and isinstance(error, errors.OscarZooError)
    assert error.message.startswith(HUB) and words in error.message
    assert error.hint and "\n" not in error.message + error.hint
