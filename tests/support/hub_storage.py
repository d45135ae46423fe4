"""Where large files lie: addresses with a signature, where neither hub asks for a token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from hub_repositories import Commit, HubState, Kind, Repository
from hub_wire import Reply, Request, serve_content

_SIGNED = "X-Amz-Signature=test"


def batch_objects(
    repo: Repository, base: str, wanted: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The answer to an LFS batch request: where each object is to be put; no actions for one that
    is stored."""
    objects: list[dict[str, Any]] = []
    for one in wanted:
        entry: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
        if one["oid"] not in repo.objects:
            address = f"{base}/lfs/{repo.kind}/{repo.id}/{one['oid']}?{_SIGNED}"
            entry["actions"] = {"upload": {"href": address, "header": {}}}
        objects.append(entry)
    return objects


def signed_address(hub: HubState, repo: Repository, commit: Commit, path: str) -> str:
    """Where the content of a large file can be had without a token."""
    base = hub.cdn_url if hub.lfs_redirect == "cdn" else hub.url
    return (
        f"{base}/cdn/{repo.kind}/{repo.id}/{commit.oid}/{quote(path)}?X-Amz-Expires=3600&{_SIGNED}"
    )


def answer(hub: HubState, request: Request) -> Reply:
    """Answer one request for stored content."""
    if "X-Amz-Signature" not in request.query:
        return _error(403, "AccessDenied")
    match (request.verb, *request.segments):
        case ("PUT", "lfs", ("hf" | "ms") as kind, owner, name, oid):
            return _store(hub.find(kind, f"{owner}/{name}"), oid, request.body)
        case ("GET", "cdn", ("hf" | "ms") as kind, owner, name, oid, *path):
            return _serve(hub, request, kind, f"{owner}/{name}", oid, "/".join(path))
    return _error(404, "NoSuchKey")


def _store(repo: Repository | None, oid: str, data: bytes) -> Reply:
    if repo is None or hashlib.sha256(data).hexdigest() != oid:
        return _error(400, "BadDigest")
    repo.objects[oid] = data
    return Reply()


def _serve(hub: HubState, request: Request, kind: Kind, repo_id: str, oid: str, path: str) -> Reply:
    """Content; this host knows nothing of commits, and two ways to identify oneself are one too
    many."""
    repo = hub.find(kind, repo_id)
    commit = repo.history.get(oid) if repo else None
    blob = commit.blobs.get(path) if commit else None
    if commit is None or blob is None:
        return _error(404, "NoSuchKey")
    headers = {"ETag": f'"{blob.sha256}"'}
    if request.host == "origin":
        headers |= {
            "X-Repo-Commit": oid,
            "X-Linked-Etag": headers["ETag"],
            "X-Linked-Size": str(len(blob.data)),
        }
    elif request.headers.get("Authorization"):
        return _error(400, "InvalidArgument")
    return serve_content(request, blob.data, lambda other: commit.blobs[other].data, headers)


def _error(status: int, code: str) -> Reply:
    return Reply(
        status, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code></Error>".encode()
    )
