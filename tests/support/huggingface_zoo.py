"""A Hugging Face repository on the loopback hub, for tests of reading and of writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_server import HubServer

from oscar_zoo.artifact.names import ArtifactId

ROOT = Path(__file__).resolve().parents[2]
CANARY = "hf_canaryCANARY"
QWEN = ArtifactId("Qwen3-8B", "seq1_prompt1_group128")
K = bytes(range(256)) * 400
FILES = {
    f"{QWEN}/k.pt": K,
    f"{QWEN}/v.pt": K[::-1],
    f"{QWEN}/oscar.json": b'{"a": 1}',
    "Odd #1/tag/k?.pt": b"odd",
    "index.json": b"{}",
}


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub with `org/name`, and a client in this process that asks it without a token."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_OIDC_RESOURCE",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repository("org/name", files=FILES)
        yield server
