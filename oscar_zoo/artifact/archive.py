"""The ZIP archive that `torch.save` writes: a strict reader and a canonical emitter of its records.

Every byte of the file is accounted for: records lie without gaps in the order of the central
directory, each is stored (never compressed), its local header, data descriptor and directory entry
agree, and its CRC-32 is right. The only padding is the `FB` extra field that aligns data to 64
bytes. So two programs can never read different content from one accepted file. Names come from an
allow-list under one root and are never used as paths.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import NoReturn

from oscar_zoo.errors import MalformedFile

MAX_RECORDS = 8192
ALIGNMENT = 64
PICKLE = "data.pkl"
DATA = "data/"

MARKERS: Mapping[str, re.Pattern[bytes]] = {
    "version": re.compile(rb"3\n"),
    "byteorder": re.compile(rb"little"),
    ".format_version": re.compile(rb"1"),
    ".storage_alignment": re.compile(rb"64"),
    ".data/serialization_id": re.compile(rb"[0-9]{40}"),
}
"""Small records that say how the archive was written, and the only content each may have."""

_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")

_UTF8, _STREAMED = 0x0800, 0x0008
_FLAGS = (0, _UTF8, _STREAMED, _UTF8 | _STREAMED)
_NAME = re.compile(rb"[\x20-\x7e]{1,512}")
_DATA_NAME = re.compile(r"data/(0|[1-9][0-9]{0,6})")

_Entry = tuple[bytes, int, int, int, int]
"""Name, flags, CRC, size and offset of one row of the central directory."""


def read_archive(data: bytes, *, what: str) -> dict[str, memoryview]:
    """The records of a whole untrusted archive by name, without the root folder. They are views
    into `data`; nothing is copied."""
    return _Archive(data, what).records()


def write_archive(root: str, records: Iterable[tuple[str, bytes]]) -> bytes:
    """The only archive of `records` in this order under `root`: stored, aligned, without time
    stamps. `torch.load` and `read_archive` both read it; the same records give the same bytes
    everywhere."""
    body, directory, count = bytearray(), bytearray(), 0
    for name, content in records:
        path = f"{root}/{name}".encode("ascii")
        fields = (zlib.crc32(content), len(content), len(content), len(path))
        unpadded = len(body) + _LOCAL.size + len(path) + 4
        padding = -unpadded % ALIGNMENT
        directory += _ENTRY.pack(b"PK\1\2", *(0,) * 6, *fields, *(0,) * 5, len(body))
        directory += path
        body += _LOCAL.pack(b"PK\3\4", *(0,) * 5, *fields, padding + 4)
        body += path + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        body += content
        count += 1
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), len(body), 0)
    return bytes(body + directory + end)


class _Archive:
    """An archive that is read; `end` is where its central directory starts."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data, self.what, self.end = data, what, 0

    def bad(self, reason: str, message: str) -> NoReturn:
        raise MalformedFile(f"zip.{reason}", f"{self.what}{message}.")

    def records(self) -> dict[str, memoryview]:
        view = memoryview(self.data)
        records: dict[bytes, memoryview] = {}
        folded: set[bytes] = set()
        position = 0
        for entry in self.directory():
            name, flags, crc, size, offset = entry
            if name.lower() in folded:
                self.bad("duplicate", f": the record {_show(name)} exists twice")
            folded.add(name.lower())
            if offset != position:
                self.bad("gap", f": {_show(name)} starts at byte {offset}, expected {position}")
            start = self.local_header(entry)
            records[name] = view[start : start + size]
            if zlib.crc32(records[name]) != crc:
                self.bad("crc", f": the record {_show(name)} is damaged (CRC-32 differs)")
            position = start + size
            if flags & _STREAMED:
                position = self.descriptor(entry, position)
        if position != self.end:
            left = f"{self.end - position} bytes before the central directory"
            self.bad("gap", f": {left} belong to no record")
        return self.named(records)

    def directory(self) -> list[_Entry]:
        data, last = self.data, len(self.data) - _END.size
        if not data.startswith(b"PK\3\4"):
            self.bad("prefix", " does not start with an archive record")
        if last < 0 or data[last : last + 4] != b"PK\5\6":
            if 0 <= data.rfind(b"PK\5\6", max(0, last - 65535)) < last:
                self.bad("suffix", " has bytes after the end of its archive")
            message = f"{self.what} is cut off: no archive end in {len(data)} bytes."
            raise MalformedFile("file.truncated", message, hint="fetch it again")
        _, disk, start_disk, here, count, size, offset, comment = _END.unpack_from(data, last)
        if comment:
            self.bad("comment", " has an archive comment")
        if disk or start_disk or here != count:
            self.bad("disk", " is an archive of several parts")
        if not 1 <= count <= MAX_RECORDS:
            self.bad("records", f" has {count} records, 1 to {MAX_RECORDS} are read")
        end = self.end64(last, (count, size, offset))
        if offset + size != end:
            self.bad("end", f": the central directory ends at {offset + size}, expected {end}")
        self.end = offset
        return self.entries(offset, end, count)

    def end64(self, last: int, classic: tuple[int, int, int]) -> int:
        """Offset of the first byte after the central directory. The zip64 records, if there are
        any, must repeat the classic ones."""
        locator = last - _LOCATOR.size
        if locator < 0 or self.data[locator : locator + 4] != b"PK\6\7":
            return last
        record = locator - _END64.size
        wanted = (b"PK\6\6", _END64.size - 12, 0x031E, 45, 0, 0, classic[0], *classic)
        located = _LOCATOR.unpack_from(self.data, locator) == (b"PK\6\7", 0, record, 1)
        if record < 0 or not located or _END64.unpack_from(self.data, record) != wanted:
            self.bad("zip64", ": the zip64 end record does not agree with the classic one")
        return record

    def entries(self, position: int, end: int, count: int) -> list[_Entry]:
        data, entries = self.data, list[_Entry]()
        while position < end:
            cut = position + _ENTRY.size > end or data[position : position + 4] != b"PK\1\2"
            if cut or len(entries) == count:
                self.bad("directory", f": the central directory is broken at byte {position}")
            fields = _ENTRY.unpack_from(data, position)
            name_size, offset = fields[10], fields[16]
            name = data[position + _ENTRY.size : position + _ENTRY.size + name_size]
            self.check_entry(fields, name)
            entries.append((name, fields[3], fields[7], fields[8], offset))
            position += _ENTRY.size + name_size
        if position != end or len(entries) != count:
            found = f"lists {len(entries)} records and promises {count}"
            self.bad("directory", f": the central directory {found}")
        return entries

    def check_entry(self, fields: tuple[int, ...], name: bytes) -> None:
        _, made_by, needed, flags, method, time, date, _, stored, size, *rest = fields
        _, extra, comment, disk, internal, external, _ = rest
        if _NAME.fullmatch(name) is None:
            self.bad("name", ": a record name is empty, too long or not printable ASCII")
        shown = _show(name)
        if flags not in _FLAGS:
            why = "(encrypted, patched or unknown)"
            self.bad("flags", f": {shown} has the flags 0x{flags:04x} {why}")
        if method or stored != size:
            how = f"compressed (method {method}); only stored records are read"
            self.bad("method", f": {shown} is {how}")
        if internal or external:
            self.bad("attributes", f": {shown} has file attributes")
        if disk:
            self.bad("disk", " is an archive of several parts")
        if extra or comment or time or date or needed or made_by not in (0, 0x031E):
            what = "a time, comment, version or extra field that no writer sets"
            self.bad("field", f": {shown} has {what}")

    def local_header(self, entry: _Entry) -> int:
        """Check one local header against its entry; offset of the first byte of data."""
        name, flags, crc, size, head = entry
        if head + _LOCAL.size > self.end:
            self.bad("header", f": {_show(name)} has no local header")
        magic, *fields, name_size, extra_size = _LOCAL.unpack_from(self.data, head)
        sizes = [0, 0, 0] if flags & _STREAMED else [crc, size, size]
        start: int = head + _LOCAL.size + name_size
        same = (
            fields == [0, flags, 0, 0, 0, *sizes] and self.data[start - name_size : start] == name
        )
        if magic != b"PK\3\4" or not same:
            other = "does not agree with the central directory"
            self.bad("header", f": the local header of {_show(name)} {other}")
        if start + extra_size + size > self.end:
            self.bad("size", f": {_show(name)} is larger than the file")
        extra = self.data[start : start + extra_size]
        pad = extra_size - 4
        fitting = 0 <= pad < 2 * ALIGNMENT and extra == b"FB" + struct.pack("<H", pad) + b"Z" * pad
        if extra and not fitting:
            self.bad("padding", f": {_show(name)} has an extra field that is no alignment padding")
        return start + int(extra_size)

    def descriptor(self, entry: _Entry, position: int) -> int:
        name, _, crc, size, _ = entry
        after = position + _DESCRIPTOR.size
        wanted = (b"PK\7\x08", crc, size, size)
        if after > self.end or _DESCRIPTOR.unpack_from(self.data, position) != wanted:
            other = "does not agree with the directory"
            self.bad("descriptor", f": the data descriptor of {_show(name)} {other}")
        return after

    def named(self, records: Mapping[bytes, memoryview]) -> dict[str, memoryview]:
        """Drop the one root folder from the names, which must be in the allow-list."""
        result: dict[str, memoryview] = {}
        root = next(iter(records)).split(b"/", 1)[0]
        if root in (b"", b".", b"..") or b"\\" in root:
            self.bad("name", f": the root folder {_show(root)} is not a name")
        for full, content in records.items():
            head, slash, tail = full.partition(b"/")
            name = tail.decode("ascii")
            if head != root or not slash:
                self.bad("name", f": {_show(full)} is not inside the one root folder {_show(root)}")
            if name != PICKLE and name not in MARKERS and _DATA_NAME.fullmatch(name) is None:
                where = "does not belong into a rotation file"
                self.bad("name", f": a record named {_show(full)} {where}")
            if name in MARKERS and MARKERS[name].fullmatch(content[:64]) is None:
                self.bad("marker", f": the record {name} has unknown content")
            result[name] = content
        for name in (PICKLE, "version"):
            if name not in result:
                self.bad("missing", f": the record {name} is missing")
        return result


def _show(name: bytes) -> str:
    return repr(name[:80].decode("ascii", "replace"))
