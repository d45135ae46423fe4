"""Public keys that are shipped with the package: signatures of their owners are known everywhere.

The table is empty until an owner of a zoo asks for a row. A row may say until when its key is
trusted; signatures carry no time that could be believed, so all of them end with the key.
"""

from __future__ import annotations

import base64
import binascii
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.specs import Spec, Text, validated
from oscar_zoo.errors import malformed_hint

FILE_NAME: Final = "trusted_keys.json"
"""Name of the file in the package `oscar_zoo.manifests`."""
_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_Time = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]


class TrustedKey(Spec):
    """One key.

    Attributes:
        owner: who has the private key.
        key: the public key, DER in base64.
        expires: when it is no longer trusted, RFC 3339 UTC, or null.
    """

    owner: Text
    key: Text
    expires: _Time | None = None

    @model_validator(mode="after")
    def _readable(self) -> Self:
        try:
            self.public, self.until  # noqa: B018  (they must be readable)
        except binascii.Error as error:
            raise ValueError(f"the key is no base64: {error}") from None
        return self

    @property
    def public(self) -> bytes:
        """`key` as bytes."""
        return base64.b64decode(self.key, validate=True)

    @property
    def until(self) -> datetime | None:
        """`expires` as a time, or `None`."""
        if self.expires is None:
            return None
        return datetime.strptime(self.expires, _FORMAT).replace(tzinfo=UTC)


class TrustedKeys(Spec):
    """All of them."""

    schema_: Literal["oscar-zoo.trusted-keys/1"] = Field(alias="schema")
    keys: tuple[TrustedKey, ...]

    @classmethod
    @malformed_hint("install oscar-zoo again")
    def from_bytes(cls, data: bytes, *, what: str = FILE_NAME) -> Self:
        """Parse the file; raises `MalformedFile`."""
        value = strict_json.loads(data, what=what)
        return validated(cls, value, code="trusted_keys.schema", what=what)


@cache
def packaged_keys() -> TrustedKeys:
    """Those of the installed package, read once per process."""
    data = (resources.files("oscar_zoo.manifests") / FILE_NAME).read_bytes()
    return TrustedKeys.from_bytes(data)
