"""The write kernel in CUDA C++, compiled at first use by NVRTC: for compute capability 9.0."""
