"""A small model with multi-head latent attention (MLA) that SGLang runs on a CPU, an artifact for
its latents, and a server of them in one process, with the cache of the study in `contrib/mla`."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import simulate
import tiny_model
import torch
from cache_oracle import general_set
from latent_cache import LatentCache, geometry
from reference_server import ReferenceServer
from tiny_artifacts import cache_shape, manifest, write_folder
from tiny_model import RANK, ROPE
from torch import Tensor

from oscar_zoo.artifact.files import artifact_digest, file_digest
from oscar_zoo.artifact.formats import LayerTransform, RotationSet
from oscar_zoo.artifact.manifest import FILE_NAME, OF_LATENTS
from oscar_zoo.artifact.specs import Clip, Windows
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.compute.methods import feedback
from oscar_zoo.evaluate.simulated_cache import SimulatedLayer
from oscar_zoo.models.attention import AttentionFn, Softmax, attention_scope
from oscar_zoo.models.loading import LoadedModel

LAYERS, GROUP = 4, RANK // 2
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 512,
}  # fmt: skip
"""On a CPU SGLang has no other rotary embedding for such models."""
NAME = "latent_rotation_wush.pt"


def new_model(**changes: Any) -> Any:
    """Random latent attention that depends on single rows, and all else from the example."""
    model = tiny_model.new_model(
        tiny_model.load_teacher(),
        rope_parameters=YARN,
        tie_word_embeddings=False,  # SGLang reads a head of its own
        moe_layer_freq=1,  # as in the files of DeepSeek
        **changes,
    )
    for layer in model.model.layers:
        (layer.self_attn.q_b_proj if changes else layer.self_attn.q_proj).weight.data *= 20
        layer.self_attn.kv_b_proj.weight.data *= 3
    return model.eval()


def transforms(*, carried: bool) -> tuple[RotationSet, list[simulate.Fit]]:
    """Transforms that are not orthogonal, with feedback if `carried`; and what the study takes."""
    layers, fits = [], []
    for one in general_set("v", LAYERS, 1, RANK, seed=0).layers:
        forward, partner = (torch.from_numpy(x[0]).double() for x in (one.forward, one.partner))
        draw = torch.Generator().manual_seed(one.layer_id)
        spread = torch.randn(RANK, RANK, generator=draw, dtype=torch.float64)
        fits.append((forward, partner, (spread @ spread.mT)[None]))
        weights = feedback.matrices(partner[None], fits[-1][2])
        above = weights[:, *np.triu_indices(RANK, 1)].float().numpy() if carried else None
        layers.append(LayerTransform(one.layer_id, one.forward, one.partner, feedback=above))
    made = RotationSet(3, "qqt_wush", "kv_head", "wush", False, False, tuple(layers), {})
    return made, fits


def write_artifact(folder: Path, *, carried: bool) -> Path:
    data = rotation_bytes(transforms(carried=carried)[0])
    shape = cache_shape(LAYERS, heads=4, kv_heads=1, dim=RANK)
    pair = manifest({"k.pt": data, "v.pt": data}, geometry=shape)
    digest = file_digest(NAME, data)
    own = {"path": NAME, "role": "latent_rotation"}
    own |= {"size": digest.size, "sha256": digest.sha256}
    entry = pair.files[0].model_copy(update=own)
    needs = ("per_head", "k_partner", *["k_feedback"] * carried, "latent")
    recipe = {"clip": Clip(k=0.0, v=0.0), "group_size": GROUP, "requires": needs}
    changes = {
        "schema_": OF_LATENTS,
        "kind": "mla_latent",
        "model": pair.model.model_copy(update={"rotary_key": ROPE}),
        "format_version": 3,
        "files": (entry,),
        "digest": artifact_digest([digest]),
        "recipe": pair.recipe.model_copy(update=recipe),
    }
    made = pair.model_copy(update=changes)
    return write_folder(folder, {NAME: data, FILE_NAME: made.to_bytes()})


class LatentServer(ReferenceServer):
    """Greedy generation with the cache of the study. Its rows are in float32, as those of a server
    on a CPU."""

    def __init__(self, model: Any, windows: Windows, chunk: int, *, carried: bool) -> None:
        shape, device = geometry(model), torch.device("cpu")
        one = torch.eye(ROPE, dtype=torch.float64)
        rotary = simulate.rotary((one, one, one), 16)
        fits = dict(enumerate(transforms(carried=carried)[1]))
        parts = {i: (simulate.latent(fit, GROUP, carry=carried), rotary) for i, fit in fits.items()}
        spec: Any = LatentCache(parts, windows)
        self.model = LoadedModel(model, None, shape, "float32")
        self.spec, self.chunk = spec, chunk
        self.sink, self.recent = windows.sink, windows.recent
        self.layers = {i: SimulatedLayer(spec, shape, i, device) for i in parts}

    def scope(self, attention: AttentionFn) -> AbstractContextManager[None]:
        def rows(layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
            return attention(layer, query, key, key, softmax)

        return attention_scope(self.model, rows)
