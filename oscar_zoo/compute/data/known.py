"""Calibration sources known by name, pinned to the commit."""

from __future__ import annotations

from collections.abc import Mapping

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.compute.data.dataset_names import DatasetName

DEFAULT = "default"
"""Web text, mathematics, code, two more languages, chat and reasoning in chat form: what a server
reads."""

DEFAULT_PARTS = tuple(
    DatasetName.parse(part)
    for part in (
        "HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9:sample-10BT:train#text",
        "open-r1/OpenR1-Math-220k@e4e141ec9dea9f8326f4d347be56105859b2bd68:default:train#messages",
        "open-web-math/open-web-math@fde8ef8de2300f5e778f56261843dab89f230815:default:train#text",
        "codeparrot/codeparrot-clean@35a59fb025bc0a102f7d96eac09d145b896d487b:default:train#content",
        "HuggingFaceH4/ultrachat_200k@8049631c405ae6576f93f445c6b8166f76f5505a:default:train_sft#messages",
        "HuggingFaceFW/fineweb-2@af9c13333eb981300149d5ca60a8e9d659b276b9:cmn_Hani:train#text",
        "HuggingFaceFW/fineweb-2@af9c13333eb981300149d5ca60a8e9d659b276b9:deu_Latn:train#text",
    )
)
"""Each gives one sequence in turn, from its first row on."""

NAMED: Mapping[str, DatasetName] = {
    "wikitext": DatasetName("Salesforce/wikitext", config="wikitext-2-raw-v1", field="text"),
    "mmlu": DatasetName("cais/mmlu", config="all", split="validation", field="question"),
}
"""Names by which others call public datasets; of MMLU not the questions that are scored."""


def default_revision() -> str:
    """sha256 of the list of parts: changes with any of them."""
    return sha256_hex(strict_json.canonical_bytes([str(part) for part in DEFAULT_PARTS]))
