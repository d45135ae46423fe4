"""Measuring engines with BF16, FP8 and INT2 caches, one after the other, on one machine."""
