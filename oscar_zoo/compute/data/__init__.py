"""Calibration data: any text becomes token sequences in one order, with one hash.

`sources` finds documents (files, folders, Hugging Face datasets, known names), `encoding` turns
each into tokens, `packing` cuts the stream into sequences and holds some out, and `overlap`
compares the text with evaluation sets. The same source, tokenizer and options always give the same
tokens. The tokens themselves are never published.
"""

from oscar_zoo.compute.data.calibration import (
    CalibrationData,
    HeldOut,
    check_budget,
    load_calibration,
)
from oscar_zoo.compute.data.encoding import Tokenizer
from oscar_zoo.compute.data.evaluation_sets import (
    EvaluationSet,
    evaluation_set,
    sets_on_this_machine,
)
from oscar_zoo.compute.data.overlap import Overlap, check_overlap, measure_overlap
from oscar_zoo.compute.data.sources import check_exists, check_source

__all__ = [
    "CalibrationData",
    "EvaluationSet",
    "HeldOut",
    "Overlap",
    "Tokenizer",
    "check_budget",
    "check_exists",
    "check_overlap",
    "check_source",
    "evaluation_set",
    "load_calibration",
    "measure_overlap",
    "sets_on_this_machine",
]
