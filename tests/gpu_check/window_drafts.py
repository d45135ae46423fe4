"""The steps of the GPU check with a model whose layers partly have a sliding window, and drafts."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from served import Server
from steps import ROOT, SERVER_EVAL, Check, CheckFailed, NotTried, server_figures

WINDOWED = "tiny-window"
"""A random gpt-oss, half of whose layers have a sliding window."""
EVERY_EXPERT = {"num_experts_per_tok": 4}
"""All of its experts: where two are nearly as good, rounding decides, and the token with it."""
PROMPT, ANSWER, POOL = 3000, 160, 65536
"""Characters of a prompt, tokens of an answer, both longer than a window; token slots."""
NEARLY = 0.1
"""By so much in log-probability a token may lead that drafts change: other shapes of matrices round
differently."""


def serve_windowed_drafts(check: Check) -> str:
    """`serve ./FOLDER --drafts` of the model with sliding windows, `eval --url`, and the same
    server without drafts: answers are the same, but where two tokens are nearly as likely."""
    if check.device != "cuda":
        raise NotTried("SGLang verifies drafts on a GPU only")
    prompts = _prompts()
    flags = (f"--max-total-tokens={POOL}", *check.engine_flags)
    served = (f"./{WINDOWED}-rotation", "--model", f"./{WINDOWED}")

    def answers(*drafts: str) -> tuple[list[list[dict[int, float]]], dict[str, Any]]:
        with Server(check, *served, *drafts, engine_flags=flags) as server:
            given = [server.choices(prompt, ANSWER) for prompt in prompts]
            asked = (*served, *SERVER_EVAL, "--url", server.url)
            return given, check.zoo("eval", *asked) if drafts else {}

    with ThreadPoolExecutor(1) as pool:
        without = pool.submit(answers)
        drafted, facts = answers("--drafts")
        plain, _ = without.result()
    equal, gaps = compared(plain, drafted)
    figures = f"{equal} of {len(prompts)} answers are the same with drafts"
    if gaps:
        figures += f", the others up to a token that leads by {max(gaps):.3f} at most"
    if any(gap > NEARLY for gap in gaps):
        raise CheckFailed(f"{figures}: the limit is {NEARLY}")
    return f"{figures}; {server_figures(facts)}"


def compared(
    plain: list[list[dict[int, float]]], drafted: list[list[dict[int, float]]]
) -> tuple[int, list[float]]:
    """How many answers are the same, and by how much the first other token of each one led.

    Args:
        plain, drafted: for each token of each answer, the likeliest ones, the chosen one first.
    """
    gaps = []
    for one, other in zip(plain, drafted, strict=True):
        pairs = zip(one, other, strict=True)
        first = next(((a, next(iter(b))) for a, b in pairs if next(iter(a)) != next(iter(b))), None)
        if first is not None:
            best, taken = first
            gaps.append(max(best.values()) - best.get(taken, float("-inf")))
    return len(plain) - len(gaps), gaps


def _prompts() -> list[str]:
    text = " ".join((ROOT / "examples/text/validation.txt").read_text("utf-8").split())
    return [text[at : at + PROMPT] for at in range(0, 20000, PROMPT)]
