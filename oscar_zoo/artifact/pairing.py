"""Which file is K and which is V, whether the two belong together, and whether they fit a model.

Content decides a role before any label does, because a file name proves nothing. One file name that
disagrees is a warning. Two files that contradict their labels, or one that contradicts its
manifest, are swapped and refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oscar_zoo.artifact.checks import CheckFinding, Problem, data_free
from oscar_zoo.artifact.formats import HESSIANS, Role, RotationSet
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.specs import Geometry

_NAME_ROLE = re.compile(r"(?:.*/)?([kv])[_-].*", re.IGNORECASE)
_NAME_HESSIAN = re.compile(r"_(ktk|qqt|vtv|sst|oo)_")


@dataclass(frozen=True)
class PairSide:
    """One rotation file.

    Attributes:
        path: relative POSIX path.
        rotations: its content.
        label: role the manifest gives it, else the role its name begins with, else `None`.
    """

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
    roles: list[Role | None] = [side.rotations.declared_role or side.label for side in sides]
    if len(sides) == 2 and roles[0] == roles[1]:
        # Content says the same of both or of neither: the labels decide, and `roles` below judges
        # the contradiction.
        roles = [side.label for side in sides]
    if len(sides) == 2 and (roles[0] is None or roles[0] == roles[1]):
        roles[0] = "v" if roles[1] == "k" and roles[0] is None else "k"
    if len(sides) == 2:
        roles[1] = "v" if roles[0] == "k" else "k"
    return {
        role or "k": side
        for role, side in sorted(zip(roles, sides, strict=True), key=lambda pair: pair[0] or "k")
    }


def roles(
    sides: Mapping[Role, PairSide], manifest: Manifest | None, *, strict: bool
) -> CheckFinding | Problem:
    """K is K, V is V, and both come from one fit. `strict` refuses what is only a warning for an
    imported artifact."""
    problem = _contradiction(sides, manifest) or _different_fits(sides, manifest)
    if problem:
        return problem
    warnings = _name_warnings(sides)
    if strict and warnings:
        return Problem(
            warnings[0], "a file name says another role or matrix than the file: rename it"
        )
    if len(sides) == 2:
        warnings += _unproven(sides)
    words = [f"{role.upper()} is {side.rotations.objective}" for role, side in sides.items()]
    return CheckFinding(", ".join(words), "warning" if warnings else "ok", tuple(warnings))


def model(
    sides: Mapping[Role, PairSide], geometry: Geometry | None, manifest: Manifest | None
) -> CheckFinding | Problem:
    """Matrix sizes and heads are those of the model."""
    if geometry is None:
        return _without_model(next(iter(sides.values())))
    if manifest is not None and (difference := manifest.model.geometry.difference(geometry)):
        return Problem("model.geometry", f"the manifest is for another model: {difference}")
    for role, side in sides.items():
        rotations, width = side.rotations, geometry.head_dim if role == "k" else geometry.v_head_dim
        if rotations.head_dim != width:
            heads = f"the model's {role.upper()} heads have {width}"
            message = f"matrices of {rotations.head_dim} channels, {heads}"
            return Problem("model.head_dim", message, path=side.path)
        if rotations.num_kv_heads not in (None, geometry.num_kv_heads):
            message = f"{rotations.num_kv_heads} KV heads, the model has {geometry.num_kv_heads}"
            return Problem("model.num_kv_heads", message, path=side.path)
    layers = len(geometry.attention_layers)
    return CheckFinding(
        f"{layers} attention layers of {geometry.num_layers}, head_dim {geometry.head_dim}"
    )


def layer_set(side: PairSide, geometry: Geometry | None, *, strict: bool) -> Problem | None:
    """The layers are exactly the model's attention layers. Without a model nothing is known about
    them: `strict` then demands 0 .. L-1, and `model` reports the others."""
    ids = side.rotations.layer_ids
    if geometry is None:
        if not strict or _without_gaps(ids):
            return None
        message = f"its layers are {_shown(ids)}: name the model to check against its layers"
        return Problem("layers.gaps", message, path=side.path)
    layers = {*geometry.attention_layers}
    if missing := sorted(layers - {*ids}):
        message = f"attention layer {missing[0]} is missing ({len(missing)} in all)"
        return Problem("layers.missing", message, side.path)
    if extra := sorted({*ids} - layers):
        message = f"layer {extra[0]} is no attention layer ({len(extra)} in all)"
        return Problem("layers.extra", message, side.path)
    return None


def _without_model(side: PairSide) -> CheckFinding:
    """The finding when no model is known; gaps in the layer numbers may be a hybrid model's."""
    ids = side.rotations.layer_ids
    if _without_gaps(ids):
        return CheckFinding("not checked: the model is not known", "not checked")
    detail = f"the model is not known: cover of layers not checked (layers {_shown(ids)})"
    return CheckFinding(f"not checked: {detail}", "not checked", ("layers.not_checked",))


def _without_gaps(ids: tuple[int, ...]) -> bool:
    return ids == tuple(range(len(ids)))


def _shown(ids: tuple[int, ...]) -> str:
    return (
        f"{', '.join(map(str, ids[:3]))} .. {ids[-1]}" if len(ids) > 4 else ", ".join(map(str, ids))
    )


def _contradiction(sides: Mapping[Role, PairSide], manifest: Manifest | None) -> Problem | None:
    claims = {role: side.rotations.declared_role for role, side in sides.items()}
    if len(sides) == 2 and claims["k"] is not None and claims["k"] == claims["v"]:
        objectives = " and ".join(side.rotations.objective for side in sides.values())
        return Problem(
            "same_role", f"both files say they are for {_WORD[claims['k']]}: {objectives}"
        )
    labels = {side.label for side in sides.values()}
    if len(sides) == 2 and claims["k"] is None and claims["v"] is None and len(labels) == 1:
        return Problem(
            "same_role", "nothing tells which of the two files is for keys and which for values"
        )
    # Two files that each carry the other's label are a swap; with a manifest one false label is
    # enough.
    wrong = [side for role, side in sides.items() if side.label not in (None, role)]
    wrong = sorted(
        (side for side in wrong if side.rotations.declared_role is not None),
        key=lambda side: str(side.label),
    )
    if wrong and (manifest is not None or len(wrong) == 2):
        label = wrong[0].label or "k"
        code = "k-is-v" if label == "k" else "v-is-k"
        message = (
            f"labelled {_WORD[label]}, but its objective {wrong[0].rotations.objective} is of the"
            " other side"
        )
        return Problem(code, message, path=wrong[0].path)
    return None


def _different_fits(sides: Mapping[Role, PairSide], manifest: Manifest | None) -> Problem | None:
    blocks = [side.rotations.calibration for side in sides.values()]
    ids = {block["generation_id"] for block in blocks if "generation_id" in block}
    if manifest is not None and manifest.fit.fit_id is not None and ids:
        ids.add(manifest.fit.fit_id)
    if len(ids) > 1:
        return Problem(
            "pair.fit_id", "K, V and manifest do not come from one fit: their fit ids differ"
        )
    if len(sides) < 2:
        return None
    k, v = sides["k"].rotations, sides["v"].rotations
    prompts = {block["prompt_sha256"] for block in blocks if block.get("prompt_sha256")}
    differences = (
        ("pair.layers", "their layers", k.layer_ids != v.layer_ids),
        ("pair.version", "their format versions", k.format_version != v.format_version),
        (
            "pair.kv_heads",
            "their KV heads",
            k.num_kv_heads != v.num_kv_heads and k.grouping == v.grouping,
        ),
        ("pair.grouping", "their groupings", k.grouping != v.grouping and k.format_version < 3),
        ("pair.prompts", "their calibration prompts", len(prompts) > 1),
    )
    for code, words, differ in differences:
        if differ:
            return Problem(code, f"K and V are no pair: {words} differ")
    return None


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


def _unproven(sides: Mapping[Role, PairSide]) -> list[str]:
    k, v = sides["k"].rotations, sides["v"].rotations
    proven = (
        "generation_id" in k.calibration and "generation_id" in v.calibration
    )  # `_different_fits`: they are equal
    if proven or (data_free(k) and data_free(v)):
        return []
    return (
        ["pair.tokens"]
        if k.calibration.get("tokens") != v.calibration.get("tokens")
        else ["pair.unproven"]
    )


_WORD = {"k": "keys", "v": "values"}
