"""A small zoo on a loopback ModelScope: what it holds, how tests open it, and a change to make to
it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.hubs.base import Change
from oscar_zoo.registry.hubs.http import Limits
from oscar_zoo.registry.hubs.modelscope import open_modelscope
from oscar_zoo.registry.hubs.remote import RemoteHub

ID = ArtifactId("Tiny", "seq8_prompt1_group8")
OTHER = ArtifactId("Tiny", "seq9_prompt1_group8")
ROTATION = bytes(range(256)) * 40
FILES = {
    f"{ID}/k.pt": ROTATION,
    f"{ID}/oscar.json": b"{}",
    "index.json": b'{"serial":1}',
    "README.md": b"# Zoo\n",
}
CANARY = "ms-canary-CANARY"
LISTING, COMMIT = "*/repo/files*", "*/commit/*"


def isolate(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """No variable of the developer, a home of our own, and a client that may ask loopback."""
    for name in [
        name
        for name in os.environ
        if name.startswith("MODELSCOPE_") or name.lower().endswith("_proxy")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def open_zoo(revision: str | None = None, **limits: Any) -> RemoteHub:
    """The zoo as a hub that is asked once."""
    return open_modelscope("org/zoo", revision, limits=Limits(**{"tries": 1, "read": 20} | limits))


def addition(parent: str | None, **other: Any) -> Change:
    """One more artifact, and an index that has it."""
    files, root = {"k.pt": ROTATION[::-1], "oscar.json": b"[]"}, {"index.json": b'{"serial":2}'}
    return Change(
        **{"artifact": OTHER, "files": files, "root": root, "parent": parent, "message": "Add"}
        | other
    )


def posts(server: HubServer) -> list[str]:
    """Paths of the requests that write."""
    return [record.path for record in server.requests if record.method == "POST"]


def without_commits(files: Mapping[str, bytes]) -> str:
    """What a hub lists that does not tell its commits."""
    entries = [
        {
            "Path": path,
            "Type": "blob",
            "Size": len(data),
            "Sha256": hashlib.sha256(data).hexdigest(),
        }
        for path, data in files.items()
    ]
    return json.dumps({"Code": 200, "Success": True, "Data": {"Files": entries}})
