"""What Hugging Face does when it is written to: repositories, commits, proposals, tags and
branches."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

from hub_huggingface_access import at, identified, readable, refuse
from hub_repositories import FIRST_FILES, Blob, Commit, HubState, Repository, StaleParent, is_lfs
from hub_storage import batch_objects
from hub_wire import Reply, Request, as_json


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
        entry = {
            "path": path,
            "uploadMode": "lfs" if is_lfs(path, size) else "regular",
            "shouldIgnore": False,
        }
        if blob := blobs.get(path):
            entry["oid"] = blob.sha256 if blob.lfs else blob.git_oid
        files.append(entry)
    return as_json({"files": files})


def batch(hub: HubState, request: Request, repo_id: str) -> Reply:
    """Say where large files are to be put; a proposer may put them too."""
    repo = readable(hub, request, repo_id)
    identified(request)
    objects = batch_objects(repo, hub.cdn_url, request.json["objects"])
    for entry in objects:
        if "actions" in entry:
            entry["actions"]["verify"] = {
                "href": f"{hub.url}/{repo_id}.git/info/lfs/verify",
                "header": {},
            }
    return as_json(
        {"transfer": "basic", "objects": objects},
        headers={"Content-Type": "application/vnd.git-lfs+json"},
    )


def verify(request: Request, repo: Repository) -> Reply:
    """Say whether a large file has arrived."""
    stored = repo.objects.get(request.json["oid"])
    if stored is None or len(stored) != request.json["size"]:
        raise refuse(404, "object is not stored, or of another size")
    return as_json({})


def commit(hub: HubState, request: Request, repo: Repository, branch: str) -> Reply:
    """Take a commit if its parent is the head, or a proposal from any parent."""
    lines = [json.loads(line) for line in request.body.splitlines() if line]
    header = lines[0]["value"]
    parent = header.get("parentCommit")
    with repo.lock:
        changes = _changes(repo, at(repo, branch), lines[1:])
        if request.query.get("create_pr") == "1":
            base = at(repo, parent or branch).oid
            pull = repo.propose(changes, message=header["summary"], base=base)
            address = f"{hub.url}/{repo.id}/discussions/{pull.number}"
            return _committed(hub, repo, pull.commit, {"pullRequestUrl": address})
        if branch not in repo.branches:
            raise refuse(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        try:
            made = repo.commit_blobs(
                changes, message=header["summary"], branch=branch, parent=parent
            )
        except StaleParent:
            raise refuse(
                412, "A commit has happened since. Please refresh and try again."
            ) from None
    return _committed(hub, repo, made, {})


def _committed(hub: HubState, repo: Repository, commit: Commit, more: dict[str, str]) -> Reply:
    address = f"{hub.url}/{repo.id}/commit/{commit.oid}"
    return as_json(
        {"success": True, "commitOid": commit.oid, "commitUrl": address, "hookOutput": ""} | more
    )


def _changes(
    repo: Repository, base: Commit, lines: Iterable[dict[str, Any]]
) -> dict[str, Blob | None]:
    changes: dict[str, Blob | None] = {}
    for line in lines:
        value, path = line["value"], line["value"]["path"]
        if line["key"] == "file":
            _check_path(path)
            changes[path] = Blob(base64.b64decode(value["content"]), lfs=False)
        elif line["key"] == "lfsFile":
            _check_path(path)
            if (data := repo.objects.get(value["oid"])) is None:
                raise refuse(400, f"LFS pointer of {path} points to an object that does not exist")
            changes[path] = Blob(data, lfs=True)
        else:
            folder = path.rstrip("/") + "/"
            gone = [
                old
                for old in base.blobs
                if old == path or (line["key"] == "deletedFolder" and old.startswith(folder))
            ]
            if not gone:
                raise refuse(404, "A file with this name doesn't exist", "EntryNotFound")
            changes |= dict.fromkeys(gone)
    return changes


def _check_path(path: str) -> None:
    if any(part in ("", ".", "..", ".git") for part in path.split("/")):
        raise refuse(400, f"invalid path {path!r}")


def tag(request: Request, repo: Repository, revision: str) -> Reply:
    """Tag a revision; a tag that exists stays where it is."""
    with repo.lock:
        oid, name = at(repo, revision).oid, request.json["tag"]
        if name in repo.tags:
            raise refuse(409, f"Tag {name} already exists")
        repo.tags[name] = oid
    return as_json({})


def untag(repo: Repository, name: str) -> Reply:
    """Delete a tag."""
    if repo.tags.pop(name, None) is None:
        raise refuse(404, f"Invalid rev id: {name}", "RevisionNotFound")
    return as_json({})


def branch(request: Request, repo: Repository, name: str) -> Reply:
    """Start a branch."""
    with repo.lock:
        oid = at(repo, request.json.get("startingPoint") or repo.default_branch).oid
        if name in repo.branches:
            raise refuse(409, f"Reference already exists: {name}")
        repo.branches[name] = oid
    return as_json({})
