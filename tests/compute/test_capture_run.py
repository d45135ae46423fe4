"""What an interrupted capture leaves, and what is noted of it."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from oscar_zoo.cli import main
from oscar_zoo.compute.capture.run import kept_for_resume
from oscar_zoo.compute.capture.state import STATE


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "r.work"
    for saved in (False, True):
        if saved:
            (work / "capture").mkdir(parents=True)
            (work / "capture" / STATE).write_text("{}")
        with pytest.raises(KeyboardInterrupt) as caught, kept_for_resume(work):
            raise KeyboardInterrupt
        aborted = click.Abort()
        aborted.__cause__ = caught.value  # what click makes of it
        main._report(aborted, as_json=False)
        line = capsys.readouterr().err
        assert (
            "nothing was left half-written" in line
            and (f"is kept in {work}" in line) == saved == work.exists()
        )
