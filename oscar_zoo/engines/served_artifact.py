"""The artifact that a server serves, two rotation sets, their digest and their recipe, read from a
folder, from the local store, or from two files. Needs no torch.

Files are read once, by the library's own strict reader, and the bytes that are hashed are the bytes
that are parsed. A folder must hold exactly one K and one V file of the same fit, because nobody can
know which of several candidates was meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from oscar_kernels.spec import CLIP_ALGORITHM, MIXED_QUANTIZER, QUANTIZER
from oscar_zoo.artifact import artifact_folder
from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest, read_file
from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.manifest import FILE_NAME, SUFFIX, WIDTHS_NAME, Manifest
from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.setting_flags import CodeBits
from oscar_zoo.engines.settings import ArtifactSource, RecipeValues
from oscar_zoo.errors import (
    ArtifactNotFound,
    DigestMismatchError,
    GeometryMismatch,
    MalformedFile,
    PathNotFound,
    UsageError,
)
from oscar_zoo.registry.catalog import recipe_for
from oscar_zoo.registry.store import Store, find_installed

_File: TypeAlias = tuple[RotationSet, FileDigest]


@dataclass(frozen=True)
class ServedArtifact:
    k: RotationSet  # both: rotations of keys and of values; the same object for latents
    v: RotationSet
    digest: str  # artifact digest, `sha256:<hex>`
    manifest: Manifest | None  # the `oscar.json` beside the files, or `None`
    where: str  # folder or name, for messages
    names: Mapping[Role, str]  # file names of both sides
    # Digest of the files that were read, where they are a copy with other bytes.
    copy_digest: str | None = None

    def copy_of(self, digest: str) -> ServedArtifact:
        return replace(self, digest=digest, copy_digest=self.digest)

    @property
    def told(self) -> str:
        if self.copy_digest is None:
            return self.digest
        return f"{self.digest}, read from a verified copy ({self.copy_digest})"

    @property
    def latent(self) -> bool:
        """Whether it is for latents (MLA), which are keys and values at once."""
        return self.v is self.k

    @property
    def num_kv_heads(self) -> int | None:
        """KV heads of the model that the artifact was made for; `None` if neither the manifest nor
        per-head matrices tell."""
        if self.manifest is not None:
            return self.manifest.model.num_kv_heads
        return self.k.num_kv_heads or self.v.num_kv_heads

    @property
    def recipe(self) -> RecipeValues | None:
        return None if self.manifest is None else recipe_values(self.manifest.recipe)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where a server differs from the recipe without a change of meaning."""
        if self.manifest is not None and self.manifest.recipe.scale_dtype != "float16":
            stored = self.manifest.recipe.scale_dtype
            return (f"the recipe has scales in {stored}: 16 bit (float16) are used.",)
        return ()

    def check_geometry(
        self,
        *,
        layer_ids: tuple[int, ...],
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        latent: bool = False,
    ) -> None:
        kinds = {False: "keys and values of heads", True: "latents (MLA)"}
        if self.latent != latent:
            raise GeometryMismatch(
                f"the artifact {self.where} is for {kinds[self.latent]}, and this model caches"
                f" {kinds[latent]}.",
                hint="use the artifact of this model: oscar-zoo list",
            )
        seen: dict[str, tuple[Any, Any]] = {
            "layers with full attention": (len(self.k.layers), len(layer_ids)),
            "KV heads": (self.k.num_kv_heads or num_kv_heads, num_kv_heads),
            "KV heads of V": (self.v.num_kv_heads or num_kv_heads, num_kv_heads),
            "head_dim": (self.k.head_dim, head_dim),
            "v_head_dim": (self.v.head_dim, v_head_dim),
        }
        if self.manifest is not None:
            seen["KV heads of the manifest"] = (self.manifest.model.num_kv_heads, num_kv_heads)
        seen["full-attention layers"] = self.k.layer_ids, layer_ids
        for what, (made_for, has) in seen.items():
            if made_for != has:
                raise GeometryMismatch(
                    f"the artifact {self.where} was made for {_said(made_for)} {what}, this model"
                    f" has {_said(has)}.",
                    hint="use the artifact of this model: oscar-zoo list",
                )


def _said(value: int | tuple[int, ...]) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def recipe_values(recipe: ServingRecipe) -> RecipeValues:
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


def load(
    source: ArtifactSource, expected_digest: str | None = None, *, model: str | None = None
) -> ServedArtifact:
    """Read the artifact that `source` names. `expected_digest` may have `sha256:`; `model`, name or
    folder of the served model, selects the artifact in a folder of several."""
    if source.files is not None:
        k_path, v_path = map(Path, source.files)
        loaded = _pair(_read(k_path), _read(v_path), None, str(k_path.parent))
    elif source.folder is not None:
        folder = Path(source.folder)
        loaded = _from_folder(folder if model is None else _of_model(folder, model))
    else:
        loaded = _from_store(source.artifact or "")
    want = None if expected_digest is None else "sha256:" + expected_digest.removeprefix("sha256:")
    if want is not None and loaded.digest != want:
        raise DigestMismatchError.for_content(
            f"the artifact {loaded.where}",
            want=want.removeprefix("sha256:"),
            got=loaded.digest.removeprefix("sha256:"),
        )
    return loaded


def digest_to_read(source: ArtifactSource, verified: Any) -> str:
    """The digest of what a server will read. Raises where its bytes are no more those that were
    `verified`, which has a `digest` and `files`."""
    served = load(source)
    if served.digest != verified.digest:
        names = served.names.values()
        load(source, artifact_digest([one for one in verified.files if one.path in names]))
    return served.digest


def _read(path: Path) -> _File:
    return _parse(path.name, read_file(path))


def _parse(name: str, data: bytes) -> _File:
    return read_rotation(data, what=name), file_digest(name, data)


def _role(file: _File) -> Role | None:
    """The side of a file, by its objective, else by the beginning of its name."""
    by_name: dict[str, Role] = {"k_": "k", "v_": "v"}
    return file[0].declared_role or by_name.get(file[1].path[:2].lower())


def _of_model(folder: Path, model: str) -> Path:
    """The artifact of `model` in `folder`, or `folder` itself if it has rotation files, readable or
    not. A model that the zoo knows is looked up by its own name."""
    if any(folder.glob(f"*{SUFFIX}")):
        return folder
    recipe = recipe_for(artifact_folder.hub_id(model))
    return artifact_folder.artifact_of_model(folder, model if recipe is None else recipe.hf_id)


def _from_folder(folder: Path) -> ServedArtifact:
    if not folder.is_dir():
        raise PathNotFound.for_path(folder, "folder of rotations")
    path = folder / FILE_NAME
    if path.exists():
        manifest = Manifest.from_bytes(read_file(path), what=str(path))
        files = {name: read_file(folder / name) for name in _rotation_names(manifest, str(folder))}
        return _with_manifest(manifest, files, str(folder))
    if (folder / WIDTHS_NAME).exists():
        raise MalformedFile(
            "widths.no_manifest",
            f"{folder} has {WIDTHS_NAME} and no {FILE_NAME}, whose recipe has these bits.",
            hint="fetch the artifact again",
        )
    return _without_manifest(
        [_read(path) for path in sorted(folder.glob(f"*{SUFFIX}"))], str(folder)
    )


def _from_store(name: str) -> ServedArtifact:
    store = Store()
    record = find_installed(Reference.parse(name), store)
    if record is None:
        raise ArtifactNotFound(f"{name} is not in the local store.", hint=f"oscar-zoo pull {name}")
    stored = store.open(record.digest, record.id)
    if stored.manifest is not None:
        return _with_manifest(stored.manifest, stored.payload, str(record.id))
    return _without_manifest(
        [_parse(*item) for item in stored.payload.items() if item[0].endswith(".pt")], name
    )


def _rotation_names(manifest: Manifest, where: str) -> tuple[str, ...]:
    latents = manifest.file("latent_rotation")
    if manifest.kind == "mla_latent" and latents is not None:
        return (latents.path,)
    k, v = manifest.file("k_rotation"), manifest.file("v_rotation")
    if k is None or v is None:
        raise UsageError(f"{where} holds a {manifest.kind}, which has no rotation pair.")
    return k.path, v.path


def _with_manifest(manifest: Manifest, files: Mapping[str, bytes], where: str) -> ServedArtifact:
    read = [_parse(name, files[name]) for name in _rotation_names(manifest, where)]
    listed = {entry.path: entry.sha256 for entry in manifest.files}
    for _, entry in read:
        want = listed[entry.path]
        if want is not None and want != entry.sha256:
            raise DigestMismatchError.for_content(
                f"{where}/{entry.path}", want=want, got=entry.sha256
            )
    if len(read) == 2:
        return _pair(read[0], read[1], manifest, where)
    return _of_latents(read[0], manifest, where)


LATENTS = "latent_rotation.pt"
"""The file of latents in a folder without a manifest, which `oscar-zoo serve` writes."""


def _of_latents(file: _File, manifest: Manifest | None, where: str) -> ServedArtifact:
    latents, entry = file
    digest = manifest.digest if manifest is not None else None
    return ServedArtifact(
        latents, latents, digest or artifact_digest((entry,)), manifest, where, {"k": entry.path}
    )


def _without_manifest(files: Sequence[_File], where: str) -> ServedArtifact:
    if [entry.path for _, entry in files] == [LATENTS]:
        return _of_latents(files[0], None, where)
    sides: dict[str, _File] = {}
    for role in ("k", "v"):
        mine = [file for file in files if _role(file) == role]
        if not mine:
            raise PathNotFound.for_path(f"{where}/*.pt", f"{role.upper()} rotation file")
        if len(mine) > 1:
            names = ", ".join(entry.path for _, entry in mine)
            raise UsageError(
                f"{where} holds several {role.upper()} files: {names}.",
                hint="keep one K and one V file",
            )
        sides[role] = mine[0]
    return _pair(sides["k"], sides["v"], None, where)


def _pair(k_file: _File, v_file: _File, manifest: Manifest | None, where: str) -> ServedArtifact:
    (k, k_entry), (v, v_entry) = k_file, v_file
    for (rotations, entry), role in ((k_file, "k"), (v_file, "v")):
        if rotations.declared_role not in (None, role):
            raise UsageError(
                f"{where}/{entry.path} is not a {role.upper()} file: {rotations.objective}."
            )
    if k.layer_ids != v.layer_ids:
        raise UsageError(
            f"{k_entry.path} and {v_entry.path} in {where} are not of one fit: their layers differ."
        )
    digest = artifact_digest((k_entry, v_entry))
    if manifest is not None and manifest.digest is not None:
        digest = manifest.digest
    return ServedArtifact(k, v, digest, manifest, where, {"k": k_entry.path, "v": v_entry.path})
