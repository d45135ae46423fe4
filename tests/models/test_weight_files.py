"""Damaged weights are known from headers and sizes, whichever file has the damage."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import save_model

from oscar_zoo.errors import InvalidModel
from oscar_zoo.models.weight_files import INDEX, check_weight_files, fingerprint


def last(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"))


def longer(folder: Path) -> None:
    with last(folder).open("ab") as stream:
        stream.write(b"\0")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: os.truncate(last(f), last(f).stat().st_size - 1), "and its header says"),
    "cut in its header": (lambda f: os.truncate(last(f), 100), "less than its header"),
    "cut to nothing": (lambda f: os.truncate(last(f), 0), "no safetensors header"),
    "longer": (longer, "and its header says"),
    "a pointer": (lambda f: last(f).write_bytes(b"version https://git-lfs"), "than its header"),
    "header of another kind": (
        lambda f: last(f).write_bytes((2).to_bytes(8, "little") + b"[]"),
        "no safetensors header",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("shard", ["20KB", None])
def test_a_damaged_file_is_named(shard: str | None, damage: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **({"shard": shard} if shard else {}))
    check_weight_files(folder)
    change, said = DAMAGE[damage]
    change(folder)
    with pytest.raises(InvalidModel, match=said) as info:
        check_weight_files(folder)
    assert last(folder).name in info.value.message
    assert "download it again" in str(info.value.hint)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", shard="20KB")
    last(folder).unlink()
    with pytest.raises(InvalidModel, match=r"lacks 1 of \d+ weight files"):
        check_weight_files(folder)


def test_files_that_no_server_reads_do_not_count(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", shard="20KB")
    assert (folder / INDEX).is_file()
    (folder / "consolidated.safetensors").write_bytes(b"?")
    check_weight_files(folder)


def test_a_fingerprint_tells_fine_tunes_of_one_base_apart(tmp_path: Path) -> None:
    """Their files have the same names and sizes, and may have the same times."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    before, base = weights.stat(), fingerprint(tmp_path)
    assert fingerprint(tmp_path) == base

    def kept(path: Path) -> str:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return fingerprint(tmp_path)

    weights.write_bytes(bytes(2_000_000) + b"\1" * 20_000 + bytes(980_000))
    assert kept(weights) != base
    weights.write_bytes(bytes(3_000_000))
    assert kept(weights) == base
    os.utime(weights)
    assert fingerprint(tmp_path) != base and kept(weights) == base
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint(tmp_path) != base
