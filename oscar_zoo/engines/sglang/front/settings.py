"""The settings of a front: what the starter of a server decided, in a private file.

Keys are in the file and never in an argument list or a variable, which others can read or children
inherit.
"""

from __future__ import annotations

import json
import secrets as random
from dataclasses import asdict, dataclass, field
from pathlib import Path

OFF, ON = "off", "on"
"""Values of `--oscar-front` besides the path of a file."""


@dataclass(frozen=True)
class FrontSettings:
    """Who may ask.

    Attributes:
        host: the address that the server listens on.
        origins: origins of pages that may ask and read.
        key: what clients must know, or `None` where everybody may ask.
        engine_key: what SGLang wants in place of `key`, so that it never learns that one.
        administration_key: what tools of this user know; it opens `routes.ADMINISTRATION`.
        engine_api: leave out the lists of `fields`, and open `routes.ENGINE_API`.
        id: a word by which the starter of a server sees that these settings are in force.
    """

    host: str
    origins: tuple[str, ...] = ()
    key: str | None = field(default=None, repr=False)
    engine_key: str | None = field(default=None, repr=False)
    administration_key: str | None = field(default=None, repr=False)
    engine_api: bool = False
    id: str = ""

    @classmethod
    def make(
        cls, host: str, origins: tuple[str, ...], key: str | None, *, engine_api: bool = False
    ) -> FrontSettings:
        """Settings with new keys for SGLang and for administration.

        SGLang makes arguments of them, and would take one that begins with a hyphen for a flag.

        Args:
            origins: origins of pages that may ask and read.
            key: what clients must know, or `None`.
        """
        return cls(
            host=host,
            origins=origins,
            key=key,
            engine_key=None if key is None else random.token_hex(32),
            administration_key=random.token_hex(32),
            engine_api=engine_api,
            id=random.token_hex(16),
        )

    @property
    def secrets(self) -> tuple[str, ...]:
        """Everything that nobody may read."""
        found = (self.key, self.engine_key, self.administration_key)
        return tuple({one for one in found if one})

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, path: Path) -> FrontSettings:
        """Read the file `path`; raises `OSError`, or `ValueError` when it holds something else."""
        value = json.loads(path.read_bytes())
        return cls(**(value | {"origins": tuple(value["origins"])}))
