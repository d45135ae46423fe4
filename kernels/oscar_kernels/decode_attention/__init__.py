"""See kernels/README.md."""
