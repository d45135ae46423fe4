"""Whether an INT2 cache costs accepted drafts: stock SGLang with a BF16 cache and `oscar-zoo serve`
with an artifact answer the same prompts, each with drafts and without. Needs a GPU.

    python contrib/benchmarks/draft_acceptance.py ARTIFACT MODEL -- FLAGS

FLAGS are those of SGLang, such as `--speculative-algorithm=NGRAM
--speculative-num-draft-tokens=8`; flags that begin with `--speculative-` are left out for the
servers without drafts. Prompts are text and questions of the example model, asked one at a time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/gpu_check")]

from engines import recall_prompts, text_tokens  # noqa: E402
from served import Server  # noqa: E402
from steps import Check  # noqa: E402

from oscar_zoo.engines.server_client import ServerClient  # noqa: E402
from oscar_zoo.engines.sglang.launch.starting import StockServer, stock_server  # noqa: E402
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags  # noqa: E402

NEW_TOKENS, TIMEOUT = 160, 900.0


@dataclass(frozen=True)
class Answers:
    """Tokens of every answer, tokens of a step, and tokens per second."""

    tokens: list[list[int]]
    accepted: float
    speed: float


class Quiet:
    """Hears of a start and says nothing."""

    def starting(self, log: Path) -> None:
        """Nothing."""

    def phase(self, name: str, seconds: float) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """Nothing."""


def main(artifact: str, model: str, *flags: str) -> None:
    """Print a line for each server, and how many answers drafts leave as they were."""
    plain = [flag for flag in flags if not flag.startswith("--speculative-")]
    with tempfile.TemporaryDirectory(prefix="draft-acceptance-") as folder:
        for cache in ("BF16", "INT2"):
            found = {}
            for name, chosen in (("without drafts", plain), ("with drafts", [*flags])):
                work = Path(folder) / f"{cache} {name}"
                work.mkdir()
                with _server(cache, work, artifact, model, chosen) as client:
                    found[name] = _ask(client)
                one = found[name]
                print(
                    f"{cache} {name}: {one.accepted:.2f} tokens a step, {one.speed:.0f} tokens/s",
                    flush=True,
                )
            pairs = zip(*(one.tokens for one in found.values()), strict=True)
            same = sum(before == after for before, after in pairs)
            print(f"{cache}: {same} of {len(_prompts())} answers are the same", flush=True)


@contextmanager
def _server(
    cache: str, work: Path, artifact: str, model: str, flags: list[str]
) -> Iterator[ServerClient]:
    if cache == "BF16":
        chosen = UserFlags(flags)
        wanted = StockServer("bf16", model, None, "cuda", work / "log", TIMEOUT, flags=chosen)
        with stock_server(wanted, Quiet()) as started:
            yield started.client
    else:
        check = Check(work, "cuda", tuple(flags))
        with Server(check, artifact, "--model", model, engine_flags=tuple(flags)) as server:
            yield ServerClient(server.url, timeout=TIMEOUT)


def _prompts() -> list[list[int]]:
    ids = text_tokens()
    return [*recall_prompts(), *(ids[at : at + 400] for at in range(1000, 10000, 1000))]


def _ask(client: ServerClient) -> Answers:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    tokens, steps, seconds = [], 0, 0.0
    for prompt in _prompts():
        body = {"input_ids": prompt, "sampling_params": sampling}
        client.post("/generate", body)  # its prompt is in the prefix cache then
        began = time.perf_counter()
        answer = client.post("/generate", body)
        seconds += time.perf_counter() - began
        tokens.append(list(answer["output_ids"]))
        steps += int(answer["meta_info"].get("spec_verify_ct") or NEW_TOKENS)
    made = sum(map(len, tokens))
    return Answers(tokens, made / steps, made / seconds)


if __name__ == "__main__":
    paths, flags = sys.argv[1:3], [flag for flag in sys.argv[3:] if flag != "--"]
    main(*(str(Path(path).resolve()) for path in paths), *flags)
