"""CUDA C++ of this package: compiled at first use by NVRTC, kept, loaded and launched through the
driver."""
