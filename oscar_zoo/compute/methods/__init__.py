"""One fitting method per file."""
