"""A corpus of bad rotation files, built from one good file: every file breaks one rule and names
the code it must get.

`corpus()` yields `(name, code, content)`. Running this module verifies each in a process with
little memory and time, and prints `[name, expected, got, CPU seconds, peak KiB]` of all as JSON.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hostile_archives
import hostile_pickles
import numpy as np
import tiny_artifacts as tiny
from hostile_archives import Case, Record, archive, good_records
from hostile_pickles import Tensor, layer, of, of_layer, op, top

from oscar_zoo.artifact.formats import hadamard
from oscar_zoo.artifact.outcome import Outcome, Rejected, Unsupported
from oscar_zoo.artifact.reader import GROUPINGS
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.artifact.writer import rotation_bytes


def corpus() -> Iterator[Case]:
    yield from hostile_archives.cases()
    yield from hostile_pickles.cases()
    yield from _schemas()
    yield from _versions()
    yield from _numbers()


def shared_record() -> bytes:
    """A 4 MB file that names one unaligned matrix of 1,024 channels in 1,000 layers: allowed, and
    must stay cheap."""
    d = tiny.D * 128
    matrix, ones = Tensor("0", (d, d)), Tensor("1", (d,))
    layers = {i: {"layer_id": i, "rotation": matrix, "eigenvalues": ones} for i in range(1000)}
    content = {
        "data.pkl": b"\x80\x02" + op(top(objective="hadamard", layers=layers)) + b".",
        "version": b"3\n",
        "data/0": hadamard(d).astype("<f4").tobytes(),
        "data/1": np.ones(d, dtype="<f4").tobytes(),
    }
    return archive([Record(f"archive/{name}", data, extra=b"") for name, data in content.items()])


def code_of(outcome: Outcome) -> str:
    if isinstance(outcome, Rejected):
        return outcome.code
    return outcome.kind if isinstance(outcome, Unsupported) else type(outcome).__name__


def _schemas() -> Iterator[Case]:
    for version in (0, max(GROUPINGS) + 1, True, "1", 1.0, None):
        label = type(version).__name__ + str(version)
        yield f"version-{label}", "schema.version", of(top(format_version=version))
    for key in ("objective", "source_grouping", "layers"):
        yield f"no-{key}", "schema.missing", of(top(**{key: None}))
    yield "unknown-key", "schema.unknown_key", of(top(extra=1))
    yield "unknown-int-key", "schema.unknown_key", of({**top(), 7: 1})
    yield "transform-in-1", "schema.unknown_key", of(top(transform={"key": "wush"}))
    yield "objective-number", "schema.type", of(top(objective=3))
    for objective in ("", "qqt", "qqt_", "xyz_r_h_pbr", "qqt_r", "r_h_pbr", "wush_k", "Hadamard"):
        yield f"objective-{objective}", "schema.objective", of(top(objective=objective))
    for grouping in ("head", "per_kv_head", "identity", ""):
        yield f"grouping-{grouping}", "schema.grouping", of(top(source_grouping=grouping))
    yield "layers-none", "layers.empty", of(top(layers={}))
    yield "layers-text", "layers.empty", of(top(layers="x"))
    yield "key-text", "layers.key_type", of(top(layers={"0": layer(0), "1": layer(1)}))
    yield "key-mixed", "layers.key_type", of(top(layers={0: layer(0), "1": layer(1)}))
    data = of(top(layers={-1: {**layer(1), "layer_id": -1}, 0: layer(0)}))
    yield "key-negative", "layers.id", data
    yield "key-huge", "layers.id", of(top(layers={1 << 40: layer(0)}))
    yield "id-differs", "layers.id", of_layer(layer_id=0)
    yield "id-bool", "layers.id", of_layer(layer_id=True)
    yield "id-text", "layers.id", of_layer(layer_id="1")
    yield "id-float", "layers.id", of_layer(layer_id=1.0)
    yield "layer-text", "schema.type", of(top(layers={0: layer(0), 1: "x"}))
    yield "layer-extra", "schema.unknown_key", of_layer(q_rotation=Tensor("4", (8, 8)))
    yield "layer-no-rotation", "schema.missing", of_layer(rotation=...)
    yield "layer-no-id", "schema.missing", of_layer(layer_id=...)
    yield "rotation-none", "schema.type", of_layer(rotation=None)
    yield "rotation-number", "schema.type", of_layer(rotation=1)
    yield "eigenvalues-none", "schema.type", of_layer(eigenvalues=None)
    yield "eigenvalues-some", "layers.eigenvalues", of_layer(eigenvalues=...)
    for label, block in {
        "text": "x",
        "unknown": {"who": "me"},
        "tokens-text": {"tokens": "1"},
        "tokens-bool": {"tokens": True},
        "tokens-negative": {"tokens": -1},
        "id-text": {"generation_id": "xyz"},
        "nested": {"tokens": {"a": 1}},
        "v3-key": {"steps": 3},
    }.items():
        yield f"calibration-{label}", "schema.calibration", of(top(calibration=block))
    yield "mixed-width", "layers.shape", rotation_bytes_of_widths()
    matrix = Tensor("0", (8, 8))
    yield "identity", "identity", of(top(format_version="identity-v1", objective="identity-k"))
    yield "latent", "mla_latent", of({"rotation": matrix, "transform": {"latent": True}})
    yield "latent-bare", "mla_latent", of(Tensor("0", (512, 512)))
    yield "bare", "schema.foreign", of(matrix)
    yield "no-field", "schema.foreign", of({"weight": matrix})
    yield "codebooks", "pq_codebooks", of({"codebooks": matrix, "n_sub": 4})
    data = of({"format_version": 2, "layers": {0: {"M_q": matrix, "count": 5}}})
    yield "moments", "moments", data


def rotation_bytes_of_widths() -> bytes:
    wide = Tensor("2", (4, 4))
    records = [r for r in good_records() if not str(r.name).endswith(("data/2", "data/3"))]
    records += [Record("archive/data/2", b"\0" * 64), Record("archive/data/3", b"\0" * 16)]
    changed = layer(1, rotation=wide, eigenvalues=Tensor("3", (4,)))
    records[0].content = b"\x80\x02" + op(top(layers={0: layer(0), 1: changed})) + b"."
    return archive(records)


def _versions() -> Iterator[Case]:
    """Formats 2 and 3: contradictions between version, rank, grouping and companions."""
    yield "v2-rank-2", "tensor.shape", of(top(format_version=2, source_grouping="per_kv_head"))
    yield "v2-layer", "schema.grouping", of(top(format_version=2))
    data = of(top(format_version=2, source_grouping="per_kv_head", objective="hadamard"))
    yield "v2-hadamard", "schema.objective", data
    yield "v3-bare", "schema.missing", of(top(format_version=3, objective="wush_k"))
    key = {"key": "wush", "centered": False, "orthogonal": True}

    def v3(transform: Any, objective: str = "wush_k") -> bytes:
        return of(top(format_version=3, objective=objective, transform=transform))

    yield "v3-transform-text", "schema.transform", v3("wush")
    yield "v3-both", "schema.transform", v3({**key, "value": "wush"})
    yield "v3-neither", "schema.transform", v3({"orthogonal": True})
    yield "v3-orthogonal-1", "schema.transform", v3({**key, "orthogonal": 1})
    yield "v3-name", "schema.transform", v3({**key, "key": "<script>"})
    yield "v3-unknown", "schema.unknown_key", v3({**key, "more": 1})
    yield "v3-no-centered", "schema.missing", v3({"key": "wush", "orthogonal": True})
    data = v3({"value": "w", "centered": True, "orthogonal": True}, "wush_v")
    yield "v3-value-centered", "schema.unknown_key", data
    yield "v3-objective", "schema.objective", v3(key, "WUSH")
    yield "v3-contradiction", "schema.objective", v3(key, "wush_v")
    yield "v3-no-partner", "schema.missing", v3({**key, "orthogonal": False})
    yield "v3-no-mean", "schema.missing", v3({**key, "centered": True})
    extra = Tensor("4", (8, 8))
    layers = {0: layer(0, q_rotation=extra), 1: layer(1)}
    data = of(top(format_version=3, objective="wush_k", transform=key, layers=layers))
    yield "v3-partner-unasked", "schema.unknown_key", data
    wrong = {i: layer(i, o_rotation=extra) for i in tiny.LAYERS}
    yield (
        "v3-wrong-partner",
        "schema.missing",
        of(
            top(
                format_version=3,
                objective="wush_k",
                transform={**key, "orthogonal": False},
                layers=wrong,
            )
        ),
    )


def _numbers() -> Iterator[Case]:
    good = tiny.rotation_set()
    matrix, values = good.layers[-1].forward, good.layers[-1].eigenvalues
    assert values is not None
    one = np.float32

    def changed(**arrays: Any) -> bytes:
        found = {
            name: np.ascontiguousarray(array, dtype=np.float32) for name, array in arrays.items()
        }
        return rotation_bytes(tiny.change(good, **found))

    for label, value in {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}.items():
        poisoned = matrix.copy()
        poisoned[3, 4] = value
        yield f"matrix-{label}", "not_finite", changed(forward=poisoned)
        data = changed(eigenvalues=np.append(values[:-1], one(value)))
        yield f"eigenvalue-{label}", "not_finite", data
    bf16 = (matrix.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    yield "bf16", "not_orthogonal", changed(forward=bf16)
    yield "fp16", "not_orthogonal", changed(forward=matrix.astype(np.float16))
    yield "scaled", "not_orthogonal", changed(forward=matrix * one(1.001))
    yield "huge", "not_orthogonal", changed(forward=matrix * one(1e38))
    yield "zero", "not_orthogonal", changed(forward=matrix * one(0))
    yield "descending", "eigenvalues.order", changed(eigenvalues=values[::-1])
    yield "all-zero", "eigenvalues.sign", changed(eigenvalues=values * one(0))
    yield "negative", "eigenvalues.sign", changed(eigenvalues=np.append(one(-1), values[1:]))
    yield "all-ones", "eigenvalues.all_ones", changed(eigenvalues=np.ones(8))
    data = rotation_bytes(tiny.change(tiny.hadamard_set(), eigenvalues=values))
    yield "hadamard-eigenvalues", "eigenvalues.all_ones", data
    yield "identity-matrix", "content.identity", changed(forward=np.eye(8))
    yield "permutation", "content.permutation", changed(forward=np.eye(8)[::-1])
    yield "signed-permutation", "content.permutation", changed(forward=-np.eye(8)[::-1])
    data = changed(forward=tiny.hadamard_set().layers[0].forward)
    yield "plain-hadamard", "content.hadamard", data
    data = rotation_bytes(tiny.change(tiny.hadamard_set(), forward=matrix))
    yield "not-hadamard", "content.not_hadamard", data
    yield "equal-layers", "content.equal_layers", changed(forward=good.layers[0].forward)
    partnered = tiny.partnered_set()
    partner = partnered.layers[-1].partner.copy()
    data = rotation_bytes(tiny.change(partnered, partner=partner * one(1.0001)))
    yield "partner", "not_inverse", data
    mean = np.full((2, 8), np.nan, dtype=np.float32)
    yield "mean-nan", "not_finite", rotation_bytes(tiny.change(partnered, mean=mean))


def main() -> None:
    rows = []
    for name, expected, data in (*corpus(), ("shared-record", "Verified", shared_record())):
        said, asked = os.pipe()
        child = os.fork()
        if child == 0:
            _verify(data, asked)
        os.close(asked)
        _, status = os.waitpid(child, 0)
        told = os.read(said, 4096)
        os.close(said)
        dead = [f"exit status {os.waitstatus_to_exitcode(status)}", 0, 0]
        rows.append([name, expected, *(json.loads(told) if told else dead)])
    json.dump(rows, sys.stdout)


def _verify(data: bytes, answer: int) -> NoReturn:
    """In a fork with little memory and time: the code, CPU seconds and peak KiB."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        signal.alarm(60)
        began = time.process_time()
        code = code_of(verify_files({"k_rotation.pt": data}))
        seconds = time.process_time() - began
        # ru_maxrss would include the process that started this one
        status = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        os.write(answer, json.dumps([code, seconds, peak]).encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
