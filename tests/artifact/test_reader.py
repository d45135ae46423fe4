"""The door: which files are opened, and which spellings of a good archive and pickle are
accepted."""

import os
import struct
from pathlib import Path

import pytest
import tiny_artifacts as tiny
from hostile_archives import Record, archive, good_file, good_records
from hostile_pickles import Raw, Tensor, layer, of, op, top

from oscar_zoo.artifact import pickle_reader, reader
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.errors import MalformedFile, PathNotFound

GOOD = tiny.rotation_set()


def assert_reads(data: bytes) -> None:
    tiny.assert_same(read_rotation(data, what="variant"), GOOD)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "link", tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(MalformedFile) as caught:
            read_file(path)
        assert caught.value.reason == "file.kind"


def test_size_and_absence_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    assert read_file(tmp_path / "file") == read_file(tmp_path / "file", max_bytes=100) == bytes(100)
    with pytest.raises(MalformedFile) as caught:
        read_file(tmp_path / "file", max_bytes=99)
    assert caught.value.reason == "file.size"
    for path in (tmp_path / "absent", tmp_path / "file" / "below"):
        with pytest.raises(PathNotFound):
            read_file(path)


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="no file here that is longer than it says"
)
def test_a_file_that_is_longer_than_it_says_is_refused() -> None:
    with pytest.raises(MalformedFile) as caught:
        read_file(Path("/proc/self/status"))  # a regular file of size 0 with content
    assert caught.value.reason == "file.changed"


@pytest.mark.parametrize("flags", [0, 0x8, 0x800, 0x808])
@pytest.mark.parametrize("zip64", [False, True])
def test_archive_spellings(flags: int, zip64: bool) -> None:
    records = [Record(r.name, r.content, flags=flags) for r in good_records()]
    assert_reads(archive(records, **({"zip64": 0} if zip64 else {})))


def test_other_writers_of_torch_archives() -> None:
    records = good_records()
    extra = [Record("archive/.format_version", b"1"), Record("archive/.storage_alignment", b"64")]
    assert_reads(archive([*records, *extra]))
    optional = ("archive/byteorder", "archive/.data/serialization_id")
    assert_reads(archive([r for r in records if r.name not in optional]))
    assert_reads(archive([records[0], *records[:0:-1]]))
    assert_reads(of(top(layers={1: layer(1), 0: layer(0)})))
    names = [str(r.name).replace("archive", "My model (1)", 1) for r in records]
    assert_reads(archive([Record(n, r.content) for n, r in zip(names, records, strict=True)]))
    assert_reads(archive([Record(r.name, r.content, extra=b"") for r in records]))
    assert_reads(archive([Record(r.name, r.content, central={"made_by": 0x031E}) for r in records]))


def test_arrays_are_aligned_read_only_float32() -> None:
    for data in (
        good_file(),
        archive([Record(r.name, r.content, extra=b"") for r in good_records()]),
    ):
        for found in read_rotation(data, what="a").layers:
            assert found.forward.dtype == "float32"
            assert found.forward.flags.aligned
            assert found.forward.flags.c_contiguous
            assert not found.forward.flags.writeable
            assert found.partner is found.forward


def test_a_shared_record_is_held_once_even_where_it_must_be_copied() -> None:
    shared = tiny.hadamard_set(layers=range(50))
    records = [Record(r.name, r.content, extra=b"") for r in good_records(rotation_bytes(shared))]
    layers = read_rotation(archive(records), what="a").layers
    assert len({id(layer.forward) for layer in layers}) == 1
    assert len({id(layer.eigenvalues) for layer in layers}) == 1


@pytest.mark.parametrize("location", ["cpu", "cuda", "cuda:0", "cuda:15"])
def test_the_device_of_the_writer_is_ignored(location: str) -> None:
    layers = {
        i: layer(i, rotation=Tensor(str(2 * i), (8, 8), location=location)) for i in tiny.LAYERS
    }
    assert_reads(of(top(layers=layers)))


def test_memo_marks_and_wide_numbers() -> None:
    first = Raw(
        b"}("
        + (op("layer_id") + b"q\0" + b"K\0")
        + (op("rotation") + b"r\1\0\0\0" + op(Tensor("0", (8, 8))) + b"q\2")
        + (op("eigenvalues") + op(Tensor("1", (8,))) + b"u")
    )
    second = Raw(
        b"}("
        + (b"j\0\0\0\0" + b"J\1\0\0\0")
        + (b"h\1" + op(Tensor("2", (8, 8))))
        + (op("eigenvalues") + op(Tensor("3", (8,))) + b"u")
    )
    assert_reads(of(top(layers={0: first, 1: second})))
    assert_reads(of(top(layers=Raw(b"}(" + op(0) + op(layer(0)) + b"M\1\0" + op(layer(1)) + b"u"))))
    assert_reads(of(top(format_version=Raw(b"\x8a\1\1"))))


@pytest.mark.parametrize("pair", [b"(K\x08K\x08t", b"K\x08K\x08\x86"])
def test_tuples_by_mark_and_by_count(pair: bytes) -> None:
    tensor = Raw(op(Tensor("0", (8, 8))).replace(op((8, 8)), pair, 1))
    assert_reads(of(top(layers={0: layer(0, rotation=tensor), 1: layer(1)})))


@pytest.mark.parametrize("recalled", [True, False])
def test_hadamard_files_share_records_between_layers(recalled: bool) -> None:
    records = good_records(rotation_bytes(tiny.hadamard_set()))
    matrix, ones = Tensor("0", (8, 8)), Tensor("1", (8,))
    again: tuple[object, object] = (Raw(b"h\0"), Raw(b"h\1")) if recalled else (matrix, ones)
    memo = (Raw(op(matrix) + b"q\0"), Raw(op(ones) + b"q\1")) if recalled else (matrix, ones)
    layers = {
        0: layer(0, rotation=memo[0], eigenvalues=memo[1]),
        1: layer(1, rotation=again[0], eigenvalues=again[1]),
    }
    code = b"\x80\x02" + op(top(objective="hadamard", layers=layers)) + b"."
    records[0].content = code
    tiny.assert_same(read_rotation(archive(records), what="h"), tiny.hadamard_set())
    records[0].content = code.replace(op("hadamard"), op("qqt_r_h_pbr"))
    with pytest.raises(MalformedFile) as caught:
        read_rotation(archive(records), what="h")
    assert caught.value.reason == "tensor.shared"


def test_messages_name_the_file_and_the_value_and_stay_on_one_line() -> None:
    with pytest.raises(MalformedFile) as caught:
        read_rotation(of(top(objective="bad\x1b[31m\nname")), what="my.pt")
    assert "my.pt" in caught.value.message
    assert "\x1b" not in caught.value.message
    assert "\n" not in caught.value.message


def test_upstream_variants_of_format_3() -> None:
    transform = {"key": "center", "centered": True, "orthogonal": True}
    records = [*good_records(), Record("archive/data/4", struct.pack("<8f", *range(8)))]
    layers = {0: layer(0, k_mean=Tensor("4", (8,)), eigenvalues=None)}
    value = top(format_version=3, objective="oscar2_center", transform=transform, layers=layers)
    records[0].content = b"\x80\x02" + op(value) + b"."
    found = read_rotation(
        archive([r for r in records if not str(r.name).endswith(("data/1", "data/2", "data/3"))]),
        what="3",
    )
    got = (found.role, found.transform, found.centered, found.orthogonal)
    assert got == ("k", "center", True, True)
    assert found.requires == ("k_mean",)
    assert found.layers[0].mean is not None
    assert found.layers[0].eigenvalues is None


def test_opcodes_are_counted() -> None:
    """The bound on work and on objects: so many opcodes are followed, and not one more."""
    spare = pickle_reader.MAX_OPCODES - 1
    filled = b"\x80\x02}q\0" + b"(u" * ((spare - 1) // 2)
    assert pickle_reader.load(filled + b".", what="a") == {}
    with pytest.raises(MalformedFile) as caught:
        pickle_reader.load(filled + b"(u.", what="a")
    assert caught.value.reason == "pickle.limit"


def test_a_large_model_of_many_layers_is_far_from_the_limits() -> None:
    """400 layers with eigenvalues: a fourth of the opcodes that are followed."""
    many = tiny.rotation_set(layers=range(400))
    assert len(read_rotation(rotation_bytes(many), what="a").layers) == 400
    code = good_records(rotation_bytes(many))[0].content
    assert len(code) < pickle_reader.MAX_BYTES / 4


def test_matrices_that_take_long_to_multiply_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = rotation_bytes(tiny.rotation_set())
    two = len(tiny.LAYERS) * tiny.D**3
    monkeypatch.setattr(reader, "MAX_MULTIPLICATIONS", two)
    assert_reads(data)
    monkeypatch.setattr(reader, "MAX_MULTIPLICATIONS", two - 1)
    with pytest.raises(MalformedFile) as caught:
        read_rotation(data, what="a")
    assert caught.value.reason == "layers.work"
