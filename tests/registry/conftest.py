from pathlib import Path

import pytest

from oscar_zoo.registry import changes
from oscar_zoo.registry.store import Store


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that lost against another one try again at once."""
    monkeypatch.setattr(changes, "_JITTER_SECONDS", 0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")
