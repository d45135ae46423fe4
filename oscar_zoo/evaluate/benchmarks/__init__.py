"""Benchmarks: public question sets, asked of a server through lm-evaluation-harness."""
