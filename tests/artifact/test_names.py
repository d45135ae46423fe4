"""Names: what is one, that text round-trips, and what never becomes part of a path."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.artifact.names import (
    ArtifactId,
    CalibrationTag,
    Reference,
    cached_model,
    check_digest,
    check_part,
    safe_part,
)
from oscar_zoo.errors import InvalidName

BAD_PARTS = ". .. a..b .hidden -flag a. a/b a\\b ａ é con NUL.txt com1 Lpt9.pt a:b a@b ~ _a".split()
BAD_PARTS += ["", "a b", "a\n", "a\0", "\u212a", "a\u202eb", "x" * 101]


@pytest.mark.parametrize("text", BAD_PARTS)
def test_bad_parts(text: str) -> None:
    with pytest.raises(InvalidName):
        check_part(text)
    for name in (f"{text}/tag", f"Model/{text}"):
        with pytest.raises(InvalidName):
            ArtifactId.parse(name)


@pytest.mark.parametrize(
    "text", ["a", "Qwen3.5-4B", "seq1_prompt1_group1", "0", "x" * 100, "console", "k_rotation.pt"]
)
def test_good_parts(text: str) -> None:
    assert check_part(text) == text
    assert str(ArtifactId.parse(f"{text}/{text}")) == f"{text}/{text}"


def test_ids() -> None:
    found = ArtifactId.parse("Qwen3-8B/seq1_prompt2_group3")
    assert found.reference == "Qwen3-8B:seq1_prompt2_group3"
    assert found.key == ArtifactId.parse("qwen3-8b/SEQ1_prompt2_group3").key
    for text in ("Qwen3-8B", "a/b/c", "/a", "a/"):
        with pytest.raises(InvalidName):
            ArtifactId.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "Qwen3-8B",
        "Qwen/Qwen3-8B",
        "Qwen3-8B:tag",
        "a@sha256:" + "0" * 12,
        "a/b:t@sha256:" + "f" * 64,
    ],
)
def test_references_round_trip(text: str) -> None:
    assert str(Reference.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", *": a: a@ a@sha256: a@sha256:123 a/b/c a:b:c a@md5:00 a@sha256:FFFFFFFFFFFF".split()],
)
def test_bad_references(text: str) -> None:
    with pytest.raises(InvalidName):
        Reference.parse(text)


@given(
    st.integers(1, 10**9),
    st.integers(1, 10**6),
    st.integers(1, 1024),
    st.none() | st.from_regex(r"[a-z0-9]+(-[a-z0-9]+)?", fullmatch=True),
    st.none() | st.integers(1000, 99999).map(lambda thousandths: thousandths / 1000),
)
def test_tags_round_trip(
    tokens: int, prompts: int, group: int, variant: str | None, bits: float | None
) -> None:
    tag = CalibrationTag(tokens, prompts, group, variant, bits)
    assert CalibrationTag.parse(str(tag)) == tag


TAG = "seq1_prompt1_group1"


@pytest.mark.parametrize(
    "text",
    ["", "seq0_prompt1_group1", "seq01_prompt1_group1", "gpqa_group128"]
    + [TAG + more for more in ("\n", "-", "-A", "_bits", "_bits2.50", "_bits02", "-a_bits2.5")],
)
def test_other_tags_are_opaque(text: str) -> None:
    assert CalibrationTag.parse(text) is None


def test_a_tag_names_the_average_bits() -> None:
    """One raise of 72 sides is told from two, and a third of a bit is rounded."""
    tags = [str(CalibrationTag(9, 1, 128, "wush", 2.25 + raises / 36)) for raises in (1, 2, 12)]
    got = [tag.partition("group128")[2] for tag in tags]
    assert got == ["_bits2.278-wush", "_bits2.306-wush", "_bits2.583-wush"]


def test_digests() -> None:
    assert check_digest("sha256:" + "0" * 64)
    for text in ("0" * 64, "sha256:" + "0" * 63, "sha256:" + "A" * 64, "sha256:" + "0" * 64 + "\n"):
        with pytest.raises(InvalidName):
            check_digest(text)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        (f"models--Qwen--Qwen3-8B/snapshots/{COMMIT}", ("Qwen/Qwen3-8B", COMMIT)),
        (f"models--gpt2/snapshots/{COMMIT}", ("gpt2", COMMIT)),
        (f"models--org--a--b/snapshots/{COMMIT}", ("org/a--b", COMMIT)),
        ("models--Qwen--Qwen3-8B/snapshots/main", None),
        (f"models--Qwen--Qwen3-8B/blobs/{COMMIT}", None),
        (f"datasets--Qwen--Qwen3-8B/snapshots/{COMMIT}", None),
        ("Qwen3-8B", None),
    ],
)
def test_a_model_in_the_cache_of_a_hub_is_known(folder: str, found: tuple[str, str] | None) -> None:
    assert cached_model(Path("/cache", folder)) == found


@pytest.mark.parametrize(
    ("text", "safe"),
    [("Qwen3-8B", "Qwen3-8B"), ("my model", "my-model"), ("\u0410cme", "cme"), ("...", "model")],
)
def test_any_folder_s_name_becomes_a_name(text: str, safe: str) -> None:
    assert safe_part(text) == safe and check_part(safe_part("a" * 200 + "..b"))
