"""The INT2 cache in plain transformers, without a server; see docs/transformers.md."""
