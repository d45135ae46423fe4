"""The digest of an artifact: its published vector, and what it depends on."""

from __future__ import annotations

import itertools

from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest

FILES = [
    FileDigest("k_rotation_qqt_r_h_pbr.pt", "a" * 64, 2399261),
    FileDigest("v_rotation_sst_r_h_pbr.pt", "b" * 64, 2399261),
]


def test_the_published_vector() -> None:
    assert (
        artifact_digest(FILES)
        == "sha256:ed1ca2c0eea4e915afd0c79d01e20584373fa46ddd5acf4eb8b5204958e72bd3"
    )


def test_order_does_not_matter_and_everything_else_does() -> None:
    digests = {artifact_digest(order) for order in itertools.permutations(FILES)}
    k, v = FILES
    for other in (
        FileDigest("x.pt", v.sha256, v.size),
        FileDigest(v.path, k.sha256, v.size),
        FileDigest(v.path, v.sha256, 1),
    ):
        digests.add(artifact_digest([k, other]))
    digests.add(artifact_digest([k]))
    assert len(digests) == 5


def test_a_file() -> None:
    assert file_digest("a", b"") == FileDigest(
        "a", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 0
    )
