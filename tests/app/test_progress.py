"""The observer that nobody watches."""

from oscar_zoo.app.progress import SILENT, Note


def test_the_silent_observer_takes_everything_and_says_no() -> None:
    SILENT.begin((), timed=False)
    SILENT.advance("capture", 1, 2, "tokens")
    SILENT.note(Note("pull.yanked", "This version was yanked.", {"name": "A/b"}))
    assert SILENT.confirm(Note("compute.start", "Compute it now?")) is False
