"""Models with images in SGLang: how one is served with text alone."""

from __future__ import annotations

from typing import Any

ABOUT_IMAGES = (
    "is_multimodal",
    "is_audio_model",
    "is_image_understandable_model",
    "is_audio_understandable_model",
    "is_multimodal_chunked_prefill_supported",
    "is_multimodal_piecewise_cuda_graph_supported",
    "is_multimodal_breakable_cuda_graph_supported",
)
"""What SGLang's configuration of a model says about images and sound."""


def leave_out_images(model_config: Any) -> None:
    """Say of a model that has images unless told otherwise what SGLang says of one without."""
    for name in ABOUT_IMAGES:
        if hasattr(model_config, name):
            setattr(model_config, name, False)
