"""The caches of transformers side by side: `DynamicCache`, `OscarCache` and `QuantizedCache`.

    python contrib/benchmarks/oscar_cache.py steps [--layers 4] [--tokens 2048,8192] [--batch 1,8]
    python contrib/benchmarks/oscar_cache.py quality MODEL ARTIFACT --text FILE
    python contrib/benchmarks/oscar_cache.py question MODEL ARTIFACT --text FILE [--piece 2048]

`steps` times decode steps behind random keys and values, with random weights of Qwen3-8B's shape.
`quality` is the perplexity of the last tokens of windows, which read all others through the cache.
`question` asks for a fact in a long text. A cache whose package is absent, or that
does not run here, gets a line that says so: `pip install hqq optimum-quanto` brings two of them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.models.loading import load_model
from oscar_zoo.registry.recipe import serving_recipe
from oscar_zoo.transformers import OscarCache

# isort: split
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, Qwen3Config
from transformers import __version__ as release

from oscar_zoo.engines.transformers.cache import block_of

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
LAYERS, VOCABULARY = 36, 151936
WINDOWS, LENGTH, LAST = 4, 1024, 128
OURS, KEEP = "OscarCache", "OscarCache, attention='keep'"
QUANTIZED = {f"{what}, {bits} bits": (what, bits) for what in ("hqq", "quanto") for bits in (4, 2)}
CACHES = ("DynamicCache", OURS, KEEP, *QUANTIZED)
FACT = "The painting in the hall shows a red fox."
ASK = "What does the painting in the hall show? Answer in one sentence."
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    cuda = options.device == "cuda"
    facts = {"device": torch.cuda.get_device_name() if cuda else "cpu", "transformers": release}
    facts |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    rows = []
    for row in {"steps": steps, "quality": quality, "question": question}[options.mode](options):
        print("  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)
        rows.append(row)
    if options.output:
        options.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    if any("not_run" in row for row in rows if row["cache"] in (OURS, KEEP)):
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    modes = parser.add_subparsers(dest="mode", required=True)
    timed, perplexity, asked = map(modes.add_parser, ("steps", "quality", "question"))
    for mode in (timed, perplexity, asked):
        mode.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        mode.add_argument("--only", type=_part, default="", help=f"a part of {', '.join(CACHES)}")
        mode.add_argument("--output", type=Path, metavar="FILE", help="write JSON")
    timed.add_argument("--tokens", type=_numbers, default="2048,8192,32768")
    timed.add_argument("--batch", type=_numbers, default="1,8")
    timed.add_argument("--layers", type=int, default=LAYERS)
    timed.add_argument("--steps", type=int, default=12)
    for mode in (perplexity, asked):
        mode.add_argument("model")
        mode.add_argument("artifact")
        mode.add_argument("--text", type=Path, required=True)
        mode.add_argument("--dtype", default="float32")
    perplexity.add_argument("--piece", type=int, default=32, help="tokens that come at once")
    asked.add_argument("--tokens", type=int, default=6000)
    asked.add_argument("--piece", type=int, help="take the prompt in pieces of so many tokens")
    return parser


def steps(options: argparse.Namespace) -> Iterator[Row]:
    """Median time of a decode step, the sum of its kernels, bytes of the cache, and the most memory
    that a step takes above it."""
    device, layers = torch.device(options.device), options.layers
    vocabulary = VOCABULARY * layers // LAYERS  # so that its share of a step stays the same
    config = Qwen3Config(**SHAPE, num_hidden_layers=layers, vocab_size=vocabulary)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    block = block_of(config)
    given = *(hadamard_set(block, side) for side in "kv"), serving_recipe(None, block.geometry)
    ours = partial(OscarCache, model, *given)

    def measured(name: str, tokens: int, batch: int) -> Row:
        cache = _cache(name, model, ours)
        own = model.config._attn_implementation
        model.set_attn_implementation("sdpa")  # with it `update` writes at once
        shape = 2, batch, block.num_kv_heads, tokens, block.head_dim
        for layer in range(layers):
            cache.update(*torch.randn(shape, device=device, dtype=torch.bfloat16), layer)
        model.set_attn_implementation(own)
        ids = torch.ones(batch, 1, dtype=torch.long, device=device)

        def step(_: int = 0) -> float:
            began = time.perf_counter()
            at = torch.full_like(ids, cache.get_seq_length())  # as `generate` gives it
            out = model(ids, position_ids=at, past_key_values=cache)
            out.logits[0, -1, 0].item()  # waits for the device
            return (time.perf_counter() - began) * 1e3

        list(map(step, range(4)))  # ours is recorded in the third one
        before = _memory(device)
        row = {"ms": statistics.median(map(step, range(options.steps))), "bytes": held(cache)}
        row["peak_bytes"] = _memory(device, peak=True) - before
        if device.type == "cuda":
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
                step()
            own = (event.self_device_time_total for event in trace.key_averages())
            row["kernels_ms"] = sum(own) / 1e3
        return row

    for batch in options.batch:
        for tokens in options.tokens:
            yield from _rows(options, measured, batch=batch, tokens=tokens)


def quality(options: argparse.Namespace) -> Iterator[Row]:
    model, tokenizer, ours = _loaded(options)
    ids = torch.tensor(tokenizer(options.text.read_text("utf-8"))["input_ids"])
    windows = ids.unfold(0, LENGTH, (len(ids) - LENGTH) // (WINDOWS - 1)).to(options.device)

    def measured(name: str) -> Row:
        losses, began = [], time.process_time()
        for window in windows.split(1):
            cache, (start, rest) = _cache(name, model, ours), window.split([LENGTH - LAST, LAST], 1)
            pieces = start, *rest.split(options.piece, 1)
            found = [model(x, past_key_values=cache).logits[0] for x in pieces]
            logits = torch.cat(found)[-LAST - 1 : -1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, rest[0]).item())
        spent = (time.process_time() - began) / WINDOWS
        row = {"perplexity": math.exp(statistics.mean(losses)), "bytes": held(cache)}
        return row | {"cpu_seconds": spent}

    yield from _rows(options, measured)


def question(options: argparse.Namespace) -> Iterator[Row]:
    model, tokenizer, ours = _loaded(options)
    text = tokenizer(options.text.read_text("utf-8"))["input_ids"][: options.tokens]
    cut = len(text) * 4 // 5
    before, behind = tokenizer.decode(text[:cut]), tokenizer.decode(text[cut:])
    said = [{"role": "user", "content": f"{before}\n\n{FACT}\n\n{behind}\n\n{ASK}"}]
    prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])

    def measured(name: str) -> Row:
        cache, clock = _cache(name, model, ours), [time.perf_counter()]

        def tick(tokens: Tensor, _: Any) -> Tensor:
            tokens[0, -1].item()  # waits for the device
            clock.append(time.perf_counter())
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        out = model.generate(
            ids.to(options.device), past_key_values=cache, do_sample=False, max_new_tokens=48,
            stopping_criteria=[tick], prefill_chunk_size=options.piece,
            attention_mask=torch.ones_like(ids, device=options.device),
        )  # fmt: skip
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        row = {"prompt_tokens": ids.shape[1], "prefill_seconds": clock[1] - clock[0]}
        row["seconds_per_token"] = (clock[-1] - clock[1]) / max(1, len(clock) - 2)
        return row | {"bytes": held(cache), "answer": answer}

    yield from _rows(options, measured)


def held(value: Any) -> int:
    """Bytes of all tensors of a cache, also those inside of other tensors."""
    if isinstance(value, OscarCache):
        return value.nbytes
    if isinstance(value, Tensor):
        inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
        return sum(held(getattr(value, name)) for name in inner) or value.nbytes
    if isinstance(value, dict | list | tuple):
        return sum(map(held, value.values() if isinstance(value, dict) else value))
    return held([vars(layer) for layer in value.layers]) if hasattr(value, "layers") else 0


def _cache(name: str, model: Any, ours: Callable[[], OscarCache]) -> Any:
    """A new cache; the model attends as it goes with it."""
    model.set_attn_implementation("sdpa")
    if name in QUANTIZED:
        backend, bits = QUANTIZED[name]
        return QuantizedCache(backend, model.config, nbits=bits)
    cache = DynamicCache(config=model.config) if name == "DynamicCache" else ours()
    if name != OURS:
        model.set_attn_implementation("sdpa")
    return cache


def _loaded(options: argparse.Namespace) -> tuple[Any, Any, Callable[[], OscarCache]]:
    loaded = load_model(options.model, dtype=options.dtype, device=options.device)
    ours = partial(OscarCache.from_pretrained, options.artifact, model=loaded.model)
    return loaded.model, loaded.tokenizer, ours


def _rows(options: argparse.Namespace, measured: Callable[..., Row], **case: int) -> Iterator[Row]:
    for name in CACHES:
        if options.only in name:
            try:
                with torch.inference_mode():
                    found = measured(name, **case)
            except Exception as error:  # of any package: what does not run here is a result too
                found = {"not_run": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
            yield {"cache": name, **case, **found}


def _memory(device: torch.device, *, peak: bool = False) -> int:
    """Bytes that are taken now, and a new beginning of the peak; or the peak since then."""
    if device.type == "cuda":
        if peak:
            return torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM" if peak else "VmRSS"].split()[0]) * 1024


def _part(text: str) -> str:
    if not any(text in name for name in CACHES):
        raise argparse.ArgumentTypeError(
            f"no cache is called {text}; there are {', '.join(CACHES)}"
        )
    return text


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
