"""What Hugging Face answers: model repositories, their listings, contents, commits, tags and
proposals."""

import base64
import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from hub_repositories import (
    FIRST_FILES,
    Blob,
    Commit,
    HubState,
    NoSuchRevision,
    Repository,
    StaleParent,
    is_lfs,
)
from hub_wire import Refused, Reply, Request, as_json, batch_objects, serve_content, signed_address


def answer(hub: HubState, request: Request) -> Reply:
    """Answer one request; an address that is none of ours is 404."""
    match (request.verb, *request.segments):
        case ("GET", "api", "whoami-v2"):
            return _whoami(request)
        case ("POST", "api", "validate-yaml"):
            return as_json({"errors": [], "warnings": []})
        case ("POST", "api", "repos", "create"):
            return create(hub, request)
        case (_, "api", "models", owner, name, *rest):
            return _api(hub, request, f"{owner}/{name}", rest)
        case ("POST", owner, name, "info", "lfs", "objects", "batch") if name.endswith(".git"):
            return batch(hub, request, f"{owner}/{name.removesuffix('.git')}")
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
            return _refs(readable(hub, request, repo_id))
        case ("GET", "tree", revision, *path):
            return _tree(hub, request, readable(hub, request, repo_id), revision, "/".join(path))
        case ("POST", "paths-info", revision):
            return _paths_info(request, readable(hub, request, repo_id), revision)
        case ("POST", "preupload", revision):
            return preupload(request, writable(hub, request, repo_id), revision)
        case ("POST", "commit", branch):
            return commit(hub, request, writable(hub, request, repo_id), branch)
        case ("POST", "tag", revision):
            return tag(request, writable(hub, request, repo_id), revision)
    return as_json({"error": "Not Found"}, 404)


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
    names = {"id": repo.id, "modelId": repo.id, "author": repo.id.split("/")[0], "sha": commit.oid}
    gated = "manual" if repo.gated else False
    flags = {"private": repo.private, "gated": gated, "disabled": False, "tags": []}
    date = datetime.fromtimestamp(commit.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    siblings = [{"rfilename": path} for path in commit.blobs]
    counts = {"downloads": 0, "likes": 0, "lastModified": date, "siblings": siblings}
    return as_json(names | flags | counts)


def _refs(repo: Repository) -> Reply:
    def told(names: dict[str, str], kind: str) -> list[dict[str, str]]:
        return [
            {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid}
            for name, oid in names.items()
        ]

    with repo.lock:
        branches, tags = told(repo.branches, "heads"), told(repo.tags, "tags")
    return as_json({"branches": branches, "converts": [], "tags": tags})


def _tree(hub: HubState, request: Request, repo: Repository, revision: str, folder: str) -> Reply:
    commit = at(repo, revision)
    recursive = request.query.get("recursive", "").lower() in ("1", "true")
    root = f"{folder}/" if folder else ""
    entries = [
        entry
        for entry in _entries(commit)
        if entry["path"].startswith(root)
        if recursive or "/" not in entry["path"].removeprefix(root)
    ]
    start, size = int(request.query.get("cursor", "0")), hub.paged or len(entries) + 1
    headers = {"X-Repo-Commit": commit.oid}
    if start + size < len(entries):
        where = f"{hub.url}{quote(request.path)}?recursive={recursive}&cursor={start + size}"
        headers["Link"] = f'<{where}>; rel="next"'
    return as_json(entries[start : start + size], headers=headers)


def _entries(commit: Commit) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in commit.folders:
        oid = hashlib.sha1(path.encode(), usedforsecurity=False).hexdigest()
        found.append({"type": "directory", "oid": oid, "size": 0, "path": path})
    for path, blob in commit.blobs.items():
        size = len(blob.data)
        found.append({"type": "file", "oid": blob.git_oid, "size": size, "path": path})
        if blob.lfs:
            pointer = len(blob.pointer)
            found[-1]["lfs"] = {"oid": blob.sha256, "size": size, "pointerSize": pointer}
    return found


def _paths_info(request: Request, repo: Repository, revision: str) -> Reply:
    wanted = set(request.form("paths"))
    return as_json([entry for entry in _entries(at(repo, revision)) if entry["path"] in wanted])


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
    headers |= {"X-Linked-Size": str(len(blob.data))}
    headers |= dict.fromkeys(("ETag", "X-Linked-Etag"), f'"{blob.sha256}"')
    if hub.lfs_redirect is None or request.host == "cdn":
        return serve_content(request, blob.data, lambda other: commit.blobs[other].data, headers)
    headers |= {"Location": signed_address(hub, repo, commit, path), "Content-Type": "text/plain"}
    return Reply(302, headers, b"Found. Redirecting")


_ANONYMOUS = "Invalid username or password."
_WRONG_TOKEN = "Invalid credentials in Authorization header"


def refuse(status: int, message: str, code: str | None = None, **headers: str) -> Refused:
    """An error as this hub words it: the client goes by the headers."""
    extra = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | headers
    return Refused(as_json({"error": message}, status, extra))


def readable(hub: HubState, request: Request, repo_id: str, *, content: bool = False) -> Repository:
    """The repository, if the token of the request may read it; `content` is what gates close."""
    repo, token = hub.find("hf", repo_id), request.token
    if repo is None and token:
        raise refuse(404, "Repository not found", "RepoNotFound")
    access = "hidden" if repo is None else repo.access(token, content=content)
    if access == "wrong token":
        raise refuse(401, _WRONG_TOKEN)
    if repo is None or access == "hidden":
        raise refuse(401, _ANONYMOUS, "RepoNotFound")
    if access == "gated":
        raise refuse(403 if token else 401, f"Access to {repo_id} is restricted.", "GatedRepo")
    return repo


def writable(hub: HubState, request: Request, repo_id: str) -> Repository:
    """The repository, if the token may write to it; anyone with a token may propose."""
    repo = readable(hub, request, repo_id)
    identified(request)
    if request.query.get("create_pr") != "1" and repo.write_token not in (None, request.token):
        raise refuse(403, "Forbidden: you must use a write token to upload to a repository")
    return repo


def at(repo: Repository, revision: str) -> Commit:
    try:
        return repo.at(revision)
    except NoSuchRevision:
        raise refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None


def identified(request: Request) -> None:
    """Refuse a request without a token."""
    if request.token is None:
        raise refuse(401, _ANONYMOUS)


def create(hub: HubState, request: Request) -> Reply:
    """Make a repository; like the real hub, with a file in it."""
    identified(request)
    wanted = request.json
    repo_id = f"{wanted.get('organization') or 'tester'}/{wanted['name']}"
    made = {"url": f"{hub.url}/{repo_id}", "name": repo_id, "id": repo_id}
    with hub.lock:
        if hub.find("hf", repo_id) is not None:
            return as_json({"error": "You already created this model repo"} | made, 409)
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        repo = Repository(repo_id, "hf", private=private)
        repo.commit_blobs(FIRST_FILES, message="initial commit")
        hub.repositories["hf", repo_id] = repo
    return as_json(made)


def preupload(request: Request, repo: Repository, revision: str) -> Reply:
    """Say which files go where, and which are there already."""
    blobs, files = at(repo, revision).blobs, []
    for wanted in request.json["files"]:
        path, size = wanted["path"], wanted["size"]
        mode = "lfs" if is_lfs(path, size) else "regular"
        entry = {"path": path, "uploadMode": mode, "shouldIgnore": False}
        if blob := blobs.get(path):
            entry["oid"] = blob.sha256 if blob.lfs else blob.git_oid
        files.append(entry)
    return as_json({"files": files})


def batch(hub: HubState, request: Request, repo_id: str) -> Reply:
    """Say where large files are to be put; a proposer may put them too."""
    repo = readable(hub, request, repo_id)
    identified(request)
    objects = batch_objects(repo, hub.cdn_url, request.json["objects"])
    kind = {"Content-Type": "application/vnd.git-lfs+json"}
    return as_json({"transfer": "basic", "objects": objects}, headers=kind)


def commit(hub: HubState, request: Request, repo: Repository, branch: str) -> Reply:
    """Take a commit if its parent is the head, or a proposal from any parent."""
    lines = [json.loads(line) for line in request.body.splitlines() if line]
    header = lines[0]["value"]
    parent = header.get("parentCommit")
    with repo.lock:
        at(repo, branch)
        changes = _changes(repo, lines[1:])
        if request.query.get("create_pr") == "1":
            base = at(repo, parent or branch).oid
            pull = repo.propose(changes, message=header["summary"], base=base)
            address = f"{hub.url}/{repo.id}/discussions/{pull.number}"
            return _committed(hub, repo, pull.commit, {"pullRequestUrl": address})
        if branch not in repo.branches:
            raise refuse(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        message = header["summary"]
        try:
            made = repo.commit_blobs(changes, message=message, branch=branch, parent=parent)
        except StaleParent:
            raise refuse(412, "A commit has happened since.") from None
    return _committed(hub, repo, made, {})


def _committed(hub: HubState, repo: Repository, commit: Commit, more: dict[str, str]) -> Reply:
    address = f"{hub.url}/{repo.id}/commit/{commit.oid}"
    return as_json(
        {"success": True, "commitOid": commit.oid, "commitUrl": address, "hookOutput": ""} | more
    )


def _changes(repo: Repository, lines: Iterable[dict[str, Any]]) -> dict[str, Blob | None]:
    changes: dict[str, Blob | None] = {}
    for line in lines:
        value, path = line["value"], line["value"]["path"]
        if line["key"] == "file":
            changes[path] = Blob(base64.b64decode(value["content"]), lfs=False)
        elif (data := repo.objects.get(value["oid"])) is not None:
            changes[path] = Blob(data, lfs=True)
        else:
            raise refuse(400, f"LFS pointer of {path} points to an object that does not exist")
    return changes


def tag(request: Request, repo: Repository, revision: str) -> Reply:
    """Tag a revision; a tag that exists stays where it is."""
    with repo.lock:
        oid, name = at(repo, revision).oid, request.json["tag"]
        if name in repo.tags:
            raise refuse(409, f"Tag {name} already exists")
        repo.tags[name] = oid
    return as_json({})
