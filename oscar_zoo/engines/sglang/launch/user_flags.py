"""SGLang's flags as a user wrote them behind `--`, checked and read once.

Everybody who looks for a flag of the user asks `UserFlags`. It exists only for flags that `serve`
allows, so what builds a command line from it checks nothing again. A flag may be written as the
beginning of its name; only then the names of SGLang's other flags are read from its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oscar_zoo.engines.sglang.flags import SizeFlags
from oscar_zoo.engines.sglang.launch.denied_flags import check_extra_flags
from oscar_zoo.engines.sglang.launch.installed_flags import means
from oscar_zoo.errors import UsageError

SERVED_NAME = "--served-model-name"
TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")
"""The names of one flag."""
DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size")
PIPELINE_PARALLEL = ("--pp", "--pp-size", "--pipeline-parallel-size")
ATTENTION_DATA_PARALLEL = ("--attn-dp-size", "--attention-data-parallel-size")
DP_ATTENTION = "--enable-dp-attention"
UNKNOWN_WEIGHTS = (
    "--quantization",
    "--cpu-offload-gb",
    "--load-format",
    "--json-model-override-args",
)
"""Flags with which the size of the weights cannot be told from the files of a model."""


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: with hyphens, whatever the user wrote.
        text: what stands after `=`, else the next word, or `None` at the end of the line.
        joined: whether `text` stands after `=`.
    """

    name: str
    text: str | None
    joined: bool

    @property
    def value(self) -> str | None:
        """Its value; `None` when the next word is a flag itself."""
        if self.joined or self.text is None or not self.text.startswith("--"):
            return self.text
        return None


class UserFlags:
    """The flags of one server.

    Attributes:
        words: the same, for SGLang, which reads them itself.
        given: the flags among them, in order.
    """

    def __init__(self, words: Sequence[str] = ()) -> None:
        check_extra_flags(words)
        self.words = tuple(words)
        self.given = tuple(_flags(words))

    def after(self, *words: str) -> UserFlags:
        """These flags behind `words`, over which they win."""
        return UserFlags((*words, *self.words))

    def without(self, prefix: str) -> tuple[str, ...]:
        """The words less the flags whose names begin with `prefix`, and their values."""
        kept, dropped = list[str](), False
        for word in self.words:
            if word.startswith("--"):
                name = word.partition("=")[0].replace("_", "-")
                dropped = name.startswith(prefix)
            if not dropped:
                kept.append(word)
        return tuple(kept)

    def text(self, *names: str) -> str | None:
        """What is written for a flag that takes a value, under any of its `names` or the beginning
        of one (`means`).

        When the flag is given several times, the last one wins.
        """
        found = [flag.text for flag in self.given if means(flag.name, names)]
        return found[-1] if found else None

    def sizes(self) -> SizeFlags:
        """Those that decide how many GPUs and how much memory a server takes."""
        requests = self.text("--max-running-requests") or ""
        return SizeFlags(
            tensor_parallel=_tensor_parallel(self.text(*TENSOR_PARALLEL)),
            pipeline_parallel=_number(self.text(*PIPELINE_PARALLEL)),
            data_parallel=_number(self.text(*DATA_PARALLEL)),
            attention_data_parallel=_number(self.text(*ATTENTION_DATA_PARALLEL)),
            dp_attention=any(means(flag.name, [DP_ATTENTION]) for flag in self.given),
            dtype=self.text("--dtype"),
            requests=int(requests) if requests.isdecimal() else None,
            memory_fraction=_fraction(self.text("--mem-fraction-static")),
            weights_known=all(self.text(name) is None for name in UNKNOWN_WEIGHTS)
            and self.text(*PIPELINE_PARALLEL) is None,
        )


def _flags(words: Sequence[str]) -> Iterator[Flag]:
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            after = words[place + 1] if place + 1 < len(words) else None
            yield Flag(name.replace("_", "-"), text if equals else after, bool(equals))


def _tensor_parallel(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"--tp {text!r} is not a number of GPUs.", hint="for example -- --tp=2")
    return None if text is None else int(text)


def _number(text: str | None) -> int:
    return max(1, int(text)) if text is not None and text.isdecimal() else 1


def _fraction(text: str | None) -> float | None:
    try:
        return None if text is None else min(1.0, float(text))
    except ValueError:
        return 1.0
