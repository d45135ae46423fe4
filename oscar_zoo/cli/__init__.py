"""The `oscar-zoo` command."""
