"""For tests of calibration through SGLang: models to calibrate, the rows that ranks saw, and what a
tap refuses.

`try_layers` tries the tap on attention layers of real SGLang without an engine.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
ROW_NAMES = ("query", "key", "value", "output")


def write_exact_model(folder: Path) -> Path:
    """The example model with weights for which a sum over tensor-parallel ranks does not round;
    returns `folder`.

    Each row of o_proj and down_proj keeps one input channel, times one half: of the summands of an
    all-reduce all but one are zero. Everything else is the example's, and every channel of every
    head still reaches later layers.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(EXAMPLE, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            rows, columns = weight.shape
            weights[name] = torch.zeros_like(weight)
            weights[name][
                torch.arange(rows), torch.randperm(columns, generator=generator)[:rows]
            ] = 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def site_for_shared_heads(folder: Path, rows: Path) -> Path:
    """A `sitecustomize` for `PYTHONPATH` that does what the plugin's own does, `record_rows` and
    `replicate_heads`."""
    folder.mkdir()
    rows.mkdir()
    lines = (
        "import sys",
        "import oscar_zoo.models.torchvision_ops",
        f"sys.path.append({str(Path(__file__).parent)!r})",
        "import tap_child",
        f"tap_child.record_rows({str(rows)!r})",
        "tap_child.replicate_heads()",
    )
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return folder


def replicate_heads() -> None:
    """On a CPU SGLang fills up KV heads with empty ones where a GPU has copies: let it copy here
    too."""
    from oscar_zoo.engines.sglang.compat import hook_targets

    install = hook_targets.install_tap

    def install_tap(hook: Any, methods: Any) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        path = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"
        HookRegistry.register(path, lambda config, *_: config, HookType.REPLACE)
        install(hook, methods)

    hook_targets.install_tap = install_tap


def record_rows(folder: str) -> None:
    """From now on `LayerMoments.add` also writes its arguments, a file per call:
    `<process>-<number>.safetensors`."""
    from safetensors.torch import save_file

    from oscar_zoo.compute.layer_moments import LayerMoments

    add, calls = LayerMoments.add, iter(range(1 << 20))

    def recording(self: LayerMoments, *rows: Tensor) -> None:
        tensors = {name: x.contiguous().clone() for name, x in zip(ROW_NAMES, rows, strict=True)}
        save_file(tensors, Path(folder) / f"{os.getpid()}-{next(calls):05d}.safetensors")
        add(self, *rows)

    LayerMoments.add = recording  # type: ignore[assignment, method-assign]


def recorded_rows(folder: Path, layers: int) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    """`(layer, rows)` of every call that was recorded; layers take turns in each process."""
    from safetensors.torch import load_file

    for path in sorted(folder.glob("*.safetensors")):
        yield int(path.stem.split("-")[1]) % layers, load_file(path)


def try_layers(out: str) -> None:
    """In a fork of `sglang_forks`: what is installed there, and what the tap says to models; JSON
    in the file `out`."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()
    radix = importlib.import_module("sglang.srt.layers.radix_attention")
    Path(out).write_text(
        json.dumps(
            {
                "hooked": hasattr(radix.RadixAttention.forward, "__wrapped__"),
                "methods": sorted(name for name in vars(Scheduler) if name.startswith("oscar_tap")),
                "refused": refusals(radix),
            }
        )
    )


def refusals(radix: Any) -> dict[str, str]:
    """What the tap says to models that it must not calibrate."""
    from oscar_zoo.engines.sglang import tap
    from oscar_zoo.engines.sglang.compat import geometry, radix_attention
    from oscar_zoo.errors import OscarZooError

    def layer(layer_id: int = 0, **changes: Any) -> Any:
        return radix.RadixAttention(4, 16, 0.25, num_kv_heads=2, layer_id=layer_id, **changes)

    mla = SimpleNamespace(name="MLA")
    cases: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "mla": ([layer()], {"attention_arch": mla}),
        "window": ([layer(0), layer(1, sliding_window_size=128)], {}),
        "twice": ([layer(3), layer(3)], {}),
        "cache": ([layer()], {"kv_cache_dtype": torch.float8_e4m3fn}),
    }
    said = {}
    geometry.full_layers = lambda _: tuple(range(8))  # type: ignore[assignment]
    for name, (layers, changes) in cases.items():
        config = SimpleNamespace(
            dtype=torch.bfloat16,
            num_hidden_layers=8,
            **changes,
        )
        cache = changes.get("kv_cache_dtype", torch.bfloat16)
        runner = SimpleNamespace(
            model=torch.nn.ModuleList(layers),
            model_config=config,
            kv_cache_dtype=cache,
            layer_info=SimpleNamespace(start_layer=0, end_layer=8),
        )
        scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
        try:
            tap.start(scheduler, "", outputs=True, weights=True)
        except OscarZooError as error:
            said[name] = f"{error.code}: {error.message}"
    try:
        alone = layer(5)
        radix_attention.output_projection(torch.nn.ModuleList([alone]), alone, torch.bfloat16)
    except OscarZooError as error:
        said["o_proj"] = error.message
    return said
