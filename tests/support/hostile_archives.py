"""Archives with any lie in any header field, and the bad files made of them.

Checksums are right unless the checksum is what is wrong, so every file reaches the rule it is
about.
"""

import io
import pickle
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tiny_artifacts as tiny

from oscar_zoo.artifact.archive import read_archive
from oscar_zoo.artifact.writer import rotation_bytes

Case = tuple[str, str, bytes]
"""Name, the code the file must be refused with, content."""


@dataclass
class Record:
    """One record with every header field open to lies."""

    name: str | bytes
    content: bytes
    flags: int = 0
    method: int = 0
    crc: int | None = None
    size: int | None = None
    extra: bytes | None = None
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)
    descriptor: bytes | None = None
    before: bytes = b""


def archive(records: Sequence[Record], **end: Any) -> bytes:
    """Build a ZIP file from `records`; `end` overrides fields of the end record or adds `zip64`,
    `suffix`, `middle`."""
    body, directory = bytearray(), bytearray()
    for record in records:
        body += record.before
        name = record.name if isinstance(record.name, bytes) else record.name.encode()
        crc = zlib.crc32(record.content) if record.crc is None else record.crc
        size = len(record.content) if record.size is None else record.size
        extra = padding(len(body) + 30 + len(name)) if record.extra is None else record.extra
        facts = {"needed": 0, "flags": record.flags, "method": record.method, "time": 0, "date": 0}
        sizes = {"crc": crc, "stored": size, "size": size}
        here = facts | (dict.fromkeys(sizes, 0) if record.flags & 8 else sizes) | record.local
        offset = record.central.get("offset", len(body))
        body += struct.pack("<4s5H3I2H", b"PK\3\4", *here.values(), len(name), len(extra))
        body += name + extra + record.content
        if record.flags & 8:
            body += record.descriptor or struct.pack("<4s3I", b"PK\7\x08", crc, size, size)
        there = facts | sizes | {k: v for k, v in record.central.items() if k in facts | sizes}
        tail = [record.central.get(key, 0) for key in ("disk", "internal", "external")]
        addition, comment = record.central.get("extra", b""), record.central.get("comment", b"")
        made_by = record.central.get("made_by", 0)
        directory += struct.pack("<4sH", b"PK\1\2", made_by) + struct.pack("<5H3I", *there.values())
        directory += struct.pack("<5H2I", len(name), len(addition), len(comment), *tail, offset)
        directory += name + addition + comment
    body += end.get("middle", b"")
    count, size, start = (
        end.get("count", len(records)),
        end.get("size", len(directory)),
        end.get("start", len(body)),
    )
    tail64 = b""
    if "zip64" in end:
        fields = [44, 0x031E, 45, 0, 0, count, count, size, start]
        fields[end["zip64"]] += end["zip64"] > 0
        where = len(body) + len(directory)
        tail64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", *fields) + struct.pack(
            "<4sIQI",
            b"PK\6\7",
            end.get("disk64", 0),
            where + end.get("shift64", 0),
            end.get("disks64", 1),
        )
    comment = end.get("comment", b"")
    disks = end.get("disks", (0, 0))
    last = struct.pack(
        "<4s4H2IH", b"PK\5\6", *disks, end.get("here", count), count, size, start, len(comment)
    )
    return bytes(
        end.get("prefix", b"") + body + directory + tail64 + last + comment + end.get("suffix", b"")
    )


def padding(position: int) -> bytes:
    """The extra field that brings the data behind `position` to a multiple of 64."""
    size = -(position + 4) % 64
    return b"FB" + struct.pack("<H", size) + b"Z" * size


def good_file() -> bytes:
    """The file every case starts from."""
    return rotation_bytes(tiny.rotation_set())


def good_records(data: bytes | None = None) -> list[Record]:
    found = read_archive(good_file() if data is None else data, what="good")
    return [Record(f"archive/{name}", bytes(content)) for name, content in found.items()]


def with_record(index: int, **changes: Any) -> bytes:
    records = good_records()
    for name, value in changes.items():
        setattr(records[index], name, value)
    return archive(records)


def with_content(name: str, content: bytes) -> bytes:
    records = good_records()
    next(record for record in records if record.name == f"archive/{name}").content = content
    return archive(records)


def cases() -> Iterator[Case]:
    yield from _files()
    yield from _archives()
    yield from _names()


def _files() -> Iterator[Case]:
    good = good_file()
    yield "empty", "file.empty", b""
    yield "html", "file.html", b"\n<!DOCTYPE html><html></html>"
    yield "html-2", "file.html", b"<html><body>404</body></html>"
    yield "lfs", "file.lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    yield "legacy", "file.legacy_pickle", pickle.dumps({"format_version": 1}, protocol=2)
    yield "legacy-4", "file.legacy_pickle", pickle.dumps([1], protocol=4)
    yield "text", "file.unknown", b"hello"
    yield "gguf", "gguf", b"GGUF" + bytes(40)
    for part in (0.02, 0.3, 0.9):
        yield f"truncated-{part}", "file.truncated", good[: int(len(good) * part)]
    yield "cut-1", "file.truncated", good[:-1]
    yield "only-end", "zip.prefix", good[-22:]
    npz = io.BytesIO()
    np.savez(npz, rotation=np.eye(4))
    yield "npz", "zip.attributes", npz.getvalue()


def _archives() -> Iterator[Case]:
    good = good_records()
    streamed = [Record(r.name, r.content, flags=0x0808) for r in good]
    yield "prefix", "file.unknown", archive(good, prefix=b"MZ")
    yield "prefix-zip", "zip.end", archive(good, prefix=archive(good[:1]))
    yield "suffix", "zip.suffix", archive(good, suffix=b"\0")
    yield "comment", "zip.suffix", archive(good, comment=b"hi")
    yield "two-disks", "zip.disk", archive(good, disks=(1, 0))
    yield "directory-disk", "zip.disk", archive(good, disks=(0, 1))
    yield "here-differs", "zip.disk", archive(good, here=1)
    yield "count-0", "zip.records", archive(good, count=0)
    yield "count-9000", "zip.records", archive(good, count=9000)
    yield "count-low", "zip.directory", archive(good, count=len(good) - 1)
    yield "count-high", "zip.directory", archive(good, count=len(good) + 1)
    yield "size-low", "zip.end", archive(good, size=10)
    yield "start-far", "zip.end", archive(good, start=1 << 31)
    yield "middle", "zip.gap", archive(good, middle=b"hidden")
    for place in range(1, 9):
        yield f"zip64-{place}", "zip.zip64", archive(good, zip64=place)
    for lie in ("disk64", "shift64", "disks64"):
        yield f"zip64-locator-{lie}", "zip.zip64", archive(good, **{"zip64": 0, lie: 2})
    data = archive([good[0], Record(good[1].name, good[1].content, before=b"x"), *good[2:]])
    yield "gap", "zip.gap", data
    yield "overlap", "zip.gap", with_record(2, central={"offset": 0})
    yield "offset-far", "zip.gap", with_record(2, central={"offset": 0xFFFFFF00})
    yield "duplicate", "zip.duplicate", archive([*good, good[1]])
    yield "duplicate-case", "zip.duplicate", archive([*good, Record("archive/DATA.PKL", b"x")])
    yield "crc", "zip.crc", with_record(2, crc=1)
    yield "crc-local", "zip.header", with_record(2, local={"crc": 1})
    yield "size-local", "zip.header", with_record(2, local={"size": 1})
    yield "stored-local", "zip.header", with_record(2, local={"stored": 1})
    yield "flags-local", "zip.header", with_record(2, local={"flags": 0x0800})
    yield "method-local", "zip.header", with_record(2, local={"method": 8})
    yield "time-local", "zip.header", with_record(2, local={"time": 1})
    yield "needed-local", "zip.header", with_record(2, local={"needed": 20})
    data = archive(good).replace(b"archive/data/1FB", b"archive/data/7FB", 1)
    yield "name-local", "zip.header", data
    yield "size-bomb", "zip.size", with_record(2, size=0x7FFFFFFF)
    yield "size-plus", "zip.crc", with_record(2, size=len(good[2].content) + 1)
    yield "stored-central", "zip.method", with_record(2, central={"stored": 1})
    yield "deflate", "zip.method", with_record(2, method=8)
    yield "encrypted", "zip.flags", with_record(2, flags=1)
    yield "strong-encryption", "zip.flags", with_record(2, flags=0x40)
    yield "patched", "zip.flags", with_record(2, flags=0x20)
    yield "masked", "zip.flags", with_record(2, flags=0x2000)
    yield "symlink", "zip.attributes", with_record(2, central={"external": 0o120777 << 16})
    yield "executable", "zip.attributes", with_record(2, central={"external": 0o100755 << 16})
    yield "internal", "zip.attributes", with_record(2, central={"internal": 1})
    yield "entry-disk", "zip.disk", with_record(2, central={"disk": 1})
    yield "entry-extra", "zip.field", with_record(2, central={"extra": b"UT\1\0x"})
    yield "entry-comment", "zip.field", with_record(2, central={"comment": b"hi"})
    yield "entry-time", "zip.field", with_record(2, central={"time": 1}, local={"time": 1})
    yield "entry-needed", "zip.field", with_record(2, central={"needed": 45})
    yield "entry-made-by", "zip.field", with_record(2, central={"made_by": 63})
    yield "extra-other", "zip.padding", with_record(2, extra=b"UP\1\0x")
    yield "extra-hidden", "zip.padding", with_record(2, extra=b"FB\4\0evil")
    data = with_record(2, extra=b"FB" + struct.pack("<H", 400) + b"Z" * 400)
    yield "extra-long", "zip.padding", data
    yield "extra-length", "zip.padding", with_record(2, extra=b"FB\5\0ZZZZ")
    yield "descriptor-crc", "zip.descriptor", _streamed(streamed, 1)
    yield "descriptor-size", "zip.descriptor", _streamed(streamed, 2)
    yield "descriptor-magic", "zip.descriptor", _streamed(streamed, 0)
    filled = {"crc": zlib.crc32(good[2].content), "stored": 0, "size": 0}
    data = archive([*streamed[:2], Record(*_two(good[2]), flags=8, local=filled)])
    yield "streamed-local", "zip.header", data


def _two(record: Record) -> tuple[str | bytes, bytes]:
    return record.name, record.content


def _streamed(records: Sequence[Record], wrong: int) -> bytes:
    fields: list[Any] = [
        b"PK\7\x08",
        zlib.crc32(records[2].content),
        *[len(records[2].content)] * 2,
    ]
    fields[wrong] = b"PK\7\7" if wrong == 0 else fields[wrong] ^ 1
    changed = Record(
        records[2].name, records[2].content, flags=0x0808, descriptor=struct.pack("<4s3I", *fields)
    )
    return archive([*records[:2], changed, *records[3:]])


def _names() -> Iterator[Case]:
    good = good_records()
    for label, name in {
        "code": "archive/code/__torch__.py",
        "constants": "archive/constants.pkl",
        "nested": "archive/data/0/0",
        "leading-zero": "archive/data/00",
        "data-text": "archive/data/x",
        "traversal": "archive/../evil",
        "other-root": "other/data/9",
        "no-root": "data.pkl",
        "absolute": "/archive/data/9",
        "newline": "archive/data/9\n",
        "unicode": "archive/dätä/9",
        "empty": "",
        "folder": "archive/",
    }.items():
        yield f"name-{label}", "zip.name", archive([*good, Record(name, b"x")])
    yield "name-nul", "zip.name", archive([*good, Record(b"archive/data/9\0", b"x")])
    for root in ("..", ".", "a\\b", ""):
        moved = [Record(str(r.name).replace("archive", root, 1), r.content) for r in good]
        yield f"root-{root}", "zip.name", archive(moved)
    yield "no-pickle", "zip.missing", archive(good[1:])
    yield "no-version", "zip.missing", archive([r for r in good if r.name != "archive/version"])
    yield "version-2", "zip.marker", with_content("version", b"2\n")
    yield "version-bare", "zip.marker", with_content("version", b"3")
    yield "version-crlf", "zip.marker", with_content("version", b"3\n\n")
    yield "big-endian", "zip.marker", with_content("byteorder", b"big")
    yield "id-short", "zip.marker", with_content(".data/serialization_id", b"123")
    yield "id-letters", "zip.marker", with_content(".data/serialization_id", b"x" * 40)
    yield "id-long", "zip.marker", with_content(".data/serialization_id", b"1" * 4000)
    yield "format-2", "zip.marker", archive([*good, Record("archive/.format_version", b"2")])
    yield "alignment-1", "zip.marker", archive([*good, Record("archive/.storage_alignment", b"1")])
    yield "orphan", "tensor.orphan", archive([*good, Record("archive/data/4", b"\0" * 32)])
