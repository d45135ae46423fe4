"""Writing to Hugging Face: whole round trips with both versions of the client, in child
processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from hub_uses import HUB_2, VERSIONS
from hub_wire import OPENSSL
from huggingface_zoo import CANARY, FILES, QWEN, ROOT, K, running_hub


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub(monkeypatch) as server:
        yield server


START = """
import json, os, sys
from functools import partial
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import OscarZooError
from oscar_zoo.registry.hubs import huggingface
from oscar_zoo.registry.hubs.base import Change
from oscar_zoo.registry.hubs.http import Limits
LIMITS = Limits(connect=20, read=20)
ID = ArtifactId("Qwen3-8B", "seq1_prompt1_group128")
TOKEN = os.environ["HF_TOKEN"]
def hub(repo="org/new", revision=None):
    return huggingface.open_huggingface(repo, revision, limits=LIMITS)
def change(parent, text="[]", artifact=ID, propose=False):
    files = {"k.pt": b"k" * 300_000, "v.pt": b"v" * 300_000, "oscar.json": b"{}"} if artifact else {}
    return Change(artifact, files, {"index.json": text.encode(), "README.md": b"# card"}, parent, "publish it", propose)
def fails(call, *arguments):
    try:
        return f"no error: {call(*arguments)}"
    except OscarZooError as error:
        link = error
        while link is not None:
            assert TOKEN not in f"{link!r} {vars(link)}" and not hasattr(link, "request"), link
            link = link.__cause__ or link.__context__
        return f"{type(error).__name__}: {error.message}"
found = {}
"""  # noqa: E501
END = "\nprint(json.dumps(found))\n"
TITLE = "Hugging Face org/new"


def child(
    server: HubServer, home: Path, version: int, code: str, *arguments: str
) -> dict[str, Any]:
    """What `code` put into `found`; it must say nothing else, and never its token."""
    environment = server.environment(home) | {
        "HF_TOKEN": CANARY,
        "OSCAR_ZOO_CACHE": str(home / "cache"),
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *([str(HUB_2)] if version == 2 else [])]
    )
    command = [sys.executable, "-c", START + code + END, *arguments]
    done = subprocess.run(
        command, env=environment, cwd=home, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1
    assert CANARY not in done.stdout
    return dict(json.loads(done.stdout))


ROUND_TRIP = """
new = hub()
found["missing"] = fails(new.artifacts)
new.create()
new.create(private=True)
first = new.revision
made = new.commit(change(first))
found |= {"made": made.revision, "proposal": made.proposal, "view": new.revision == first}
new.refresh()
found |= {"head": new.revision, "artifacts": list(map(str, new.artifacts()))}
found["same"] = all(new.fetch(ID, name, limit=1 << 20) == data for name, data in change(first).files.items())
found["root"] = [new.root_file("index.json").decode(), new.root_file("README.md").decode()]
new.tag("oz-a", made.revision, "words")
new.tag("oz-a", made.revision, "words")
new.tag("oz-b", None, "words")
found |= {"moved": fails(new.tag, "oz-a", first, "words"), "tagged": hub(revision="oz-a").revision}
found |= {"again": fails(new.commit, change(made.revision)), "stale": fails(new.commit, change(first, "[1]", None))}
offered = new.commit(change(made.revision, "[2]", None, propose=True))
found["nothing new"] = fails(new.commit, change(made.revision, "[]", None, propose=True))
found |= {"offered": offered.proposal, "offer": hub(revision=offered.revision).root_file("index.json").decode()}
new.refresh()
found["last"] = new.revision
"""  # noqa: E501


@pytest.mark.parametrize("version", VERSIONS)
def test_round_trip(server: HubServer, tmp_path: Path, version: int) -> None:
    found = child(server, tmp_path, version, ROUND_TRIP)
    repo = server.repository("org/new")
    created, published = repo.commits  # exactly one commit for one publish
    assert published.message == "publish it"
    assert set(published.files) - set(created.files) == {
        *(f"{QWEN}/{name}" for name in ("k.pt", "v.pt", "oscar.json")),
        "index.json",
        "README.md",
    }
    assert found == {
        "missing": f"RepositoryNotFound: {TITLE} does not exist, or this account may not see it.",
        "made": published.oid,
        "proposal": None,
        "view": True,
        "head": published.oid,
        "artifacts": [str(QWEN)],
        "same": True,
        "root": ["[]", "# card"],
        "moved": (
            f"ConflictError: the tag oz-a of {TITLE} is on commit {published.oid}, not"
            f" {created.oid}."
        ),
        "tagged": published.oid,
        "again": f"StaleRevision: {QWEN} is already on {TITLE}.",
        "stale": f"StaleRevision: {TITLE} changed while this was being published.",
        "nothing new": (
            f"ConflictError: {TITLE} has all of this already: there is nothing to propose."
        ),
        "offered": f"{server.url}/org/new/discussions/1",
        "offer": "[2]",
        "last": published.oid,
    }
    assert repo.tags == {"oz-a": published.oid, "oz-b": published.oid}
    assert not any("xet" in record.path for record in server.requests)
    assert all(record.credentials == (record.method != "PUT") for record in server.requests)


OVER_TLS = """
there = hub("org/name")
found["cdn"] = len(there.fetch(ID, "k.pt", limit=1 << 20))
found["http"] = fails(partial(there.fetch, ID, "v.pt", limit=1 << 20))
found["file"] = len(there.fetch(ID, "oscar.json", limit=99))
os.environ["HF_ENDPOINT"] = sys.argv[1]
found["stranger"] = fails(hub("org/else").artifacts)
"""


@pytest.mark.skipif(OPENSSL is None, reason="no openssl to make a certificate with")
@pytest.mark.parametrize("version", VERSIONS)
def test_over_tls_redirects_stay_there(tmp_path: Path, version: int) -> None:
    with HubServer(tls=True) as server, HubServer(tls=True) as stranger:
        server.repository("org/name", files=FILES)
        server.fault("redirect", "*/k.pt", to="cdn")
        server.fault("redirect", "*/v.pt", to="http")
        found = child(server, tmp_path, version, OVER_TLS, stranger.url)
        elsewhere = [
            (record.host, record.credentials)
            for record in server.requests
            if record.host != "origin"
        ]
    unreachable = "HubUnreachable: Hugging Face org/{} cannot be reached: "
    assert found == {
        "cdn": len(K),
        "http": unreachable.format("name") + "it redirects to an unsafe address.",
        "file": 8,
        "stranger": unreachable.format("else") + "its certificate is not trusted.",
    }
    assert elsewhere == [("cdn", False)]
    assert stranger.requests == []


READ_ONLY = "Forbidden: {} does not allow writing with this account."
STALE = "StaleRevision: {} changed while this was being published."
BROKEN = "HubUnreachable: {} cannot be reached: "
LATE = "HubTimeout: {} was not done with writing within 1 s."
TROUBLE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "org/refused": ("status", "*/commit/*", {"code": 401}, "LoginRequired: {} refused the token."),
    "org/read-only": ("status", "*/commit/*", {"code": 403}, READ_ONLY),
    "org/upload-refused": ("status", "/lfs/*", {"code": 403}, READ_ONLY),
    "org/vanished": (
        "status",
        "*/preupload/*",
        {"code": 404, "error_code": "RepoNotFound"},
        "RepositoryNotFound: {}",
    ),
    "org/conflict": ("status", "*/commit/*", {"code": 409}, STALE),
    "org/second-writer": ("move", "*/commit/*", {}, STALE),
    "org/busy": (
        "status",
        "*/commit/*",
        {"code": 429},
        "RateLimited: {} limits the rate of requests.",
    ),
    "org/broken": ("status", "*/commit/*", {"code": 500}, BROKEN + "it answers with status 500."),
    "org/lost-reply": ("lose_reply", "*/commit/*", {}, BROKEN + "the connection broke off."),
    "org/page": ("html", "*/commit/*", {}, BROKEN + "its answer makes no sense."),
    "org/silent-commit": ("black_hole", "*/commit/*", {}, LATE),
    "org/silent-upload": ("black_hole", "/lfs/*", {}, LATE),
}
TROUBLES = """
huggingface.http.WRITE_RATE = 1 << 40
for repo in sys.argv[1:]:
    huggingface.WRITE_SECONDS = 1 if "silent" in repo else 60
    there = hub(repo)
    found[repo] = fails(there.commit, change(there.revision))
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_every_trouble_of_writing_has_its_sentence(
    server: HubServer, tmp_path: Path, version: int
) -> None:
    """Two uploads that never end are among them: they must not keep the process alive either."""
    for repo_id, (kind, path, arguments, _) in TROUBLE.items():
        repo = server.repository(repo_id)
        if kind == "move":
            arguments = {"call": partial(repo.commit, {"other": b"of somebody else"})}
        where = path.replace("/commit/", f"/{repo_id}/commit/").replace(
            "/preupload/", f"/{repo_id}/preupload/"
        )
        server.fault(kind, where.replace("/lfs/", f"/lfs/hf/{repo_id}/"), **arguments)
    found = child(server, tmp_path, version, TROUBLES, *TROUBLE)
    for repo_id, (_, _, _, sentence) in TROUBLE.items():
        assert found[repo_id].startswith(sentence.format(f"Hugging Face {repo_id}")), found[repo_id]
    written = [
        repo_id
        for repo_id in TROUBLE
        if f"{QWEN}/k.pt" in server.repository(repo_id).commits[-1].files
    ]
    assert written == ["org/lost-reply"]


ODD = """
there = hub("org/there")
server = os.environ["HF_ENDPOINT"]
found["card"] = fails(there.commit, change(there.revision))
found["no proposal"] = fails(there.commit, change(there.revision, propose=True))
there, odd = hub("org/there"), hub("org/odd")
found["no commit"] = fails(odd.commit, change(odd.revision))
def at(address):
    os.environ["HF_ENDPOINT"] = address
    return fails(hub("org/there").create)
found["clear"] = at("http://user:secret@hub.example:8080")
found["address"] = at("ftp://hub.example")
found["closed"] = at(sys.argv[1])
os.environ["HF_ENDPOINT"], os.environ["HF_TOKEN"] = server, "two words"
found["token"] = fails(there.create)
del os.environ["HF_TOKEN"]
found["stranger"] = fails(there.create)
os.environ["HF_TOKEN"] = TOKEN
found["name"] = fails(hub("org/a..b").create)
import huggingface_hub
huggingface_hub.constants.HF_HUB_OFFLINE = True
found["offline"] = fails(there.create)
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_odd_answers_and_settings(server: HubServer, tmp_path: Path, version: int) -> None:
    for repo_id, body in (
        (
            "org/there",
            '{"commitUrl": "https://hub.example/commit", "commitOid": "%s"}' % ("a" * 40),
        ),
        ("org/odd", '{"commitUrl": "https://hub.example/commit", "commitOid": "none"}'),
    ):
        server.repository(repo_id)
        server.fault("status", f"*/{repo_id}/commit/*", code=200, body=body)
    refusal = '{"errors": [{"message": "bad"}], "warnings": []}'
    server.fault("status", "*/validate-yaml", 1, code=400, body=refusal)
    found = child(server, tmp_path, version, ODD, server.closed_port())
    title = "Hugging Face org/there"
    broken = f"HubUnreachable: {title} cannot be reached: "
    assert found == {
        "no proposal": broken + "its answer makes no sense.",
        "no commit": broken.replace("there", "odd") + "its answer makes no sense.",
        "card": f"UsageError: {title} does not take the metadata at the top of README.md.",
        "clear": "UsageError: the hub's address, http://hub.example, is no https address.",
        "address": "UsageError: the hub's address, ftp://hub.example, is no https address.",
        "closed": broken + "connection refused.",
        "token": f"LoginRequired: the token for {title} has characters that no token has.",
        "stranger": f"LoginRequired: {title} takes changes from users only.",
        "name": "UsageError: 'org/a..b' is no repository of Hugging Face.",
        "offline": f"OfflineError: {title} is not asked: HF_HUB_OFFLINE is set.",
    }
