"""Run requests through one SGLang Engine and save what came out: `python engine_child.py JOB.json OUT.json`.

A job holds `engine` (keyword arguments) and `groups`; the prompts of a group run at the same time. A prompt is a list
of token ids, or `{"of": [group, index], "append": [...]}`: an earlier prompt, its answer, and more (a second turn).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    import sglang

    began = time.time()
    engine = sglang.Engine(**job["engine"])
    result: dict[str, Any] = {"version": sglang.__version__, "up": round(time.time() - began, 1), "groups": {}}
    try:
        for group in job["groups"]:
            prompts = [resolve(prompt, result["groups"]) for prompt in group["prompts"]]
            sampling = {"temperature": 0, "max_new_tokens": group["new"], "ignore_eos": True}
            began = time.time()
            answers = engine.generate(input_ids=prompts, sampling_params=sampling)
            result["groups"][group["name"]] = {
                "prompts": prompts,
                "tokens": [answer["output_ids"] for answer in answers],
                "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
                "seconds": round(time.time() - began, 2),
            }
        if job["engine"].get("kv_cache_dtype") == "int2":
            engine.collective_rpc("oscar_report", path=str(out))
    finally:
        engine.shutdown()
    reports = out.parent.glob(out.name + ".*.json")
    result["reports"] = [json.loads(path.read_text()) for path in sorted(reports)]
    out.write_text(json.dumps(result))


def resolve(prompt: Any, groups: dict[str, Any]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    group, index = prompt["of"]
    earlier = groups[group]
    return [*earlier["prompts"][index], *earlier["tokens"][index], *prompt["append"]]


if __name__ == "__main__":
    main()
