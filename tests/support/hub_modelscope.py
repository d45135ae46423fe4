"""What ModelScope answers: model repositories, their listings, contents, commits and tags.

Everything but the OpenAPI part comes in one envelope. There is no compare-and-swap on commits.
"""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from hub_repositories import FIRST_FILES, Blob, Commit, HubState, NoSuchRevision, Repository
from hub_wire import Refused, Reply, Request, as_json, batch_objects, serve_content, signed_address

_BAD_TOKEN, _EXISTS, _MISSING, _BAD_INPUT = 10010103009, 10010101001, 10010205001, 10010200001
_NO_TREE = 10990101004
_PRIVATE = 1


def answer(hub: HubState, request: Request) -> Reply:
    """Answer one request; an address that is none of ours is 404."""
    match (request.verb, *request.segments):
        case ("POST", "api", "v1", "models"):
            return _create(hub, request)
        case (_, "api", "v1", "models", owner, name, *rest):
            return _model(hub, request, f"{owner}/{name}", rest)
        case ("POST", "api", "v1", "repos", "models", owner, name, *rest):
            repo = _writable(hub, request, f"{owner}/{name}")
            match rest:
                case ("info", "lfs", "objects", "batch"):
                    base = hub.cdn_url if hub.lfs_redirect == "cdn" else hub.url
                    return _success({"objects": batch_objects(repo, base, request.json["objects"])})
                case ("commit", branch):
                    return _commit(hub, request, repo, branch)
    raise _refuse(404, _MISSING, "not found")


def _model(hub: HubState, request: Request, repo_id: str, rest: list[str]) -> Reply:
    match (request.verb, *rest):
        case ("GET",):
            repo = _readable(hub, request, repo_id)
            owner, _, name = repo_id.partition("/")
            return _success({"Path": owner, "Name": name, "Id": 1, "Revision": repo.default_branch})
        case ("GET", "repo", "files"):
            return _listing(request, _readable(hub, request, repo_id))
        case ("GET", "repo"):
            return _content(hub, request, _readable(hub, request, repo_id, content=True))
        case ("POST", "repo", "tag"):
            return _tag(request, _writable(hub, request, repo_id))
    raise _refuse(404, _MISSING, "not found")


def _envelope(code: int, message: str, data: object) -> dict[str, object]:
    request_id = "00000000-0000-0000-0000-000000000000"
    return {
        "Code": code,
        "Data": data,
        "Message": message,
        "RequestId": request_id,
        "Success": code == 200,
    }


def _success(data: object) -> Reply:
    return as_json(_envelope(200, "success", data))


def _refuse(status: int, code: int, message: str) -> Refused:
    return Refused(as_json(_envelope(code, message, None), status))


def _identified(request: Request) -> None:
    if request.token is None:
        raise _refuse(401, 401, "user not logged in")


def _readable(
    hub: HubState, request: Request, repo_id: str, *, content: bool = False
) -> Repository:
    """The repository, if the token of the request may read it; a private one looks missing to
    strangers."""
    repo, token = hub.find("ms", repo_id), request.token
    if repo is None:
        raise _refuse(404, _MISSING, f"model {repo_id} does not exist")
    access = repo.access(token, content=content)
    if access == "wrong token":
        raise _refuse(401, _BAD_TOKEN, "access token is invalid or expired")
    if access == "hidden":
        raise _refuse(404, _MISSING, f"model {repo_id} does not exist")
    if access == "gated":
        raise _refuse(403 if token else 401, 403, "this model is gated")
    return repo


def _writable(hub: HubState, request: Request, repo_id: str) -> Repository:
    repo = _readable(hub, request, repo_id)
    _identified(request)
    if repo.write_token not in (None, request.token):
        raise _refuse(403, 403, "no permission to write to this model")
    return repo


def _at(repo: Repository, revision: str) -> Commit:
    try:
        return repo.at(revision)
    except NoSuchRevision:
        raise _refuse(404, _NO_TREE, f"revision {revision} does not exist") from None


def _create(hub: HubState, request: Request) -> Reply:
    _identified(request)
    wanted = request.json
    repo_id = f"{wanted['Path']}/{wanted['Name']}"
    with hub.lock:
        if hub.find("ms", repo_id) is not None:
            raise _refuse(400, _EXISTS, "the name is registered already")
        repo = Repository(repo_id, "ms", private=wanted.get("Visibility") == _PRIVATE)
        repo.commit_blobs(FIRST_FILES, message="initial commit")
        hub.repositories["ms", repo_id] = repo
    return _success({"Id": 1, "Path": wanted["Path"], "Name": wanted["Name"]})


def _listing(request: Request, repo: Repository) -> Reply:
    commit = _at(repo, request.query.get("Revision") or repo.default_branch)
    root = request.query.get("Root", "").strip("/")
    recursive = request.query.get("Recursive", "").lower() == "true"
    entries = []
    for entry in _entries(commit):
        inside = entry["Path"].removeprefix(f"{root}/") if root else entry["Path"]
        below = not root or inside != entry["Path"]
        if below and (recursive or "/" not in inside):
            entries.append(entry)
    # As the public hub does it: the id of the commit is empty, and abbreviated beside that.
    return _success({"Files": entries, "LatestCommitter": {"Id": "", "ShortId": commit.oid[:8]}})


def _entries(commit: Commit) -> Iterable[dict[str, Any]]:
    shared = {
        "Revision": commit.oid,
        "CommittedDate": commit.time,
        "CommitMessage": commit.message,
        "InCheck": False,
    }
    for path in commit.folders:
        yield shared | _named(path) | {"Type": "tree", "Size": 0, "Sha256": "", "IsLFS": False}
    for path, blob in commit.blobs.items():
        about = {"Type": "blob", "Size": len(blob.data), "Sha256": blob.sha256, "IsLFS": blob.lfs}
        yield shared | _named(path) | about


def _named(path: str) -> dict[str, str]:
    return {"Path": path, "Name": path.rpartition("/")[2]}


def _content(hub: HubState, request: Request, repo: Repository) -> Reply:
    commit = _at(repo, request.query.get("Revision") or repo.default_branch)
    path = request.query.get("FilePath", "")
    blob = commit.blobs.get(path)
    if blob is None:
        raise _refuse(404, _MISSING, f"file {path} does not exist")
    if blob.lfs and hub.lfs_redirect is not None and request.host == "origin":
        return Reply(302, {"Location": signed_address(hub, repo, commit, path)})
    return serve_content(request, blob.data, lambda other: commit.blobs[other].data, {})


def _commit(hub: HubState, request: Request, repo: Repository, branch: str) -> Reply:
    wanted = request.json
    changes = dict(_change(repo, action) for action in wanted["actions"])
    try:
        commit = repo.commit_blobs(changes, message=wanted["commit_message"], branch=branch)
    except NoSuchRevision:
        raise _refuse(404, _MISSING, f"branch {branch} does not exist") from None
    address = f"{hub.url}/models/{repo.id}/commit/{commit.oid}"
    return _success({"oid": commit.oid, "CommitId": commit.oid, "commit_url": address})


def _change(repo: Repository, action: Mapping[str, Any]) -> tuple[str, Blob | None]:
    path = action["path"]
    if action["action"] == "delete":
        return path, None
    if action["type"] == "normal":
        data = base64.b64decode(action["content"])
        if len(data) != action["size"]:
            raise _refuse(400, _BAD_INPUT, f"{path} has another size")
        return path, Blob(data, lfs=False)
    stored = repo.objects.get(action["sha256"])
    if stored is None or len(stored) != action["size"]:
        raise _refuse(400, _BAD_INPUT, f"the object of {path} was not uploaded")
    return path, Blob(stored, lfs=True)


def _tag(request: Request, repo: Repository) -> Reply:
    wanted = request.json
    with repo.lock:
        oid = _at(repo, wanted["Ref"]).oid
        if wanted["TagName"] in repo.tags:
            raise _refuse(400, _BAD_INPUT, f"tag {wanted['TagName']} already exists")
        repo.tags[wanted["TagName"]] = oid
    return _success({})
