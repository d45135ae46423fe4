"""Who may read and write a repository of the Hugging Face hub, and how it says no."""

from __future__ import annotations

from hub_repositories import Commit, HubState, NoSuchRevision, Repository
from hub_wire import Refused, Request, as_json

_ANONYMOUS = "Invalid username or password."
_WRONG_TOKEN = "Invalid credentials in Authorization header"


def refuse(status: int, message: str, code: str | None = None, **headers: str) -> Refused:
    """An error as this hub words it: the client goes by the headers."""
    extra = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | headers
    return Refused(as_json({"error": message}, status, extra))


def readable(hub: HubState, request: Request, repo_id: str, *, content: bool = False) -> Repository:
    """The repository, if the token of the request may read it; `content` is what gates close."""
    repo, token = hub.find("hf", repo_id), request.token
    if repo is None:
        raise refuse(
            404 if token else 401, "Repository not found" if token else _ANONYMOUS, "RepoNotFound"
        )
    known = repo.token is None or token in (repo.token, repo.write_token)
    if token and not known and not repo.gated:
        raise refuse(401, _WRONG_TOKEN)
    if not token and not repo.gated and (repo.private or repo.token is not None):
        raise refuse(401, _ANONYMOUS, "RepoNotFound")
    if content and repo.gated and not (token and repo.token is not None and known):
        restricted = f"Access to model {repo_id} is restricted"
        if token:
            raise refuse(403, f"{restricted} and you are not in the authorized list.", "GatedRepo")
        raise refuse(
            401, f"{restricted}. You must have access to it and be authenticated.", "GatedRepo"
        )
    return repo


def writable(hub: HubState, request: Request, repo_id: str) -> Repository:
    """The repository, if the token may write to it; anyone with a token may propose."""
    repo = readable(hub, request, repo_id)
    identified(request)
    if request.query.get("create_pr") != "1" and repo.write_token not in (None, request.token):
        raise refuse(403, "Forbidden: you must use a write token to upload to a repository")
    return repo


def at(repo: Repository, revision: str) -> Commit:
    """What a revision means."""
    try:
        return repo.at(revision)
    except NoSuchRevision:
        raise refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None


def identified(request: Request) -> None:
    """Refuse a request without a token."""
    if request.token is None:
        raise refuse(401, _ANONYMOUS)
