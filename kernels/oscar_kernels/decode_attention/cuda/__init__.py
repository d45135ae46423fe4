"""Decode attention in CUDA C++, compiled at first use by NVRTC: the fast path of sm_80 and
later."""
