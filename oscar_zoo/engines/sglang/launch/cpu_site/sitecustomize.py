"""Runs at the start of the server and of each of its children on a machine without a GPU, found
through PYTHONPATH."""

import gc

import oscar_zoo.models.torchvision_ops  # noqa: F401

gc.set_threshold(
    50_000
)  # what SGLang imports stays; to look for garbage among it took an eighth of each start
