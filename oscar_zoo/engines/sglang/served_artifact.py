"""The artifact that a server serves: two rotation sets, their digest and their recipe. Needs no
torch. `artifact_reading` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from oscar_kernels.spec import CLIP_ALGORITHM, MIXED_QUANTIZER, QUANTIZER
from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.sglang.layer_values import CodeBits
from oscar_zoo.engines.sglang.settings import RecipeValues
from oscar_zoo.errors import GeometryMismatch, UsageError


@dataclass(frozen=True)
class ServedArtifact:
    """The artifact of one server.

    Attributes:
        k, v: rotations of keys and of values.
        digest: artifact digest, `sha256:<hex>`.
        manifest: the `oscar.json` beside the files, or `None`.
        where: folder or name, for messages.
        names: file names of both sides.
        copy_digest: digest of the files that were read, where they are a copy with other bytes.
    """

    k: RotationSet
    v: RotationSet
    digest: str
    manifest: Manifest | None
    where: str
    names: Mapping[Role, str]
    copy_digest: str | None = None

    def copy_of(self, digest: str) -> ServedArtifact:
        """The artifact `digest`, of which these files are a copy."""
        return replace(self, digest=digest, copy_digest=self.digest)

    @property
    def told(self) -> str:
        """What the log calls the artifact."""
        if self.copy_digest is None:
            return self.digest
        return f"{self.digest}, read from a verified copy ({self.copy_digest})"

    @property
    def num_kv_heads(self) -> int | None:
        """KV heads of the model that the artifact was made for; `None` if neither the manifest nor
        per-head matrices tell."""
        if self.manifest is not None:
            return self.manifest.model.num_kv_heads
        return self.k.num_kv_heads or self.v.num_kv_heads

    @property
    def recipe(self) -> RecipeValues:
        """Settings of the artifact's recipe; all `None` without a manifest."""
        return RecipeValues() if self.manifest is None else recipe_values(self.manifest.recipe)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where a server differs from the recipe without a change of meaning."""
        if self.manifest is not None and self.manifest.recipe.scale_dtype != "float16":
            return (
                (
                    f"the recipe has scales in {self.manifest.recipe.scale_dtype}: 16 bit (float16)"
                    " are used."
                ),
            )
        return ()

    def check_geometry(
        self, *, layer_ids: tuple[int, ...], num_kv_heads: int, head_dim: int, v_head_dim: int
    ) -> None:
        """Refuse a model that this artifact was not made for.

        Args:
            layer_ids: the full-attention layers of the model, all of which it must cover.
        """
        seen = {
            "full-attention layers": (len(self.k.layers), len(layer_ids)),
            "KV heads": (self.k.num_kv_heads or num_kv_heads, num_kv_heads),
            "KV heads of V": (self.v.num_kv_heads or num_kv_heads, num_kv_heads),
            "head_dim": (self.k.head_dim, head_dim),
            "v_head_dim": (self.v.head_dim, v_head_dim),
        }
        if self.manifest is not None:
            seen["KV heads of the manifest"] = (self.manifest.model.num_kv_heads, num_kv_heads)
        for what, (made_for, has) in seen.items():
            if made_for != has:
                raise GeometryMismatch(
                    f"the artifact {self.where} was made for {made_for} {what}, this model has"
                    f" {has}.",
                    hint="use the artifact of this model: oscar-zoo list",
                )
        if self.k.layer_ids != layer_ids:
            raise GeometryMismatch(
                f"the artifact {self.where} covers layers {_said(self.k.layer_ids)}, this model has"
                f" full attention in layers {_said(layer_ids)}.",
                hint="use the artifact of this model: oscar-zoo list",
            )


def _said(layer_ids: Sequence[int]) -> str:
    return ", ".join(map(str, layer_ids))


def recipe_values(recipe: ServingRecipe) -> RecipeValues:
    """The values of a recipe that this runtime can follow."""
    clip, widths, known = recipe.clip, recipe.widths, (QUANTIZER, MIXED_QUANTIZER)
    if recipe.quantizer not in known or clip.algorithm not in ("none", CLIP_ALGORITHM):
        raise UsageError(
            f"the recipe asks for quantizer {recipe.quantizer} with clip {clip.algorithm}.",
            hint=f"this server has {' and '.join(known)} with {CLIP_ALGORITHM}",
        )
    unclipped = clip.algorithm == "none"
    return RecipeValues(
        sink=recipe.windows.sink,
        recent=recipe.windows.recent,
        bits=CodeBits() if widths is None else CodeBits(widths.k.bits, widths.v.bits),
        k_clip=widths.k.clip if widths else (0.0 if unclipped else clip.k,),
        v_clip=widths.v.clip if widths else (0.0 if unclipped else clip.v,),
        group_size=recipe.group_size,
    )
