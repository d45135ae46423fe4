"""Texts that `compute` and `eval` know by name; importable as `oscar_zoo.texts`. See
examples/README.md."""
