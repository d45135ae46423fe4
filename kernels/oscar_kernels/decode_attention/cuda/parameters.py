"""The parameters of `decode.cu`, as its C++ declares them."""

from __future__ import annotations

import ctypes


class Params(ctypes.Structure):
    """`Params` of decode.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "query",
                "codes",
                "affine",
                "ring_k",
                "ring_v",
                "sink_k",
                "sink_v",
                "indptr",
                "slots",
                "rows",
                "sink_block",
                "sink_from",
                "ring_start",
                "partial",
                "stats",
                "prefix",
                "out",
                "partner",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        *(
            (name, ctypes.c_int)
            for name in (
                "batch",
                "heads",
                "recent",
                "sink",
                "partner_heads",
                "blocks",
                "code_stride",
                "affine_stride",
                "prefix_stable",
                "ring_rows",
            )
        ),
        ("mask", ctypes.c_void_p),
    )
