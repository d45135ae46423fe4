"""Places where artifacts are kept, behind one protocol."""
