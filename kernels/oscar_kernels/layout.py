"""Bytes of a row of codes. No torch.

Code order (the reference order), with `q = head_dim // 4`:

* 2 bits: byte `j` of a row holds the codes of channels `j, j + q, j + 2q, j + 3q` in bits 0-1, 2-3,
  4-5, 6-7.
* 4 bits: byte `j` holds channels `j, j + q` in bits 0-3 and 4-7, and byte `q + j` holds channels
  `j + 2q, j + 3q`.

So a kernel unpacks contiguous quarters of a row with shifts and no shuffle. Scale and offset of
each group follow in their own tensor, interleaved `[scale, offset]` per group.
"""

from __future__ import annotations

from oscar_kernels.spec import QuantSpec


def code_bytes(spec: QuantSpec) -> int:
    """Bytes of packed codes of one row."""
    return spec.head_dim * spec.bits // 8


def scale_bytes(spec: QuantSpec) -> int:
    """Bytes of scales and offsets of one row."""
    return spec.num_groups * 2 * (4 if spec.scale_dtype == "float32" else 2)


def row_bytes(spec: QuantSpec) -> int:
    """Bytes of one token of one KV head, of K or of V."""
    return code_bytes(spec) + scale_bytes(spec)


def bits_per_element(spec: QuantSpec) -> float:
    """Stored bits per channel, scales and offsets included: 2.25 at group 128 with 16-bit
    scales."""
    return 8 * row_bytes(spec) / spec.head_dim
