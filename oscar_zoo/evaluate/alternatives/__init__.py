"""Caches of other methods, simulated like ours, to compare with."""
