"""The only door for rotation files: untrusted bytes -> `RotationSet`, by our own strict parser.

A file is read once and completely into one bytes object (`files.read_file`), and that same object
is hashed and parsed. Nothing here imports or calls anything a file asks for; see `archive`,
`pickle_reader` and `rotation_schema` for the three rooms behind this door.
"""

from __future__ import annotations

from oscar_zoo.artifact import archive, pickle_reader, rotation_schema
from oscar_zoo.artifact.files import mistaken_content
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.errors import MalformedFile, UnsupportedFormat

_LEGACY = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def read_rotation(data: bytes, *, what: str) -> RotationSet:
    """Parse a rotation file of format_version 1, 2 or 3.

    Args:
        data: the whole file, untrusted.

    Returns:
        The content. Arrays are read-only float32 views into `data` (copies where it is not
        aligned).
    """
    _name_kind(data, what)
    records = archive.read_archive(data, what=what)
    top = pickle_reader.load(records[archive.PICKLE], what=what)
    return rotation_schema.build(top, records, what=what)


def _name_kind(data: bytes, what: str) -> None:
    """Raise for things people take for a rotation file, by name."""
    mistaken = mistaken_content(data)
    if mistaken is not None:
        reason, words, hint = mistaken
        raise MalformedFile(reason, f"{what} is {words}.", hint=hint)
    if data.startswith(_LEGACY):
        raise MalformedFile(
            "file.legacy_pickle",
            f"{what} is a bare pickle, not an archive.",
            hint="only files of torch >= 1.6 are read",
        )
    if data.startswith(b"GGUF"):
        raise UnsupportedFormat("gguf", f"{what} is a GGUF file, not a rotation file.")
    if not data.startswith(b"PK"):
        raise MalformedFile(
            "file.unknown", f"{what} is not a rotation file (it starts with {data[:4]!r})."
        )
