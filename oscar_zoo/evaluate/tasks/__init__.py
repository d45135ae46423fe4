"""One task per file."""
