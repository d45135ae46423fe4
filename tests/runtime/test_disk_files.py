"""Files of records: what is read is what was written under the same name and tag, the folder is
private, and the files used longest ago leave first; and first tokens that come back from them."""

import os
from pathlib import Path

import pytest
import torch

from oscar_zoo.errors import StorageError
from oscar_zoo.runtime.disk_files import DiskFiles
from oscar_zoo.runtime.disk_sinks import DiskSinks
from oscar_zoo.runtime.sink_blocks import MISS, PromptKey, SinkBlocks
from oscar_zoo.runtime.stores import WindowShape, WindowStore

TAG, OTHER = "oz1-" + "0" * 16, "oz1-" + "1" * 16
NAMES = [f"{number:064x}.page" for number in range(10)]
DATA = bytes(range(256)) * 4


def read(files: DiskFiles, name: str, size: int = len(DATA)) -> bytes | None:
    target = bytearray(size)
    return bytes(target) if files.read(name, memoryview(target)) else None


def test_what_is_read_is_what_was_written_under_this_name_and_tag(tmp_path: Path) -> None:
    files, other = (DiskFiles(tmp_path / "a", tag) for tag in (TAG, OTHER))
    assert files.write(NAMES[0], memoryview(DATA[:100]), memoryview(DATA[100:]))
    assert read(files, NAMES[0]) == DATA and read(other, NAMES[0]) is None
    assert files.write(NAMES[0], memoryview(b"later")) and read(files, NAMES[0]) == DATA
    assert other.counts["broken"] == 0, "there is no such file"
    place = tmp_path / "a" / TAG / NAMES[0]
    for wrong in (place.with_name(NAMES[1]), tmp_path / "a" / OTHER / NAMES[0]):
        os.link(place, wrong)
    assert read(files, NAMES[1]) is None and read(other, NAMES[0]) is None
    assert read(files, NAMES[0], len(DATA) - 1) is None, "another size"
    assert (files.counts["broken"], other.counts["broken"]) == (2, 1)
    assert not files.has(NAMES[0]) and not files.has(NAMES[1]), "removed, to be written again"
    assert files.write(NAMES[0], memoryview(DATA)) and read(files, NAMES[0]) == DATA
    os.truncate(place, 100)
    assert files.write(NAMES[0], memoryview(DATA)) and read(files, NAMES[0]) == DATA
    assert files.counts["broken"] == 3, "after one that is broken, none is taken for whole"


@pytest.mark.parametrize("name", ["../x.page", "0.page", "0" * 64, "0" * 64 + ".page\n"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        DiskFiles(tmp_path / "a", TAG).has(name)


def test_the_folder_is_ours_alone(tmp_path: Path) -> None:
    DiskFiles(tmp_path / "new", TAG)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StorageError, match="open to others"):
        DiskFiles(tmp_path / "open", TAG)


def test_the_files_used_longest_ago_leave_first_whatever_their_tag(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    old, files = DiskFiles(folder, OTHER), DiskFiles(folder, TAG, limit=6 * 1200)
    foreign = [folder / "notes", folder / TAG / "notes"]
    for path in foreign:
        path.write_bytes(DATA * 10)
    old.write(NAMES[0], memoryview(DATA))
    os.utime(folder / OTHER / NAMES[0], ns=(0, 0))
    for at, name in enumerate(NAMES):
        files.write(name, memoryview(DATA))
        os.utime(folder / TAG / name, ns=(at, at))
        os.utime(folder / TAG / NAMES[0])  # as a read does
    assert files.has(NAMES[0]) and files.has(NAMES[-1]) and not files.has(NAMES[1])
    assert not old.has(NAMES[0]) and files.counts["removed"] == 11 - len([*folder.glob("*/*.page")])
    total = sum(path.stat().st_size for path in folder.glob("oz1-*/*.page"))
    assert total <= files.limit and all(path.exists() for path in foreign)


def test_a_full_disk_is_counted_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = DiskFiles(tmp_path / "a", TAG)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert not files.write(NAMES[0], memoryview(DATA))
    assert files.counts["failed"] == 1 and [*(tmp_path / "a" / TAG).iterdir()] == []


def windows(folder: Path, host: int) -> WindowStore:
    """A store with four blocks of first tokens, and files of them in `folder`."""
    shape = WindowShape(2, 3, 1, 4, 4, sink=4, recent=3, dtype=torch.float32, host=host)
    store = WindowStore(shape, "cpu", SinkBlocks(4, shape.num_blocks, 3, host))
    DiskSinks(DiskFiles(folder, TAG), store)
    return store


def test_a_prompt_is_promised_first_tokens_only_where_they_stay(tmp_path: Path) -> None:
    prompts = [PromptKey((None,), (n,) * 4, 20) for n in range(3)]
    store = windows(tmp_path / "a", host=1)
    written: list[torch.Tensor] = []
    for row, prompt in enumerate(prompts[:2], 1):
        store.sinks.admit([row], [prompt])
        store.hand_out([row])
        store.begin({row: 0})
        store.sinks.launched([row], [20])
        block = int(store.sink_block[row])
        store.sink_k[:, block], store.sink_v[:, block] = row, -row
        written.append(store.sink_k[:, block].clone())
    store.before_step()
    files = tmp_path / "a" / TAG
    while len([*files.glob("*.sinks")]) < 2:
        pass
    again = windows(tmp_path / "a", host=1)
    tails = [again.sinks.reprefill_tail(prompt) for prompt in prompts]
    assert tails == [3, MISS, MISS], "the only place is promised, and nobody knows the last one"
    again.sinks.admit([1], [prompts[0]])
    again.begin({1: 10})
    block = int(again.sink_block[1])
    assert torch.equal(again.sink_k[:, block], written[0]) and again.sinks.host_hits == 1
    assert again.sinks.reprefill_tail(prompts[1]) == 3
    again.sinks.admit([2], [prompts[1]])
    again.begin({2: 10})
    assert torch.equal(again.sink_k[:, int(again.sink_block[2])], written[1])
