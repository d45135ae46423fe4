"""Runs at the start of the server and of each of its children on a machine without a GPU, found through PYTHONPATH."""

import oscar_zoo.evaluate.torchvision_ops  # noqa: F401
