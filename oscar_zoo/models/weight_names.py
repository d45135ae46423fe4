"""The names and the files of the weights of a checkpoint folder, from its index or from the header
of its only file. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.artifact import strict_json
from oscar_zoo.errors import InvalidModel, MalformedFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 1 << 27
AGAIN = "the checkpoint is incomplete or damaged; download it again"


def stored_names(folder: Path) -> frozenset[str] | None:
    """The names of all weights; `None` where neither `SINGLE` nor `INDEX` is in `folder`."""
    single, index = folder / SINGLE, folder / INDEX
    try:
        if single.is_file():
            return _names_in(single)
        if not index.is_file():
            return None
        data = index.read_bytes()
    except OSError as error:
        raise InvalidModel(f"cannot read the weights of {folder}: {error}.", hint=AGAIN) from None
    return frozenset(index_files(data, str(index)))


def index_files(index: bytes, what: str) -> dict[str, str]:
    """Name of a tensor -> name of its file; raises `InvalidModel`."""
    try:
        named = strict_json.loads(index, what=what, max_bytes=LARGEST_INDEX)["weight_map"]
        if not named or not all(
            isinstance(file, str) and Path(file).name == file for file in named.values()
        ):
            raise ValueError("its weight_map names no files")
    except (MalformedFile, LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidModel(
            f"{what} is no index of weights: {first_line(error)}.", hint=AGAIN
        ) from None
    return dict(named)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: `SINGLE`, else those that `INDEX` names, there or not, else
    every safetensors file.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    named = index_files((folder / INDEX).read_bytes(), str(folder / INDEX))
    return [folder / file for file in sorted(set(named.values()))]


def first_line(error: Exception) -> str:
    """The first line of the text of `error`, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return lines[0][:300].rstrip(".")


def _names_in(file: Path) -> frozenset[str]:
    """From the header of a safetensors file: 8 bytes with its length, then a JSON object."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= LARGEST_INDEX else b""
    try:
        named = strict_json.loads(header, what=str(file), max_bytes=LARGEST_INDEX)
    except MalformedFile as error:
        raise InvalidModel(f"cannot load {file}: {first_line(error)}.", hint=AGAIN) from None
    if not isinstance(named, dict):
        raise InvalidModel(f"cannot load {file}: its header names no weights.", hint=AGAIN)
    return frozenset(named) - {"__metadata__"}
