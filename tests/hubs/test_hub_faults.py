"""Every fault of the loopback hub, seen by a client that checks nothing."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from hub_repositories import Repository
from hub_server import HubServer

DATA = bytes(range(256)) * 300
FILES = {"a/x.pt": DATA, "a/y.pt": b"other", "README.md": b"# card\n"}
FILE = "/org/name/resolve/main/a/x.pt"
MS_FILE = "/api/v1/models/org/name/repo?Revision=master&FilePath=a%2Fx.pt"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as server:
        server.repository("org/name", files=FILES)
        server.repository("org/name", "ms", files=FILES)
        yield server


@pytest.fixture
def repo(server: HubServer) -> Repository:
    return server.repository("org/name")


def ask(
    server: HubServer,
    path: str,
    method: str = "GET",
    body: object = None,
    timeout: float = 20,
    **headers: str,
) -> Answer:
    """One request on a connection of its own; `IncompleteRead` and connection errors are the
    caller's."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=timeout)
    try:
        headers = {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        reply = connection.getresponse()
        return Answer(reply.status, dict(reply.getheaders()), reply.read())
    finally:
        connection.close()


def raw(server: HubServer, path: str) -> bytes:
    """Everything a connection carries until the server closes it."""
    place = urlsplit(server.url)
    with socket.create_connection(
        (place.hostname or "", place.port or 0), timeout=20
    ) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("path", [FILE, MS_FILE])
def test_a_flip_changes_one_byte_for_as_many_requests_as_told(server: HubServer, path: str) -> None:
    fault = server.fault("flip", path="*/x.pt", times=2, at=1000)
    flipped = DATA[:1000] + bytes([DATA[1000] ^ 0xFF]) + DATA[1001:]
    assert ask(server, path).body == flipped
    assert ask(server, path, Range="bytes=990-1009").body == flipped[990:1010]
    assert ask(server, path).body == DATA
    assert fault.hits == 2


def test_blocks_are_emptied_exchanged_and_repeated(server: HubServer) -> None:
    block, at = DATA[1000:1040], {"at": 1000, "n": 40}
    bodies = {
        "hole": DATA[:1000] + bytes(40) + DATA[1040:],
        "exchange": block + DATA[40:1000] + DATA[:40] + DATA[1040:],
        "repeat": DATA[:1040] + block + DATA[1040:],
    }
    for kind, body in bodies.items():
        fault = server.fault(kind, path="*/x.pt", **at)
        assert ask(server, FILE).body == body
        fault.remove()


def test_content_faults_without_a_path_leave_listings_alone(server: HubServer) -> None:
    server.fault("empty")
    assert json.loads(ask(server, "/api/models/org/name").body)["id"] == "org/name"
    assert ask(server, FILE).body == b""
    listing = server.fault("empty", path="*/api/models/*")
    assert ask(server, "/api/models/org/name").body == b""
    listing.remove()
    assert ask(server, "/api/models/org/name").body != b""


def test_the_most_recent_fault_wins_and_an_exhausted_one_steps_aside(server: HubServer) -> None:
    server.fault("status", code=503)
    server.fault("status", path="*x.pt", times=1, code=429, retry_after=7, error_code="Busy")
    first = ask(server, FILE)
    assert (first.status, first.headers["Retry-After"], first.headers["X-Error-Code"]) == (
        429,
        "7",
        "Busy",
    )
    assert ask(server, FILE).status == 503
    server.clear_faults()
    assert ask(server, FILE).status == 200


def test_modelscope_errors_keep_the_envelope(server: HubServer) -> None:
    server.fault("status", code=409, error_code=10030000001)
    answer = ask(server, MS_FILE)
    assert (answer.status, json.loads(answer.body)["Code"]) == (409, 10030000001)


def test_a_cut_ends_the_connection_after_n_bytes(server: HubServer) -> None:
    server.fault("cut", times=1, after=777)
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(server, FILE)
    assert caught.value.partial == DATA[:777]
    assert (server.requests[-1].status, server.requests[-1].sent) == (200, 777)


def test_extra_bytes_are_counted_only_when_honest(server: HubServer) -> None:
    server.fault("extra", n=3, times=1)
    assert ask(server, FILE).body == DATA + b"\0\0\0"
    server.fault("extra", n=3, honest=False, times=1)
    head, _, body = raw(server, FILE).partition(b"\r\n\r\n")
    assert body == DATA + b"\0\0\0"
    assert f"Content-Length: {len(DATA)}".encode() in head


def test_a_wrong_length_is_stated_on_head_and_get(server: HubServer) -> None:
    server.fault("wrong_length", by=-7)
    assert ask(server, FILE, "HEAD").headers["Content-Length"] == str(len(DATA) - 7)
    head, _, body = raw(server, FILE).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(DATA) - 7}".encode() in head
    assert body == DATA


def test_ranges_are_honoured_unless_ignored(server: HubServer) -> None:
    part = ask(server, FILE, Range="bytes=10-19")
    assert (part.status, part.body, part.headers["Content-Range"]) == (
        206,
        DATA[10:20],
        f"bytes 10-19/{len(DATA)}",
    )
    assert ask(server, FILE, Range="bytes=-5").body == DATA[-5:]
    beyond = ask(server, FILE, Range=f"bytes={len(DATA)}-")
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, f"bytes */{len(DATA)}")
    server.fault("ignore_range")
    whole = ask(server, FILE, Range="bytes=10-19")
    assert (whole.status, whole.body) == (200, DATA)
    assert server.requests[-1].range == "bytes=10-19"


def test_etags_tell_the_content_unless_told_otherwise(server: HubServer) -> None:
    sha256 = hashlib.sha256(DATA).hexdigest()
    assert ask(server, FILE, "HEAD").headers["X-Linked-Etag"] == f'"{sha256}"'
    server.fault("new_etag")
    one, two = ask(server, FILE, "HEAD").headers["ETag"], ask(server, FILE).headers["ETag"]
    assert len({one, two, f'"{sha256}"'}) == 3


def test_bodies_are_replaced_by_a_page_a_pointer_nothing_or_another_file(server: HubServer) -> None:
    server.fault("html", times=1)
    page = ask(server, FILE)
    assert (page.status, page.headers["Content-Type"].split(";")[0]) == (200, "text/html")
    server.fault("lfs_pointer", times=1)
    assert hashlib.sha256(DATA).hexdigest().encode() in ask(server, FILE).body
    server.fault("empty", times=1)
    assert ask(server, FILE).body == b""
    server.fault("swap", other="a/y.pt", times=1)
    assert ask(server, FILE).body == b"other"
    assert ask(server, FILE).body == DATA


@pytest.mark.parametrize("name", ["X-Repo-Commit", "X-Linked-Size", "Content-Length"])
def test_one_header_is_dropped(server: HubServer, name: str) -> None:
    assert name in ask(server, FILE).headers
    server.fault("drop_header", name=name.lower())
    answer = ask(server, FILE)
    assert name not in answer.headers
    assert answer.body == DATA


def test_redirects_go_where_told_and_are_answered_there(server: HubServer) -> None:
    port = f"http://127.0.0.1:{urlsplit(server.cdn_url).port}"
    for to, base in [
        ("same", server.url),
        ("cdn", server.cdn_url),
        ("port", port),
        ("http", server.plain_url),
    ]:
        server.fault("redirect", path="*x.pt", times=1, to=to, code=307)
        answer = ask(server, FILE)
        assert (answer.status, answer.headers["Location"]) == (307, f"{base}{FILE}?redirected=1")
    server.fault("redirect", path="*x.pt", times=1, to="https://example.com/x")
    assert ask(server, FILE).headers["Location"] == "https://example.com/x"
    server.fault("redirect", to="same")
    assert ask(server, f"{FILE}?redirected=1").body == DATA


def test_nothing_comes_out_of_a_black_hole(server: HubServer) -> None:
    server.fault("black_hole", path="*x.pt")
    with pytest.raises(TimeoutError):
        ask(server, FILE, timeout=0.3)
    while not server.requests:  # a busy server comes to it later than its client gave up
        time.sleep(0.01)
    assert server.requests[-1].status == 0
    with pytest.raises(TimeoutError):
        place = urlsplit(server.hang_accept())
        connection = http.client.HTTPConnection(place.netloc, timeout=0.3)
        connection.request("GET", "/")
        connection.getresponse()
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(urlsplit(server.closed_port()).netloc, timeout=5).connect()


@pytest.mark.parametrize("after", [None, 10])
def test_a_reset_is_no_orderly_end(server: HubServer, after: int | None) -> None:
    server.fault("reset", after=after)
    with pytest.raises(ConnectionResetError):
        ask(server, FILE)


@pytest.mark.parametrize("headers", [False, True])
def test_a_slow_answer_arrives_whole(server: HubServer, headers: bool) -> None:
    fault = server.fault("slow", bytes_per_second=4 * len(DATA), headers=headers)
    assert ask(server, FILE).body == DATA
    assert fault.hits == 1


def test_a_slow_answer_trickles(server: HubServer) -> None:
    server.fault("slow", bytes_per_second=1, headers=True)
    place = urlsplit(server.url)
    with socket.create_connection(
        (place.hostname or "", place.port or 0), timeout=20
    ) as connection:
        connection.sendall(f"GET {FILE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(100) == b"H"


def test_hooks_run_before_the_answer(server: HubServer, repo: Repository) -> None:
    before = repo.head()
    server.fault("move", path="*/revision/main", times=1, call=lambda: repo.commit({"new": b"1"}))
    seen = json.loads(ask(server, "/api/models/org/name/revision/main").body)["sha"]
    assert seen == repo.head() != before


def test_a_second_writer_makes_the_parent_stale(server: HubServer, repo: Repository) -> None:
    parent = repo.head()
    server.fault(
        "second_writer", times=1, call=lambda: repo.commit({"theirs": b"1"}, message="theirs")
    )
    assert commit(server, parent).status == 412
    assert "mine" not in repo.files()
    assert commit(server, repo.head()).status == 200
    assert [one.message for one in repo.commits] == ["First commit", "theirs", "mine"]


def test_a_lost_reply_leaves_the_work_done(server: HubServer, repo: Repository) -> None:
    server.fault("lose_reply", path="*/commit/*")
    with pytest.raises(http.client.RemoteDisconnected):
        commit(server, repo.head())
    assert repo.files()["mine"] == b"1"


def test_tags_are_refused_and_commits_taken(server: HubServer, repo: Repository) -> None:
    server.fault("refuse_tag", status=500)
    body, token = {"tag": "v1"}, "Bearer hf_test"
    assert commit(server, repo.head()).status == 200
    assert (
        ask(server, "/api/models/org/name/tag/main", "POST", body, Authorization=token).status
        == 500
    )
    assert repo.tags == {}
    server.clear_faults()
    assert (
        ask(server, "/api/models/org/name/tag/main", "POST", body, Authorization=token).status
        == 200
    )
    assert repo.tags == {"v1": repo.head()}


def test_faults_that_do_not_exist_are_refused(server: HubServer) -> None:
    with pytest.raises(ValueError, match="flop"):
        server.fault("flop")
    with pytest.raises(TypeError):
        server.fault("cut", before=3)


def test_a_hook_that_fails_fails_the_test() -> None:
    def broken() -> None:
        raise RuntimeError("broken hook")

    with pytest.raises(AssertionError, match="broken hook"), HubServer() as server:
        server.fault("move", call=broken)
        assert ask(server, "/").status == 500


@pytest.mark.parametrize("head", ["Content-Length: 500", "Transfer-Encoding: chunked"])
def test_half_a_request_is_none(server: HubServer, head: str) -> None:
    place = urlsplit(server.url)
    with socket.create_connection(
        (place.hostname or "", place.port or 0), timeout=20
    ) as connection:
        connection.sendall(
            f"POST /api/repos/create HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n1f4\r\n".encode() + b"{"
        )
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert server.requests == []


def commit(server: HubServer, parent: str) -> Answer:
    lines = [
        {"key": "header", "value": {"summary": "mine", "description": "", "parentCommit": parent}},
        {"key": "file", "value": {"path": "mine", "content": "MQ==", "encoding": "base64"}},
    ]
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    body = "\n".join(json.dumps(line) for line in lines)
    connection.request(
        "POST", "/api/models/org/name/commit/main", body, {"Authorization": "Bearer hf_test"}
    )
    reply = connection.getresponse()
    return Answer(reply.status, dict(reply.getheaders()), reply.read())
