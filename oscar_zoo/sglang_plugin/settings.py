"""Plugin settings. Torch-free."""
