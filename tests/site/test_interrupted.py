"""What was written to a hub before somebody interrupted the next one is told."""

from pathlib import Path

import pytest
from hub_uses import HARD, hub_with
from tiny_artifacts import artifact_files

from oscar_zoo.site import status
from oscar_zoo.site.params import YankParams
from oscar_zoo.site.status import run


def test_an_interrupt_names_written_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hubs = [hub_with(tmp_path / name, artifact_files()).name for name in ("one", "two")]
    write = status.set_status

    def interrupted(hub: object, *words: object, **more: object) -> object:
        if getattr(hub, "name", None) == hubs[1]:
            raise KeyboardInterrupt
        return write(hub, *words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(status, "set_status", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(YankParams(HARD.reference, reason="wrong", hubs=tuple(hubs)))
    assert caught.value.__notes__ == [f"written before that: {hubs[0]}"]
