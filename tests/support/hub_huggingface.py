"""What Hugging Face answers: model repositories, their listings, contents, commits, tags and proposals."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from hub_repositories import Blob, Commit, HubState, NoSuchRevision, Repository, StaleParent, is_lfs
from hub_wire import Reply, Request, as_json, serve_content

_ANONYMOUS = "Invalid username or password."
_WRONG_TOKEN = "Invalid credentials in Authorization header"
_FIRST_FILES = {".gitattributes": Blob(b"*.pt filter=lfs diff=lfs merge=lfs -text\n", lfs=False)}


class _Refused(Exception):
    """Carries the reply to a request that failed."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        extra = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | headers
        self.reply = as_json({"error": message}, status, extra)


def answer(hub: HubState, request: Request) -> Reply:
    """Answer one request; an address that is none of ours is 404."""
    try:
        match (request.method, *request.segments):
            case ("GET", "api", "whoami-v2"):
                return _whoami(request)
            case ("POST", "api", "validate-yaml"):
                return as_json({"errors": [], "warnings": []})
            case ("POST", "api", "repos", "create"):
                return _create(hub, request)
            case (_, "api", "models", owner, name, *rest):
                return _api(hub, request, f"{owner}/{name}", rest)
            case ("POST", owner, name, "info", "lfs", "objects", "batch") if name.endswith(".git"):
                return _batch(hub, request, f"{owner}/{name.removesuffix('.git')}")
            case ("PUT", "lfs", owner, name, oid):
                return _store(hub, request, f"{owner}/{name}", oid)
            case ("POST", "lfs", owner, name, "verify"):
                return _verify(hub, request, f"{owner}/{name}")
            case ("GET" | "HEAD", "cdn", owner, name, oid, *path):
                return _signed(hub, request, f"{owner}/{name}", oid)
            case ("GET" | "HEAD", owner, name, "resolve", revision, *path):
                return _resolve(hub, request, f"{owner}/{name}", revision, "/".join(path))
    except _Refused as refused:
        return refused.reply
    return as_json({"error": "Not Found"}, 404)


def _api(hub: HubState, request: Request, repo_id: str, rest: list[str]) -> Reply:
    match (request.method, *rest):
        case ("GET",):
            return _info(_readable(hub, request, repo_id), None, request)
        case ("GET", "revision", revision):
            return _info(_readable(hub, request, repo_id), revision, request)
        case ("GET", "refs"):
            return _refs(_readable(hub, request, repo_id), request)
        case ("GET", "commits", revision):
            return _log(_readable(hub, request, repo_id), revision)
        case ("GET", "tree", revision, *path):
            return _tree(hub, request, _readable(hub, request, repo_id), revision, "/".join(path))
        case ("POST", "paths-info", revision):
            return _paths_info(request, _readable(hub, request, repo_id), revision)
        case ("POST", "preupload", revision):
            return _preupload(request, _writable(hub, request, repo_id), revision)
        case ("POST", "commit", branch):
            return _commit(hub, request, _writable(hub, request, repo_id), branch)
        case ("POST", "tag", revision):
            return _tag(request, _writable(hub, request, repo_id), revision)
        case ("DELETE", "tag", tag):
            return _untag(_writable(hub, request, repo_id), tag)
        case ("POST", "branch", branch):
            return _branch(request, _writable(hub, request, repo_id), branch)
    return as_json({"error": "Not Found"}, 404)


def _readable(hub: HubState, request: Request, repo_id: str, *, content: bool = False) -> Repository:
    """The repository, if the token of the request may read it; `content` is what gates close."""
    repo, token = hub.find("hf", repo_id), request.token
    if repo is None:
        raise _Refused(404 if token else 401, "Repository not found" if token else _ANONYMOUS, "RepoNotFound")
    known = repo.token is None or token in (repo.token, repo.write_token)
    if token and not known and not repo.gated:
        raise _Refused(401, _WRONG_TOKEN)
    if not token and not repo.gated and (repo.private or repo.token is not None):
        raise _Refused(401, _ANONYMOUS, "RepoNotFound")
    if content and repo.gated and not (token and repo.token is not None and known):
        restricted = f"Access to model {repo_id} is restricted"
        if token:
            raise _Refused(403, f"{restricted} and you are not in the authorized list.", "GatedRepo")
        raise _Refused(401, f"{restricted}. You must have access to it and be authenticated.", "GatedRepo")
    return repo


def _writable(hub: HubState, request: Request, repo_id: str) -> Repository:
    """The repository, if the token may write to it; anyone with a token may propose."""
    repo = _readable(hub, request, repo_id)
    if request.token is None:
        raise _Refused(401, _ANONYMOUS)
    if request.query.get("create_pr") != "1" and repo.write_token not in (None, request.token):
        raise _Refused(403, "Forbidden: you must use a write token to upload to a repository")
    return repo


def _at(repo: Repository, revision: str) -> Commit:
    try:
        return repo.at(revision)
    except NoSuchRevision:
        raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None


def _date(commit: Commit) -> str:
    return datetime.fromtimestamp(commit.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _whoami(request: Request) -> Reply:
    if request.token is None:
        raise _Refused(401, _ANONYMOUS)
    access = {"displayName": "tests", "role": "write"}
    return as_json(
        {"type": "user", "name": "tester", "orgs": [], "auth": {"type": "access_token", "accessToken": access}}
    )


def _create(hub: HubState, request: Request) -> Reply:
    if request.token is None:
        raise _Refused(401, _ANONYMOUS)
    wanted = request.json
    repo_id = f"{wanted.get('organization') or 'tester'}/{wanted['name']}"
    made = {"url": f"{hub.url}/{repo_id}", "name": repo_id, "id": repo_id}
    with hub.lock:
        if hub.find("hf", repo_id) is not None:
            return as_json({"error": "You already created this model repo"} | made, 409)
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        repo = hub.repositories["hf", repo_id] = Repository(repo_id, "hf", private=private)
        repo.commit_blobs(_FIRST_FILES, message="initial commit")
    return as_json(made)


def _info(repo: Repository, revision: str | None, request: Request) -> Reply:
    commit = _at(repo, revision or repo.default_branch)
    siblings = []
    for path, blob in commit.blobs.items():
        sibling: dict[str, Any] = {"rfilename": path}
        if request.query.get("blobs", "").lower() in ("1", "true"):
            sibling |= {"size": len(blob.data), "blobId": blob.git_oid}
            if blob.lfs and not repo.no_sha256:
                sibling["lfs"] = {"sha256": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}
        siblings.append(sibling)
    about = {"id": repo.id, "modelId": repo.id, "author": repo.id.split("/")[0], "sha": commit.oid, "disabled": False}
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
            "branches": [_ref(name, f"refs/heads/{name}", oid) for name, oid in repo.branches.items()],
            "converts": [],
            "tags": [_ref(name, f"refs/tags/{name}", oid) for name, oid in repo.tags.items()],
        }
        if request.query.get("include_prs") == "1":
            refs["pullRequests"] = [_ref(pull.branch, pull.branch, pull.commit.oid) for pull in repo.pulls]
    return as_json(refs)


def _ref(name: str, ref: str, oid: str) -> dict[str, str]:
    return {"name": name, "ref": ref, "targetCommit": oid}


def _log(repo: Repository, revision: str) -> Reply:
    commits = repo.log(_at(repo, revision).oid)[::-1]
    entry = {"authors": [{"user": "tester"}], "message": ""}
    return as_json([entry | {"id": commit.oid, "date": _date(commit), "title": commit.message} for commit in commits])


def _tree(hub: HubState, request: Request, repo: Repository, revision: str, folder: str) -> Reply:
    commit = _at(repo, revision)
    recursive = request.query.get("recursive", "").lower() in ("1", "true")
    entries = [
        entry
        for entry in _entries(repo, commit)
        if not folder or entry["path"].startswith(f"{folder}/")
        if recursive or "/" not in entry["path"][len(folder) + 1 if folder else 0 :]
    ]
    if folder and not entries:
        missing = f"{folder} does not exist on {revision!r}"
        raise _Refused(404, missing, "EntryNotFound", **{"X-Repo-Commit": commit.oid})
    start, size = int(request.query.get("cursor", "0")), hub.paged or len(entries) + 1
    headers = {"X-Repo-Commit": commit.oid}
    if start + size < len(entries):
        where = f"{hub.url}{quote(request.path)}?recursive={recursive}&cursor={start + size}"
        headers["Link"] = f'<{where}>; rel="next"'
    return as_json(entries[start : start + size], headers=headers)


def _entries(repo: Repository, commit: Commit) -> list[dict[str, Any]]:
    folders = sorted({path[:i] for path in commit.blobs for i, char in enumerate(path) if char == "/"})
    found: list[dict[str, Any]] = [
        {
            "type": "directory",
            "oid": hashlib.sha1(path.encode(), usedforsecurity=False).hexdigest(),
            "size": 0,
            "path": path,
        }
        for path in folders
    ]
    for path, blob in commit.blobs.items():
        entry: dict[str, Any] = {"type": "file", "oid": blob.git_oid, "size": len(blob.data), "path": path}
        if blob.lfs and not repo.no_sha256:
            entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}
        found.append(entry)
    return found


def _paths_info(request: Request, repo: Repository, revision: str) -> Reply:
    wanted = set(request.form("paths"))
    return as_json([entry for entry in _entries(repo, _at(repo, revision)) if entry["path"] in wanted])


def _preupload(request: Request, repo: Repository, revision: str) -> Reply:
    blobs, files = _at(repo, revision).blobs, []
    for wanted in request.json["files"]:
        path, size = wanted["path"], wanted["size"]
        entry = {"path": path, "uploadMode": "lfs" if is_lfs(path, size) else "regular", "shouldIgnore": False}
        if blob := blobs.get(path):
            entry["oid"] = blob.sha256 if blob.lfs else blob.git_oid
        files.append(entry)
    return as_json({"files": files})


def _batch(hub: HubState, request: Request, repo_id: str) -> Reply:
    repo = _readable(hub, request, repo_id)
    if request.token is None:
        raise _Refused(401, _ANONYMOUS)
    objects = []
    for wanted in request.json["objects"]:
        entry = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] not in repo.objects:
            upload = {"href": f"{hub.cdn_url}/lfs/{repo_id}/{wanted['oid']}?Signature=test", "header": {}}
            verify = {"href": f"{hub.url}/lfs/{repo_id}/verify", "header": {}}
            entry["actions"] = {"upload": upload, "verify": verify}
        objects.append(entry)
    return as_json({"transfer": "basic", "objects": objects}, headers={"Content-Type": "application/vnd.git-lfs+json"})


def _store(hub: HubState, request: Request, repo_id: str, oid: str) -> Reply:
    repo = hub.find("hf", repo_id)
    if repo is None or hashlib.sha256(request.body).hexdigest() != oid:
        return Reply(400, {"Content-Type": "application/xml"}, b"<Error><Code>BadDigest</Code></Error>")
    repo.objects[oid] = request.body
    return Reply()


def _verify(hub: HubState, request: Request, repo_id: str) -> Reply:
    stored = _readable(hub, request, repo_id).objects.get(request.json["oid"])
    if stored is None or len(stored) != request.json["size"]:
        raise _Refused(404, "object is not stored, or of another size")
    return as_json({})


def _commit(hub: HubState, request: Request, repo: Repository, branch: str) -> Reply:
    lines = [json.loads(line) for line in request.body.splitlines() if line]
    header = lines[0]["value"]
    parent = header.get("parentCommit")
    with repo.lock:
        changes = _changes(repo, _at(repo, branch), lines[1:])
        if request.query.get("create_pr") == "1":
            base = _at(repo, parent or branch).oid
            pull = repo.propose(changes, message=header["summary"], base=base)
            address = f"{hub.url}/{repo.id}/discussions/{pull.number}"
            return _committed(hub, repo, pull.commit, {"pullRequestUrl": address})
        if branch not in repo.branches:
            raise _Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        try:
            commit = repo.commit_blobs(changes, message=header["summary"], branch=branch, parent=parent)
        except StaleParent:
            raise _Refused(412, "A commit has happened since. Please refresh and try again.") from None
    return _committed(hub, repo, commit, {})


def _committed(hub: HubState, repo: Repository, commit: Commit, more: dict[str, str]) -> Reply:
    address = f"{hub.url}/{repo.id}/commit/{commit.oid}"
    return as_json({"success": True, "commitOid": commit.oid, "commitUrl": address, "hookOutput": ""} | more)


def _changes(repo: Repository, base: Commit, lines: Iterable[dict[str, Any]]) -> dict[str, Blob | None]:
    changes: dict[str, Blob | None] = {}
    for line in lines:
        value, path = line["value"], line["value"]["path"]
        if line["key"] == "file":
            _check_path(path)
            changes[path] = Blob(base64.b64decode(value["content"]), lfs=False)
        elif line["key"] == "lfsFile":
            _check_path(path)
            if (data := repo.objects.get(value["oid"])) is None:
                raise _Refused(400, f"LFS pointer of {path} points to an object that does not exist")
            changes[path] = Blob(data, lfs=True)
        else:
            folder = path.rstrip("/") + "/"
            gone = [
                old for old in base.blobs if old == path or (line["key"] == "deletedFolder" and old.startswith(folder))
            ]
            if not gone:
                raise _Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            changes |= dict.fromkeys(gone)
    return changes


def _check_path(path: str) -> None:
    if any(part in ("", ".", "..", ".git") for part in path.split("/")):
        raise _Refused(400, f"invalid path {path!r}")


def _tag(request: Request, repo: Repository, revision: str) -> Reply:
    with repo.lock:
        oid, tag = _at(repo, revision).oid, request.json["tag"]
        if tag in repo.tags:
            raise _Refused(409, f"Tag {tag} already exists")
        repo.tags[tag] = oid
    return as_json({})


def _untag(repo: Repository, tag: str) -> Reply:
    if repo.tags.pop(tag, None) is None:
        raise _Refused(404, f"Invalid rev id: {tag}", "RevisionNotFound")
    return as_json({})


def _branch(request: Request, repo: Repository, branch: str) -> Reply:
    with repo.lock:
        oid = _at(repo, request.json.get("startingPoint") or repo.default_branch).oid
        if branch in repo.branches:
            raise _Refused(409, f"Reference already exists: {branch}")
        repo.branches[branch] = oid
    return as_json({})


def _resolve(hub: HubState, request: Request, repo_id: str, revision: str, path: str) -> Reply:
    repo = _readable(hub, request, repo_id, content=True)
    commit = _at(repo, revision)
    headers = {"X-Repo-Commit": commit.oid}
    blob = commit.blobs.get(path)
    if blob is None:
        raise _Refused(404, "Entry not found", "EntryNotFound", **headers)
    if not blob.lfs:
        headers["ETag"] = f'"{blob.git_oid}"'
        return serve_content(request, blob.data, lambda other: commit.blobs[other].data, headers)
    headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data)), "ETag": f'"{blob.sha256}"'}
    if hub.lfs_redirect is None or request.host == "cdn":
        return serve_content(request, blob.data, lambda other: commit.blobs[other].data, headers)
    base = hub.cdn_url if hub.lfs_redirect == "cdn" else hub.url
    where = f"{base}/cdn/{repo_id}/{commit.oid}/{quote(path)}?X-Amz-Expires=3600&X-Amz-Signature=test"
    return Reply(302, headers | {"Location": where, "Content-Type": "text/plain"}, b"Found. Redirecting")


def _signed(hub: HubState, request: Request, repo_id: str, oid: str) -> Reply:
    """Content behind a signed address: no credentials besides the signature; the CDN knows nothing of commits."""
    repo, path = hub.find("hf", repo_id), request.file
    blob = repo.history[oid].blobs.get(path or "") if repo and oid in repo.history else None
    if repo is None or blob is None or "X-Amz-Signature" not in request.query:
        return Reply(403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>")
    headers = {"ETag": f'"{blob.sha256}"'}
    if request.host == "origin":
        headers |= {"X-Repo-Commit": oid, "X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(blob.data))}
    elif request.token is not None:
        return Reply(400, {"Content-Type": "application/xml"}, b"<Error><Code>InvalidArgument</Code></Error>")
    blobs = repo.history[oid].blobs
    return serve_content(request, blob.data, lambda other: blobs[other].data, headers)
