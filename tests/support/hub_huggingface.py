"""What Hugging Face answers: model repositories, their listings, contents, commits, tags and
proposals."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import hub_huggingface_writes as writes
from hub_huggingface_access import at, identified, readable, refuse, writable
from hub_repositories import Commit, HubState, Repository
from hub_storage import signed_address
from hub_wire import Reply, Request, as_json, serve_content


def answer(hub: HubState, request: Request) -> Reply:
    """Answer one request; an address that is none of ours is 404."""
    match (request.verb, *request.segments):
        case ("GET", "api", "whoami-v2"):
            return _whoami(request)
        case ("POST", "api", "validate-yaml"):
            return as_json({"errors": [], "warnings": []})
        case ("POST", "api", "repos", "create"):
            return writes.create(hub, request)
        case (_, "api", "models", owner, name, *rest):
            return _api(hub, request, f"{owner}/{name}", rest)
        case ("POST", owner, name, "info", "lfs", "objects", "batch") if name.endswith(".git"):
            return writes.batch(hub, request, f"{owner}/{name.removesuffix('.git')}")
        case ("POST", owner, name, "info", "lfs", "verify") if name.endswith(".git"):
            return writes.verify(
                request, readable(hub, request, f"{owner}/{name.removesuffix('.git')}")
            )
        case ("GET", owner, name, "resolve", revision, *path):
            return _resolve(hub, request, f"{owner}/{name}", revision, "/".join(path))
    return as_json({"error": "Not Found"}, 404)


def _api(hub: HubState, request: Request, repo_id: str, rest: list[str]) -> Reply:
    match (request.verb, *rest):
        case ("GET",):
            return _info(readable(hub, request, repo_id), None, request)
        case ("GET", "revision", revision):
            return _info(readable(hub, request, repo_id), revision, request)
        case ("GET", "refs"):
            return _refs(readable(hub, request, repo_id), request)
        case ("GET", "commits", revision):
            return _log(readable(hub, request, repo_id), revision)
        case ("GET", "tree", revision, *path):
            return _tree(hub, request, readable(hub, request, repo_id), revision, "/".join(path))
        case ("POST", "paths-info", revision):
            return _paths_info(request, readable(hub, request, repo_id), revision)
        case ("POST", "preupload", revision):
            return writes.preupload(request, writable(hub, request, repo_id), revision)
        case ("POST", "commit", branch):
            return writes.commit(hub, request, writable(hub, request, repo_id), branch)
        case ("POST", "tag", revision):
            return writes.tag(request, writable(hub, request, repo_id), revision)
        case ("DELETE", "tag", tag):
            return writes.untag(writable(hub, request, repo_id), tag)
        case ("POST", "branch", branch):
            return writes.branch(request, writable(hub, request, repo_id), branch)
    return as_json({"error": "Not Found"}, 404)


def _date(commit: Commit) -> str:
    return datetime.fromtimestamp(commit.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _whoami(request: Request) -> Reply:
    identified(request)
    access = {"displayName": "tests", "role": "write"}
    return as_json(
        {
            "type": "user",
            "name": "tester",
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": access},
        }
    )


def _info(repo: Repository, revision: str | None, request: Request) -> Reply:
    commit = at(repo, revision or repo.default_branch)
    siblings = []
    for path, blob in commit.blobs.items():
        sibling: dict[str, Any] = {"rfilename": path}
        if request.query.get("blobs", "").lower() in ("1", "true"):
            sibling |= {"size": len(blob.data), "blobId": blob.git_oid}
            if blob.lfs and not repo.no_sha256:
                sibling["lfs"] = {
                    "sha256": blob.sha256,
                    "size": len(blob.data),
                    "pointerSize": len(blob.pointer),
                }
        siblings.append(sibling)
    about = {
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.id.split("/")[0],
        "sha": commit.oid,
        "disabled": False,
    }
    flags: dict[str, Any] = {
        "private": repo.private,
        "gated": "manual" if repo.gated else False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
    }
    return as_json(about | flags | {"lastModified": _date(commit), "siblings": siblings})


def _refs(repo: Repository, request: Request) -> Reply:
    with repo.lock:
        refs: dict[str, list[dict[str, str]]] = {
            "branches": [
                _ref(name, f"refs/heads/{name}", oid) for name, oid in repo.branches.items()
            ],
            "converts": [],
            "tags": [_ref(name, f"refs/tags/{name}", oid) for name, oid in repo.tags.items()],
        }
        if request.query.get("include_prs") == "1":
            refs["pullRequests"] = [
                _ref(pull.branch, pull.branch, pull.commit.oid) for pull in repo.pulls
            ]
    return as_json(refs)


def _ref(name: str, ref: str, oid: str) -> dict[str, str]:
    return {"name": name, "ref": ref, "targetCommit": oid}


def _log(repo: Repository, revision: str) -> Reply:
    commits = repo.log(at(repo, revision).oid)[::-1]
    entry = {"authors": [{"user": "tester"}], "message": ""}
    return as_json(
        [
            entry | {"id": commit.oid, "date": _date(commit), "title": commit.message}
            for commit in commits
        ]
    )


def _tree(hub: HubState, request: Request, repo: Repository, revision: str, folder: str) -> Reply:
    commit = at(repo, revision)
    recursive = request.query.get("recursive", "").lower() in ("1", "true")
    entries = [
        entry
        for entry in _entries(repo, commit)
        if not folder or entry["path"].startswith(f"{folder}/")
        if recursive or "/" not in entry["path"][len(folder) + 1 if folder else 0 :]
    ]
    if folder and not entries:
        missing = f"{folder} does not exist on {revision!r}"
        raise refuse(404, missing, "EntryNotFound", **{"X-Repo-Commit": commit.oid})
    start, size = int(request.query.get("cursor", "0")), hub.paged or len(entries) + 1
    headers = {"X-Repo-Commit": commit.oid}
    if start + size < len(entries):
        where = f"{hub.url}{quote(request.path)}?recursive={recursive}&cursor={start + size}"
        headers["Link"] = f'<{where}>; rel="next"'
    return as_json(entries[start : start + size], headers=headers)


def _entries(repo: Repository, commit: Commit) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "type": "directory",
            "oid": hashlib.sha1(path.encode(), usedforsecurity=False).hexdigest(),
            "size": 0,
            "path": path,
        }
        for path in commit.folders
    ]
    for path, blob in commit.blobs.items():
        entry: dict[str, Any] = {
            "type": "file",
            "oid": blob.git_oid,
            "size": len(blob.data),
            "path": path,
        }
        if blob.lfs and not repo.no_sha256:
            entry["lfs"] = {
                "oid": blob.sha256,
                "size": len(blob.data),
                "pointerSize": len(blob.pointer),
            }
        found.append(entry)
    return found


def _paths_info(request: Request, repo: Repository, revision: str) -> Reply:
    wanted = set(request.form("paths"))
    return as_json(
        [entry for entry in _entries(repo, at(repo, revision)) if entry["path"] in wanted]
    )


def _resolve(hub: HubState, request: Request, repo_id: str, revision: str, path: str) -> Reply:
    repo = readable(hub, request, repo_id, content=True)
    commit = at(repo, revision)
    headers = {"X-Repo-Commit": commit.oid}
    blob = commit.blobs.get(path)
    if blob is None:
        raise refuse(404, "Entry not found", "EntryNotFound", **headers)
    if not blob.lfs:
        headers["ETag"] = f'"{blob.git_oid}"'
        return serve_content(request, blob.data, lambda other: commit.blobs[other].data, headers)
    headers |= {
        "X-Linked-Etag": f'"{blob.sha256}"',
        "X-Linked-Size": str(len(blob.data)),
        "ETag": f'"{blob.sha256}"',
    }
    if hub.lfs_redirect is None or request.host == "cdn":
        return serve_content(request, blob.data, lambda other: commit.blobs[other].data, headers)
    where = signed_address(hub, repo, commit, path)
    return Reply(
        302, headers | {"Location": where, "Content-Type": "text/plain"}, b"Found. Redirecting"
    )
