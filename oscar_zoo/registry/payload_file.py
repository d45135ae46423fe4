"""One payload file as indexes and lists of digests name it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from oscar_zoo.artifact.manifest import FILE_NAME, MAX_PARTS
from oscar_zoo.artifact.names import check_part
from oscar_zoo.artifact.specs import Hex64, Spec, Text


class PayloadFile(Spec):
    """One payload file of an artifact: POSIX path in its folder, sha256, size in bytes."""

    path: Text
    sha256: Hex64
    size: Annotated[int, Field(ge=1, lt=1 << 40)]

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if self.path.count("/") >= MAX_PARTS or self.path.casefold() == FILE_NAME:
            raise ValueError(f"{self.path!r} is no path of a payload file")
        for part in self.path.split("/"):
            check_part(part, "file name")  # raises a ValueError, as validators do
        return self
