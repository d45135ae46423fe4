"""What an INT2 cache costs in accepted drafts, without a GPU: a draft model that is the model
itself, with exact rows, guesses three tokens a step.

    python contrib/benchmarks/model_drafts.py ARTIFACT

ARTIFACT is a rotation of examples/models/tiny-qwen3-hard. Prompts are 1,200 tokens of the
validation text, answers 96 tokens, windows the default. Where INT2 codes change a likeliest token,
a draft is rejected.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests")]

from draft_runs import STANDALONE, Runs  # noqa: E402
from engines import text_tokens  # noqa: E402

PROMPT, NEW = 1200, 96
CACHES = {"exact rows": {"INT2_TEST_MODE": "lossless"}, "INT2": {}}


def main(artifact: str) -> None:
    """Print tokens of a step with either cache."""
    ids = text_tokens()
    groups = [
        {"name": str(at), "prompts": [ids[at : at + PROMPT]], "new": NEW}
        for at in range(1000, 9000, 1000)
    ]
    with tempfile.TemporaryDirectory(prefix="model-drafts-") as folder:
        runs = Runs(Path(folder))
        runs.artifact = Path(artifact).resolve()
        try:
            for cache, env in CACHES.items():
                runs.plain(f"{cache} plain", env, groups)
                runs.drafts(cache, env, groups, of=f"{cache} plain", engine=STANDALONE)
            for cache in CACHES:
                answered = runs.result(cache)["groups"].values()
                steps = sum(one["steps"][0] for one in answered)
                changed = runs.different(cache, f"{cache} plain")
                print(
                    f"{cache}: {NEW * len(groups) / steps:.2f} tokens a step,"
                    f" {len(groups) - len(changed)} of {len(groups)} answers as without drafts"
                )
        finally:
            runs.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
