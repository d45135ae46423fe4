"""`--drafts`: SGLang's flags for speculative decoding, chosen for a user who names none of them.

Flags that the user gives win, so only those that are missing are added. Pure; needs neither torch
nor sglang.
"""

from __future__ import annotations

from typing import Literal

from oscar_zoo.engines.sglang.launch.flag_refusals import ALGORITHM, check_flags, needs_gpu
from oscar_zoo.engines.sglang.launch.plan import DRAFT_MODEL
from oscar_zoo.engines.sglang.launch.user_flags import Flag, UserFlags
from oscar_zoo.engines.sglang.speculation_refusals import BRANCHES, BREADTH
from oscar_zoo.errors import UsageError

Kind = Literal["mtp", "ngram"]
Wish = Literal["auto", "mtp", "ngram"]
OPTION = "--drafts"
STEPS, TOKENS = "--speculative-num-steps", "--speculative-num-draft-tokens"
ALGORITHMS: dict[Kind, str] = {"mtp": "NEXTN", "ngram": "NGRAM"}
"""SGLang's names."""
MTP_STEPS = 3
"""Tokens that a layer of the model guesses in front of a step, where the zoo does not say it.
SGLang chooses as many."""
NGRAM_TOKENS = 8
"""Tokens that a step verifies with a table of n-grams: one that is known, and seven guesses."""
ATTENTION = "--speculative-draft-attention-backend"
MTP_ATTENTION = "triton"
"""SGLang's attention for the layer that drafts. FlashInfer, which drafts of a model have where no
flag says otherwise, is compiled for each shape at the first start, which takes minutes."""
_BEGIN = "--speculative-"


def check_wish(wish: Wish | None, flags: UserFlags, device: str) -> None:
    """Refuse what can be refused before the model is known: flags alone, and `--drafts` beside
    flags that contradict it.

    Args:
        wish: the value of `--drafts`, or `None` without it.
        device: `cpu` or `cuda`.
    """
    check_flags(flags, device)
    if wish is None:
        return
    if device == "cpu":
        raise needs_gpu(OPTION)
    algorithm, model = given(flags, ALGORITHM), flags.text(*DRAFT_MODEL)
    if algorithm is None:
        if model is not None:
            raise UsageError(
                f"{OPTION} chooses drafts without a draft model, and {DRAFT_MODEL[0]} names one.",
                hint=f"leave out one of the two; with a draft model, name its {ALGORITHM}",
            )
        check_flags(flags.after(f"{ALGORITHM}=NGRAM"), device)
        return
    if wish != "auto" and (_algorithm(algorithm) != ALGORITHMS[wish] or model is not None):
        raise UsageError(
            f"{OPTION}={wish} and {ALGORITHM}={_algorithm(algorithm)} contradict each other.",
            hint="leave out one of the two",
        )


def given(flags: UserFlags, name: str) -> Flag | None:
    """The last flag of the user that SGLang's parser takes for `name`, which begins with
    `--speculative-`; the beginning of a name means it, too."""
    found = [
        flag for flag in flags.given if len(flag.name) > len(_BEGIN) and name.startswith(flag.name)
    ]
    return found[-1] if found else None


def mtp_words(flags: UserFlags, steps: int) -> tuple[tuple[str, ...], int]:
    """The missing flags for a chain of drafts from layers of the model itself.

    Args:
        steps: guesses a step, unless `flags` say it.

    Returns:
        The flags, and how many tokens are guessed in front of a step.
    """
    told = {name: given(flags, name) for name in (STEPS, BRANCHES, TOKENS)}
    if _number(told[BRANCHES], 1) > 1 and None in (told[STEPS], told[TOKENS]):
        raise UsageError(
            f"{BRANCHES} makes a tree of drafts, whose size {OPTION} does not choose.",
            hint=f"add {STEPS} and {TOKENS}, or leave {BRANCHES} out",
        )
    tokens = _number(told[TOKENS], steps + 1, least=2)
    steps = _number(told[STEPS], tokens - 1)
    wanted = {
        ALGORITHM: ALGORITHMS["mtp"],
        STEPS: str(steps),
        BRANCHES: "1",
        TOKENS: str(steps + 1),
        ATTENTION: MTP_ATTENTION,
    }
    return _missing(wanted, flags), steps


def ngram_words(flags: UserFlags, *, chain: bool) -> tuple[tuple[str, ...], int]:
    """The missing flags for drafts from text that repeats itself.

    Args:
        chain: the drafts must be a chain, and no tree.

    Returns:
        The flags, and how many tokens are guessed in front of a step.
    """
    tokens = _number(given(flags, TOKENS), NGRAM_TOKENS, least=2)
    wanted = {ALGORITHM: ALGORITHMS["ngram"], TOKENS: str(tokens)}
    return _missing(wanted | ({BREADTH: "1"} if chain else {}), flags), tokens - 1


def _missing(wanted: dict[str, str], flags: UserFlags) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in wanted.items() if given(flags, name) is None)


def _algorithm(flag: Flag) -> str:
    return (flag.value or "").upper()


def _number(flag: Flag | None, usual: int, *, least: int = 1) -> int:
    if flag is None:
        return usual
    text = flag.value or ""
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise UsageError(f"{flag.name} {text!r} is no whole number from {least} on.")
    return int(text)
