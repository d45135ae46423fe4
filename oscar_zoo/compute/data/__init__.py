"""Calibration data: any text becomes token sequences in one order, with one hash.

The same source, tokenizer and options always give the same tokens, which are never published.
"""
