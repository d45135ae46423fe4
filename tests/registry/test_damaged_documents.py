"""Whatever is wrong with a document, its error has a next step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.signature_file import SignatureFile
from oscar_zoo.compute.report.data import ReportData
from oscar_zoo.errors import MalformedFile
from oscar_zoo.registry.catalog import KnownDigests, TrustedKeys
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.pins import KNOWN_NAME, LOCK_NAME, PinFile
from oscar_zoo.registry.score_file import ScoreFile
from oscar_zoo.registry.trust import Timestamp

DAMAGED = (b"\xff", b"{", b"[]", b"{}", b'{"a": 1, "a": 2}', b"[" * 100, b'{"schema": NaN}')
READERS: dict[str, Callable[[bytes], object]] = {
    "index": Index.from_bytes,
    "scores": ScoreFile.from_bytes,
    "report": ReportData.from_bytes,
    "manifest": Manifest.from_bytes,
    "signature": SignatureFile.from_bytes,
    "timestamp": Timestamp.from_bytes,
    "trusted keys": TrustedKeys.from_bytes,
    "known digests": KnownDigests.from_bytes,
}


@pytest.mark.parametrize("data", DAMAGED)
@pytest.mark.parametrize("document", READERS)
def test_a_damaged_document(document: str, data: bytes) -> None:
    with pytest.raises(MalformedFile) as info:
        READERS[document](data)
    assert info.value.hint


@pytest.mark.parametrize("data", DAMAGED)
@pytest.mark.parametrize(
    ("name", "step"), [(LOCK_NAME, "restore it from your repository"), (KNOWN_NAME, "move it away")]
)
def test_damaged_pins(name: str, step: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MalformedFile) as info:
        PinFile(tmp_path / name).read()
    assert info.value.hint
    assert step in info.value.hint or "newer version" in info.value.hint


def test_pins_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(MalformedFile) as info:
        PinFile(tmp_path / LOCK_NAME).read()
    assert info.value.hint
