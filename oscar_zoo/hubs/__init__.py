"""Places artifacts are kept, behind one protocol."""
