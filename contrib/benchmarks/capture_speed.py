"""What a capture costs beside the same forward passes without it, for a model of random weights.

    python contrib/benchmarks/capture_speed.py [--device cuda] [--geometry qwen3-8b] [--tokens 8192]
    [--seq-len 4096]

Prints tokens per second of plain passes, of captures and of the captures' parts, peak memory, what
each kind of sum costs, the time of all fits, and the size of the moments file. Needs torch,
transformers and this package; no download, no checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from oscar_zoo.compute import moments
from oscar_zoo.compute.capture.transformers import capture, numerics
from oscar_zoo.compute.data.calibration import CalibrationData
from oscar_zoo.compute.methods.base import fit
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.compute.moments import LayerMoments, Moments, Need, observed
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord, save_moments
from oscar_zoo.models.geometry import model_block
from oscar_zoo.models.loading import LoadedModel

NEEDS: frozenset[Need] = frozenset(("rows", "weighted", "outputs", "weights"))
PARTS: tuple[frozenset[Need], ...] = (frozenset(("rows",)), frozenset(("rows", "outputs")), NEEDS)
GEOMETRIES = {  # hidden, intermediate, layers, query heads, KV heads, head_dim, vocabulary
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151936),
    "tiny": (256, 512, 4, 4, 2, 64, 2048),
}


def main() -> None:
    wanted = _arguments()
    device = torch.device(wanted.device)
    began = time.perf_counter()
    loaded = build(GEOMETRIES[wanted.geometry], device)
    data = random_tokens(wanted.tokens, wanted.seq_len, GEOMETRIES[wanted.geometry][-1])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(
        f"{wanted.geometry}, {wanted.tokens} tokens in sequences of {wanted.seq_len},"
        f" {loaded.dtype}, {name}"
    )
    print(f"torch {torch.__version__}, built in {time.perf_counter() - began:.1f} s")
    first = seconds(lambda: capture(loaded, data, needs=NEEDS), device)
    print(f"first capture, with the check of the layers and all start-up: {first:.3f} s")

    plain = timed("forward passes", lambda: forward(loaded, data), wanted)
    for needs in PARTS:
        time_of = timed(
            f"capture of {' '.join(sorted(needs))}",
            lambda n=needs: capture(loaded, data, needs=n),
            wanted,
        )
        print(f"{'':42}{100 * (time_of / plain - 1):+.1f} % against the passes alone")
    sums(GEOMETRIES[wanted.geometry], wanted, plain)
    moments = capture(loaded, data, needs=NEEDS)
    fits(moments, wanted.output or Path(tempfile.mkdtemp()) / "moments.safetensors", loaded, data)


def build(shape: tuple[int, ...], device: torch.device) -> LoadedModel:
    """A Qwen3 model with weights as transformers initialises them, in bfloat16 on `device`."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    sizes = dict(zip((*names, "head_dim", "vocab_size"), shape, strict=True))
    config = Qwen3Config(**sizes, max_position_embeddings=40960, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    block = model_block(config, model_id="benchmark/qwen3", revision=None, config_sha256="0" * 64)
    return LoadedModel(model, None, block, "bfloat16")


def random_tokens(tokens: int, length: int, vocabulary: int) -> CalibrationData:
    """Sequences of `length`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (tokens // length, length), generator=generator)
    return CalibrationData(tuple(map(tuple, ids.tolist())), tokens, "random")


def forward(loaded: LoadedModel, data: CalibrationData) -> None:
    """What a capture runs, without the capture."""
    with torch.inference_mode():
        for ids in data.sequences:
            loaded.model.base_model(
                input_ids=torch.tensor([ids], device=loaded.device), use_cache=False
            )


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, finished on the device."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(what: str, call: Callable[[], object], wanted: argparse.Namespace) -> float:
    """Median of some calls after one, printed with its range."""
    device = torch.device(wanted.device)
    call()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs = sorted(seconds(call, device) for _ in range(wanted.repeat))
    middle = statistics.median(runs)
    peak = (
        f", peak {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB"
        if device.type == "cuda"
        else ""
    )
    print(
        f"{what:42}{middle:.4f} s ({runs[0]:.4f} .. {runs[-1]:.4f}), {wanted.tokens / middle:,.0f}"
        f" tokens/s{peak}"
    )
    return middle


def sums(shape: tuple[int, ...], wanted: argparse.Namespace, plain: float) -> None:
    """Time each kind of sum on rows of one layer and sequence, laid out as a model does; in a
    capture they overlap."""
    device, length = torch.device(wanted.device), wanted.seq_len
    hidden, _, layers, query_heads, heads, width, _ = shape

    def rows(count: int) -> torch.Tensor:
        return torch.randn(length, count, width, device=device).bfloat16().transpose(0, 1)

    query, key, value, output = rows(query_heads), rows(heads), rows(heads), rows(query_heads)
    layer = LayerMoments.zeros(heads, width, width, device=device)
    layer.add(query, key, value)
    target, o_proj = (
        moments.qqt(layer),
        torch.randn(hidden, query_heads * width, device=device).bfloat16(),
    )
    per_layer = wanted.seq_len / wanted.tokens
    parts: dict[str, tuple[float, Callable[[], object]]] = {
        "q, k, v": (1, lambda: layer.add(query, key, value)),
        "q, k, v and outputs": (1, lambda: layer.add(query, key, value, output)),
        "weighted values": (1, lambda: layer.add_weighted(key, value, target)),
        "their target": (per_layer, lambda: moments.qqt(layer)),
        "output projection": (per_layer, lambda: layer.set_weights(o_proj)),
    }
    for what, (times, call) in parts.items():
        call()
        once = statistics.median(
            seconds(lambda c=call: [c() for _ in range(20)], device) / 20 for _ in range(5)
        )
        share = 100 * once * times * layers * wanted.tokens / length / plain
        print(f"{'sums of ' + what:42}{1e3 * once:.3f} ms a call, {share:.1f} % of the passes")


def fits(moments: Moments, path: Path, loaded: LoadedModel, data: CalibrationData) -> None:
    """Time every method, and write the moments."""
    total = 0.0
    for name, method in METHODS.items():
        began = time.perf_counter()
        fit(moments, method)
        total += time.perf_counter() - began
        print(f"{'fit ' + name:42}{time.perf_counter() - began:.3f} s")
    info = MomentsInfo(
        model=loaded.block,
        calibration=data.facts(),
        coverage=observed(moments),
        numerics=numerics(loaded),
        sequences=tuple(map(SequenceRecord.of, data.sequences)),
    )
    began = time.perf_counter()
    written = save_moments(path, moments, info)
    print(f"{'all fits':42}{total:.3f} s")
    print(
        f"{'moments file':42}{written.size / 1e6:.1f} MB in {time.perf_counter() - began:.3f} s:"
        f" {path}"
    )


def _arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b" if cuda else "tiny")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=4096 if cuda else 2048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, help="where the moments go [default: a temporary folder]"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
