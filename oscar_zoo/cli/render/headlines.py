"""The codes of rejected artifacts in words: what is wrong, before the check below tells where."""

from __future__ import annotations

from oscar_zoo.artifact.outcome import Rejected

_CODES = {
    "ambiguous_pair": "more than one file could be the same side of the pair",
    "content.equal_layers": "its layers are copies of each other",
    "content.identity": "it rotates nothing",
    "file.empty": "a file is empty",
    "file.html": "a file is a web page",
    "file.kind": "something is no regular file",
    "file.lfs": "a file is a Git LFS pointer",
    "file.size": "a file is too large",
    "file.unknown": "a file is no rotation",
    "incomplete_pair": "a side of the pair is missing",
    "k-is-v": "the file for keys is one for values",
    "missing_file": "a file is missing",
    "not_finite": "it holds numbers that are not finite",
    "not_inverse": "a transform and its inverse do not go together",
    "not_orthogonal": "a matrix is no rotation",
    "same_role": "both files are for the same side",
    "schema.foreign": "a file is no rotation",
    "unlisted_file": "a file does not belong to it",
    "v-is-k": "the file for values is one for keys",
    "zip.crc": "a file is damaged",
}
_KINDS = {
    "content": "its matrices are not those of the method that it names",
    "eigenvalues": "its eigenvalues are wrong",
    "feedback": "the feedback of its rounding is wrong",
    "file": "a file cannot be used",
    "json": "a file is not valid JSON",
    "layers": "it has other layers than the model",
    "manifest": "its oscar.json is not valid",
    "model": "it is for another model",
    "pair": "the two files are no pair",
    "pickle": "a file holds more than arrays",
    "role": "a file's name and its content disagree",
    "safetensors": "a file is damaged, or of another kind",
    "schema": "a file does not have the fields of a rotation",
    "signature": "its signature does not hold",
    "statistics": "its statistics are wrong",
    "stats": "its statistics are wrong",
    "tensor": "a file is damaged, or of another kind",
    "widths": "the bits of its layers are wrong",
    "zip": "a file is damaged, or of another kind",
}
"""What is wrong, by the part of a code before its point."""
_OTHERWISE = "it failed a check"


def rejection(outcome: Rejected) -> str:
    """Why an artifact was rejected, in a clause for people, and the code behind it."""
    kind = _KINDS.get(outcome.code.partition(".")[0], _OTHERWISE)
    return f"{_CODES.get(outcome.code) or kind} ({outcome.code})"
