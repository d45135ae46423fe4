"""The INT2 cache for `model.generate` of transformers; see docs/transformers.md."""

from oscar_zoo.engines.transformers.cache import OscarCache

__all__ = ["OscarCache"]
