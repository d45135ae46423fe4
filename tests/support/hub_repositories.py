"""Repositories in memory: commits of whole trees, branches, tags, proposals and stored large files.

A commit is a map from path to blob. One lock per repository makes compare-and-swap on the parent
real.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Kind = Literal["hf", "ms"]
LFS_SUFFIXES = (".pt", ".safetensors", ".gguf")
LFS_SIZE = 10 << 20
_START = 1_750_000_000


class NoSuchRevision(LookupError):
    """Neither branch, tag, proposal nor commit."""


class StaleParent(Exception):
    """The branch is not where the writer believes it to be."""


@dataclass(frozen=True)
class Blob:
    """One version of a file; `lfs` says how the hub stores it."""

    data: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git holds instead of a large file."""
        first = "version https://git-lfs.github.com/spec/v1"
        return f"{first}\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()

    @cached_property
    def git_oid(self) -> str:
        """Sha1 of the git object: of the pointer, for a large file."""
        data = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


FIRST_FILES = {".gitattributes": Blob(b"*.pt filter=lfs diff=lfs merge=lfs -text\n", lfs=False)}
"""What a repository holds that a client has just made."""


@dataclass(frozen=True)
class Commit:
    """A state of the whole repository."""

    oid: str
    parent: str | None
    message: str
    blobs: Mapping[str, Blob]
    time: int

    @property
    def files(self) -> dict[str, bytes]:
        return {path: blob.data for path, blob in self.blobs.items()}

    @property
    def folders(self) -> list[str]:
        """Every folder, sorted."""
        return sorted(
            {name[:i] for name in self.blobs for i, char in enumerate(name) if char == "/"}
        )


@dataclass(frozen=True)
class Pull:
    number: int
    branch: str
    commit: Commit


def is_lfs(path: str, size: int) -> bool:
    """Whether a hub stores a file apart from git."""
    return path.endswith(LFS_SUFFIXES) or size > LFS_SIZE


@dataclass
class Repository:
    """One repository.

    Attributes:
        token: who reads must show it; without one a private repository takes any token.
        write_token: who writes must show it; without one any token may write.
        gated: content only for `token`; listings for everyone.
        objects: stored large files by sha256.
        history: every commit that can be asked for.
        tags: commit by tag.
        pulls: proposed commits, oldest first.
    """

    id: str
    kind: Kind = "hf"
    private: bool = False
    gated: bool = False
    token: str | None = None
    write_token: str | None = None
    objects: dict[str, bytes] = field(default_factory=dict, repr=False)
    history: dict[str, Commit] = field(default_factory=dict, repr=False)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: list[Pull] = field(default_factory=list, repr=False)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _count: itertools.count[int] = field(default_factory=itertools.count, repr=False)

    def access(
        self, token: str | None, *, content: bool
    ) -> Literal["granted", "wrong token", "hidden", "gated"]:
        """Whether `token` may read it; `content` is what gates close."""
        known = self.token is None or token in (self.token, self.write_token)
        if self.gated:
            named = token and self.token is not None and known
            return "gated" if content and not named else "granted"
        if token:
            return "granted" if known else "wrong token"
        return "hidden" if self.private or self.token is not None else "granted"

    @property
    def default_branch(self) -> str:
        return "main" if self.kind == "hf" else "master"

    @property
    def commits(self) -> list[Commit]:
        """History of the default branch, oldest first."""
        return self.log(self.default_branch)

    def log(self, revision: str) -> list[Commit]:
        """History of a revision, oldest first."""
        found: list[Commit] = []
        oid: str | None = self.at(revision).oid
        while oid is not None and oid in self.history:
            found.append(self.history[oid])
            oid = self.history[oid].parent
        return found[::-1]

    def head(self, branch: str | None = None) -> str:
        return self.branches[branch or self.default_branch]

    def files(self, revision: str | None = None) -> dict[str, bytes]:
        return self.at(revision or self.default_branch).files

    def at(self, revision: str) -> Commit:
        """The commit a branch, tag, proposal or commit id means."""
        with self.lock:
            name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
            oid = self.branches.get(name) or self.tags.get(name) or name
            for pull in self.pulls:
                if revision == pull.branch:
                    return pull.commit
            try:
                return self.history[oid]
            except KeyError:
                raise NoSuchRevision(revision) from None

    def commit(
        self,
        changes: Mapping[str, bytes | None],
        *,
        message: str = "Change",
        branch: str | None = None,
    ) -> str:
        """Commit behind every client's back; `None` deletes a path. Returns the commit's id."""
        blobs = {
            path: None if data is None else Blob(bytes(data), is_lfs(path, len(data)))
            for path, data in changes.items()
        }
        return self.commit_blobs(blobs, message=message, branch=branch).oid

    def commit_blobs(
        self,
        changes: Mapping[str, Blob | None],
        *,
        message: str,
        branch: str | None = None,
        parent: str | None = None,
    ) -> Commit:
        """Commit to a branch, if it is still at `parent`."""
        branch = branch or self.default_branch
        with self.lock:
            if branch not in self.branches and self.history:
                raise NoSuchRevision(branch)
            head = self.branches.get(branch)
            if parent is not None and parent != head:
                raise StaleParent(f"{branch} is at {head}, not {parent}")
            commit = self._make(changes, message, head)
            self.branches[branch] = commit.oid
            return commit

    def propose(self, changes: Mapping[str, Blob | None], *, message: str, base: str) -> Pull:
        """Open a proposal from the revision `base`."""
        with self.lock:
            number = len(self.pulls) + 1
            pull = Pull(
                number, f"refs/pr/{number}", self._make(changes, message, self.at(base).oid)
            )
            self.pulls.append(pull)
            return pull

    def merge(self, number: int) -> str:
        """Bring what a proposal changes to the default branch; returns the commit's id."""
        with self.lock:
            commit = self.pulls[number - 1].commit
            before = self.history[commit.parent].blobs if commit.parent else {}
            changed = {key: blob for key, blob in commit.blobs.items() if before.get(key) != blob}
            return self.commit_blobs(changed, message=commit.message).oid

    def rewrite_history(self) -> str:
        """Force-push one commit with the same files: all other commits and all tags are gone.
        Returns its id."""
        with self.lock:
            blobs = self.at(self.default_branch).blobs
            for store in (self.history, self.branches, self.tags):
                store.clear()
            self.pulls.clear()
            return self.commit_blobs(blobs, message="Rewrite history").oid

    def _make(self, changes: Mapping[str, Blob | None], message: str, parent: str | None) -> Commit:
        blobs = dict(self.history[parent].blobs) if parent else {}
        for path, blob in changes.items():
            if blob is None:
                blobs.pop(path, None)
            else:
                blobs[path] = blob
                if blob.lfs:
                    self.objects[blob.sha256] = blob.data
        number = next(self._count)
        tree = [(path, blob.git_oid) for path, blob in sorted(blobs.items())]
        seed = repr((self.kind, self.id, parent, message, number, tree)).encode()
        oid = hashlib.sha1(seed, usedforsecurity=False).hexdigest()
        commit = Commit(oid, parent, message, dict(sorted(blobs.items())), _START + number)
        self.history[oid] = commit
        return commit


@dataclass
class HubState:
    """What all routes share.

    Attributes:
        lfs_redirect: large files are served by the first address (`None`), or it redirects to the
            other port (`cdn`) or to another path of its own (`same`).
        paged: entries per page of a listing, or 0 for one page.
    """

    url: str = ""
    cdn_url: str = ""
    plain_url: str = ""
    lfs_redirect: Literal["cdn", "same"] | None = None
    paged: int = 0
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def find(self, kind: Kind, repo_id: str) -> Repository | None:
        return self.repositories.get((kind, repo_id))
