"""Which file is K and which is V, whether the two belong together, and whether they fit a model.

Content decides a role before any label does, because a file name proves nothing. One file name that
disagrees is a warning. Two files that contradict their labels, or one that contradicts its
manifest, are swapped and refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oscar_zoo.artifact.checks import Finding, data_free
from oscar_zoo.artifact.formats import HESSIANS, Role, RotationSet
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.outcome import reject
from oscar_zoo.artifact.specs import Geometry

_NAME_ROLE = re.compile(r"(?:.*/)?([kv])[_-].*", re.IGNORECASE)
_NAME_HESSIAN = re.compile(r"_(ktk|qqt|vtv|sst|oo)_")
_WORD = {"k": "keys", "v": "values"}


@dataclass(frozen=True)
class PairSide:
    """One rotation file; `label` is the role that the manifest gives it, else the role that its
    name begins with."""

    path: str
    rotations: RotationSet
    label: Role | None


def role_of_name(path: str) -> Role | None:
    """`k` for `k_rotation...`, `v` for `v_rotation...`, else `None`."""
    match = _NAME_ROLE.fullmatch(path)
    if match is None:
        return None
    return "k" if match[1].lower() == "k" else "v"


def assign(sides: Sequence[PairSide]) -> dict[Role, PairSide]:
    """Give each of one or two files a role: by content, else by label, else by what is left."""
    claims = [side.rotations.declared_role or side.label for side in sides]
    if len(sides) == 1:
        return {claims[0] or "k": sides[0]}
    if claims[0] == claims[1]:
        # Content says the same of both or of neither: the labels decide, and `roles` judges the
        # contradiction.
        claims = [side.label for side in sides]
    swapped = (claims[0] == "v" and claims[1] != "v") or (claims[0] is None and claims[1] == "k")
    k, v = reversed(sides) if swapped else sides
    return {"k": k, "v": v}


def roles(sides: Mapping[Role, PairSide], manifest: Manifest | None, *, strict: bool) -> Finding:
    """K is K, V is V, and both come from one fit. `strict` refuses what is only a warning for an
    imported artifact."""
    _refuse_contradictions(sides, manifest)
    _refuse_different_fits(sides, manifest)
    warnings = _name_warnings(sides)
    if strict and warnings:
        message = "a file name says another role or matrix than the file: rename it"
        reject(warnings[0], message)
    if len(sides) == 2 and not _proven(sides["k"].rotations, sides["v"].rotations):
        tokens = {side.rotations.calibration.get("tokens") for side in sides.values()}
        warnings.append("pair.tokens" if len(tokens) > 1 else "pair.unproven")
    words = [f"{role.upper()} is {side.rotations.objective}" for role, side in sides.items()]
    bare = [side.path for side in sides.values() if "latent_rotation" in side.path]
    if bare if manifest is None else manifest.kind == "mla_latent":
        words = [f"latents, keys and values at once, are {sides['k'].rotations.objective}"]
    return Finding(", ".join(words), tuple(warnings))


def _refuse_contradictions(sides: Mapping[Role, PairSide], manifest: Manifest | None) -> None:
    claims = [side.rotations.declared_role for side in sides.values()]
    if len(sides) == 2 and claims[0] == claims[1]:
        if claims[0] is not None:
            objectives = " and ".join(side.rotations.objective for side in sides.values())
            message = f"both files say they are for {_WORD[claims[0]]}: {objectives}"
            reject("same_role", message)
        if len({side.label for side in sides.values()}) == 1:
            message = "nothing tells which of the two files is for keys and which for values"
            reject("same_role", message)
    # Two files that each carry the other's label are a swap; with a manifest one false label is
    # enough.
    wrong = {
        side.label: side
        for role, side in sides.items()
        if side.label not in (None, role) and side.rotations.declared_role is not None
    }
    if wrong and (manifest is not None or len(wrong) == 2):
        label: Role = "k" if "k" in wrong else "v"
        side = wrong[label]
        objective = side.rotations.objective
        message = f"labelled {_WORD[label]}, but its objective {objective} is of the other side"
        reject("k-is-v" if label == "k" else "v-is-k", message, path=side.path)


def _refuse_different_fits(sides: Mapping[Role, PairSide], manifest: Manifest | None) -> None:
    blocks = [side.rotations.calibration for side in sides.values()]
    ids = {block["generation_id"] for block in blocks if "generation_id" in block}
    if manifest is not None and manifest.fit.fit_id is not None and ids:
        ids.add(manifest.fit.fit_id)
    if len(ids) > 1:
        message = "K, V and manifest do not come from one fit: their fit ids differ"
        reject("pair.fit_id", message)
    if len(sides) < 2:
        return
    k, v = sides["k"].rotations, sides["v"].rotations
    prompts = {block["prompt_sha256"] for block in blocks if block.get("prompt_sha256")}
    same_grouping = k.grouping == v.grouping
    differences = {
        "pair.layers": ("layers", k.layer_ids != v.layer_ids),
        "pair.version": ("format versions", k.format_version != v.format_version),
        "pair.kv_heads": ("KV heads", k.num_kv_heads != v.num_kv_heads and same_grouping),
        "pair.grouping": ("groupings", not same_grouping and k.format_version < 3),
        "pair.prompts": ("calibration prompts", len(prompts) > 1),
    }
    for code, (words, differ) in differences.items():
        if differ:
            reject(code, f"K and V are no pair: their {words} differ")


def _name_warnings(sides: Mapping[Role, PairSide]) -> list[str]:
    warnings = []
    for role, side in sides.items():
        hessian = _NAME_HESSIAN.search(side.path)
        objective = side.rotations.objective.partition("_")[0]
        if side.label not in (None, role):
            warnings.append("role.label")
        elif side.label is None and side.rotations.declared_role is None:
            warnings.append("role.unknown")
        if hessian and objective in HESSIANS and hessian[1] != objective:
            warnings.append("role.file_name")
    return warnings


def _proven(k: RotationSet, v: RotationSet) -> bool:
    """Whether both come from one fit; ids of fits that are there are equal."""
    one_fit = "generation_id" in k.calibration and "generation_id" in v.calibration
    return one_fit or (data_free(k) and data_free(v))


def model(
    sides: Mapping[Role, PairSide], geometry: Geometry | None, manifest: Manifest | None
) -> Finding:
    """Matrix sizes and heads are those of the model."""
    if geometry is None:
        ids = next(iter(sides.values())).rotations.layer_ids
        if _without_gaps(ids):
            return Finding("not checked: the model is not known", checked=False)
        detail = f"the model is not known: cover of layers not checked (layers {_shown(ids)})"
        return Finding(f"not checked: {detail}", ("layers.not_checked",), checked=False)
    if manifest is not None and (difference := manifest.model.geometry.difference(geometry)):
        reject("model.geometry", f"the manifest is for another model: {difference}")
    for side, width in zip((sides.get("k"), sides.get("v")), geometry.head_dims, strict=True):
        if side is None:
            continue
        has, heads = side.rotations.head_dim, side.rotations.num_kv_heads
        if has != width:
            message = f"matrices of {has} channels, the model's heads have {width}"
            reject("model.head_dim", message, path=side.path)
        if heads not in (None, geometry.num_kv_heads):
            message = f"{heads} KV heads, the model has {geometry.num_kv_heads}"
            reject("model.num_kv_heads", message, path=side.path)
    layers = len(geometry.attention_layers)
    rows = f"head_dim {geometry.head_dim}"
    if geometry.rotary_key:
        rows = f"latents of {geometry.head_dim} channels and rotary keys of {geometry.rotary_key}"
    detail = f"{layers} attention layers of {geometry.num_layers}, {rows}"
    return Finding(detail)


def check_layers(side: PairSide, geometry: Geometry | None, *, strict: bool) -> None:
    """The layers are exactly the model's attention layers. Without a model nothing is known about
    them: `strict` then demands 0 .. L-1, and `model` reports the others."""
    ids = side.rotations.layer_ids
    if geometry is None:
        if strict and not _without_gaps(ids):
            message = f"its layers are {_shown(ids)}: name the model to check against its layers"
            reject("layers.gaps", message, path=side.path)
        return
    layers = {*geometry.attention_layers}
    if missing := sorted(layers - {*ids}):
        message = f"attention layer {missing[0]} is missing ({len(missing)} in all)"
        reject("layers.missing", message, path=side.path)
    if extra := sorted({*ids} - layers):
        message = f"layer {extra[0]} is no attention layer ({len(extra)} in all)"
        reject("layers.extra", message, path=side.path)


def _without_gaps(ids: tuple[int, ...]) -> bool:
    return ids == tuple(range(len(ids)))


def _shown(ids: tuple[int, ...]) -> str:
    first = ", ".join(map(str, ids[:3]))
    return f"{first} .. {ids[-1]}" if len(ids) > 4 else ", ".join(map(str, ids))
