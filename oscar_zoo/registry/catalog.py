"""What is shipped with the package: model recipes and manifests, looked up by any name people use,
digests of rotation files that somebody has seen in public, and public keys that are known.

Lookups ignore case. `None` means the catalog does not know the name; a name it knows always means
one model. A hub cannot offer other bytes than those that were seen without an error.
"""

from __future__ import annotations

import base64
import difflib
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from oscar_zoo.artifact.files import FileDigest, artifact_digest
from oscar_zoo.artifact.manifest import FILE_NAME, MAX_PARTS, Manifest
from oscar_zoo.artifact.names import ArtifactId, check_digest, check_part
from oscar_zoo.artifact.specs import Digest, Document, Hex40, Spec, Text
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.recipe import ModelRecipe, load_recipe

SCHEMA_NAME = "manifest.schema.json"


class Catalog:
    """Recipes and manifests by name."""

    def __init__(
        self,
        recipes: Iterable[ModelRecipe],
        manifests: Iterable[Manifest] = (),
        seen: Iterable[KnownDigest] = (),
    ) -> None:
        self._recipes = tuple(sorted(recipes, key=lambda recipe: recipe.name.casefold()))
        self._manifests = {manifest.artifact_id.key: manifest for manifest in manifests}
        self._seen = {known.artifact_id.key: known for known in seen}
        self._by_name: dict[str, ModelRecipe] = {}
        for recipe in self._recipes:
            for name in recipe.names:
                other = self._by_name.setdefault(name.casefold(), recipe)
                if other is not recipe:
                    raise ValueError(f"{name} names both {other.name} and {recipe.name}")
        bare: dict[str, list[ModelRecipe]] = {}
        for name, recipe in self._by_name.items():
            owners = bare.setdefault(name.rsplit("/", 1)[-1], [])
            owners += [] if recipe in owners else [recipe]
        # An organisation may be dropped only where that leaves one model.
        alone = {name: owners[0] for name, owners in bare.items() if len(owners) == 1}
        self._by_name = alone | self._by_name

    @classmethod
    @cache
    def packaged(cls) -> Catalog:
        recipes = (
            load_recipe(entry.read_text("utf-8"), what=entry.name)
            for entry in resources.files("oscar_zoo.recipes").iterdir()
            if entry.name.endswith(".toml")
        )
        manifests = (
            Manifest.from_bytes(entry.read_bytes(), what=entry.name, registry=True)
            for entry in _json_files(resources.files("oscar_zoo.manifests"))
            if entry.name not in (SCHEMA_NAME, DIGESTS_NAME, KEYS_NAME)
        )
        return cls(recipes, manifests, packaged_digests().artifacts)

    def recipe(self, name: str) -> ModelRecipe | None:
        return self._by_name.get(name.casefold())

    def recipes(self) -> tuple[ModelRecipe, ...]:
        return self._recipes

    def families(self) -> tuple[str, ...]:
        return tuple(sorted({recipe.family for recipe in self._recipes}, key=str.casefold))

    def of_family(self, name: str) -> tuple[ModelRecipe, ...]:
        """The recipes of the family `name`, or of all whose name begins so, by name."""
        wanted = name.casefold()
        known = {family.casefold(): family for family in self.families()}
        begun = {key for key in known if wanted and key.startswith(wanted)}
        meant = {wanted} & known.keys() or begun
        if not meant:
            close = [known[key] for key in _alike(wanted, known)][:3]
            raise UsageError(
                f"no family of models is called {name!r}.",
                suggestions=close,
                hint=None if close else f"the families are {', '.join(known.values())}",
            )
        return tuple(recipe for recipe in self._recipes if recipe.family.casefold() in meant)

    def manifest(self, artifact: ArtifactId) -> Manifest | None:
        return self._manifests.get(artifact.key)

    def seen(self, artifact: ArtifactId) -> KnownDigest | None:
        return self._seen.get(artifact.key)

    def manifests(self, model: str | None = None) -> tuple[Manifest, ...]:
        found = sorted(self._manifests.values(), key=lambda manifest: manifest.id)
        wanted = None if model is None else model.casefold()
        return tuple(x for x in found if wanted in (None, x.artifact_id.model.casefold()))

    def aliased(self, name: str) -> tuple[ArtifactId, ...]:
        return tuple(
            manifest.artifact_id
            for manifest in self.manifests()
            if manifest.registry
            and name.casefold() in {alias.casefold() for alias in manifest.registry.aliases}
        )

    def kin(self, name: str) -> ModelRecipe | None:
        """The recipe of a model on a hub most like `name`, of those with its first word."""
        word = re.split("[^a-z]", name.casefold())[0]
        begun = {
            r.name: r for r in self._recipes if r.on_hub and r.name.casefold().startswith(word)
        }
        alike = (*self.close_matches(name), *begun)
        return next((begun[one] for one in alike if one in begun and len(word) > 1), None)

    def close_matches(self, name: str, more: Iterable[str] = ()) -> tuple[str, ...]:
        """Model names like `name`, best first; `more` adds names a hub knows.

        Names that begin with it come first, then names that contain it, names with all its words,
        names all of whose words it has, and names that begin with similar letters."""
        names = (*(recipe.name for recipe in self._recipes), *more)
        spelled = {one.casefold(): one for one in names}
        wanted = name.rsplit("/", 1)[-1].casefold()
        return tuple(spelled[key] for key in _alike(wanted, spelled)[:3])


_LIKE = 0.75
"""Of letters in common with the beginning of a name; `-7B-Instruct` is half of many names."""


def _alike(wanted: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that are like `wanted`, best first: by the share of letters in common, and
    by more the closer one is to the same text."""
    typed = re.sub("[^a-z0-9]", "", wanted)

    def likeness(name: str) -> float:
        asked, has = set(wanted.split("-")), set(name.split("-"))
        closer = [name.startswith(wanted), wanted in name, asked <= has, has <= asked, True]
        steps = 4 - closer.index(True) if wanted else 0
        begins = re.sub("[^a-z0-9]", "", name)[: len(typed)]
        near = steps or difflib.SequenceMatcher(None, typed, begins).ratio() >= _LIKE
        return near and steps + difflib.SequenceMatcher(None, wanted, name).ratio()

    return sorted(filter(likeness, names), key=lambda name: (likeness(name), name), reverse=True)


def recipe_for(model: str) -> ModelRecipe | None:
    return Catalog.packaged().recipe(model)


def can_be_found(model: str) -> bool:
    """Whether a hub has the model of a name or id, as far as the zoo knows."""
    recipe = recipe_for(model)
    return model.count("/") == 1 if recipe is None else recipe.on_hub


def _json_files(folder: Traversable) -> Iterator[Traversable]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _json_files(entry)
        elif entry.name.endswith(".json"):
            yield entry


DIGESTS_NAME: Final = "known_digests.json"
"""Name of the file in the package `oscar_zoo.manifests`."""
_AGAIN: Final = "install oscar-zoo again"


def _of_a_payload(file: FileDigest) -> FileDigest:
    if file.path.count("/") >= MAX_PARTS or file.path.casefold() == FILE_NAME:
        raise ValueError(f"{file.path!r} is no path of a payload file")
    for part in file.path.split("/"):
        check_part(part, "file name")  # raises a ValueError, as validators do
    check_digest(f"sha256:{file.sha256}")
    if not 1 <= file.size < 1 << 40:
        raise ValueError(f"{file.path} has {file.size} bytes")
    return file


PayloadFile = Annotated[FileDigest, AfterValidator(_of_a_payload)]


class Payload(Spec):
    """One artifact by its payload, which is without `oscar.json`."""

    id: Text
    digest: Digest
    files: Annotated[tuple[PayloadFile, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _of_its_files(self) -> Self:
        ArtifactId.parse(self.id)
        if (digest := artifact_digest(self.files)) != self.digest:
            raise ValueError(f"the digest of {self.id} is {digest}")
        return self

    @property
    def artifact_id(self) -> ArtifactId:
        return ArtifactId.parse(self.id)


class Seen(Spec):
    """Where files were seen; `remark` is what a person should know, such as a tag that is not the
    authors'."""

    repository: Text
    branch: Text
    commit: Hex40
    path: Text
    remark: Text | None = None


class KnownDigest(Payload):
    seen: Seen


class KnownDigests(Document):
    """All of them, sorted by id without case, which is unique."""

    NAME, CODE, REMEDY = DIGESTS_NAME, "known_digests", _AGAIN
    schema_: Literal["oscar-zoo.known-digests/1"] = Field(alias="schema")
    artifacts: tuple[KnownDigest, ...]

    @model_validator(mode="after")
    def _sorted(self) -> Self:
        keys = [known.artifact_id.key for known in self.artifacts]
        if keys != sorted(set(keys)):
            raise ValueError("artifacts must be sorted by id and unique without case")
        return self


@cache
def packaged_digests() -> KnownDigests:
    data = (resources.files("oscar_zoo.manifests") / DIGESTS_NAME).read_bytes()
    return KnownDigests.from_bytes(data)


KEYS_NAME: Final = "trusted_keys.json"
"""Name of the file in the package `oscar_zoo.manifests`."""
TIME_FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"
Moment = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]


class PublicKey(Spec):
    """A public key, DER in base64, and until when it counts, RFC 3339 UTC."""

    key: Text
    expires: Moment | None = None

    @model_validator(mode="after")
    def _readable(self) -> Self:
        self.public, self.until  # noqa: B018  (they raise a ValueError, as validators do)
        return self

    @property
    def public(self) -> bytes:
        return base64.b64decode(self.key, validate=True)

    @property
    def until(self) -> datetime:
        time = datetime.strptime(self.expires, TIME_FORMAT) if self.expires else datetime.max
        return time.replace(tzinfo=UTC)


class TrustedKey(PublicKey):
    owner: Text


class TrustedKeys(Document):
    NAME, CODE, REMEDY = KEYS_NAME, "trusted_keys", _AGAIN
    schema_: Literal["oscar-zoo.trusted-keys/1"] = Field(alias="schema")
    keys: tuple[TrustedKey, ...]


@cache
def packaged_keys() -> TrustedKeys:
    return TrustedKeys.from_bytes((resources.files("oscar_zoo.manifests") / KEYS_NAME).read_bytes())
