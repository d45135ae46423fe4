"""What a text means where a verb takes a path, a name or a model, and what may be computed where
nobody has published it. Text is parsed here, once.

How a text is written decides what it is, never what happens to lie in the current folder; see
`artifact.names.is_path`. A file or folder with the name of an artifact is mentioned in a note or in
the error, so that nobody wonders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote

from oscar_zoo import errors
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import (
    Reference,
    cached_model,
    check_part,
    check_utf8,
    is_path,
    path_text,
    safe_part,
)
from oscar_zoo.next_step import Compute, SuggestedPath
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs import table
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.known_names import aliased
from oscar_zoo.registry.params import PullParams, command_line, option_words
from oscar_zoo.registry.recipe import ModelRecipe


@dataclass(frozen=True)
class ModelChoice:
    """A model to load: `source` is a folder or a hub id, as the loaders take it; `model_id`,
    recorded in manifests, the recipe's hub id, else the hub id or the folder's name; `name` the
    first part of artifact ids."""

    source: str
    model_id: str
    name: str
    recipe: ModelRecipe | None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_part(self.name, "model name")

    @property
    def on_no_hub(self) -> bool:
        recipe = self.recipe
        return recipe is not None and not recipe.on_hub and self.source == recipe.hf_id

    def is_called(self, name: str) -> bool:
        """Whether `name`, with or without an organisation, means a model of this name."""
        recipe = Catalog.packaged().recipe(name)
        wanted = recipe.name if recipe else name.rpartition("/")[2]
        return self.name.casefold() == wanted.casefold()

    def check_can_be_had(self, again: str) -> None:
        if self.on_no_hub:
            raise errors.UsageError(
                f"the checkpoint of {self.name} is on no hub.", hint=f"give its folder: {again}"
            )


def choose_model(model: str | Path) -> ModelChoice:
    """What `model` means. A `Path`, or a text written as a path, is a folder. Otherwise a name of
    the zoo wins. An id such as `Qwen/Qwen3-8B` means a folder of that name with a `config.json`, as
    it does for transformers and SGLang. A name that the zoo does not know may mean a folder too, or
    one version that has it as an alias."""
    if isinstance(model, Path) or is_path(model):
        return _model_in_folder(Path(model).expanduser())
    choice, path = _model_called(model), Path(model)
    if choice is None and holds_model(path):
        return _model_in_folder(path)
    if choice is None and (version := aliased(model)) is not None:
        recipe = Catalog.packaged().recipe(version.model)
        choice = None if recipe is None else _model_called(recipe.name)
    if choice is not None:
        return choice
    if os.path.isfile(model):  # noqa: PTH113 (any text: no errors)
        return _model_in_folder(path)  # which says that it is none
    close = Catalog.packaged().close_matches(model)
    error = errors.PathNotFound(f"no model is called {model!r}.", suggestions=close)
    if os.path.isdir(model):  # noqa: PTH112 (any text: no errors)
        error.advise(f"did you mean the folder {path_text(path)}, which has no config.json?")
    elif not close:
        error.advise("give a folder, an id such as Qwen/Qwen3-8B, or a name of: oscar-zoo list")
    raise error


def _model_called(name: str) -> ModelChoice | None:
    """The model that `name` alone means: of the zoo, or an id on a hub or of a folder here."""
    recipe, path = Catalog.packaged().recipe(name), Path(name)
    hub_id = recipe.hf_id if recipe else name
    if hub_id.count("/") == 1 and holds_model(Path(hub_id)):
        choice = _model_in_folder(Path(hub_id), recipe)
        note = f"{hub_id} is the folder {choice.source} here, not the model of that id on a hub"
        return replace(choice, notes=(note,))
    if recipe is not None:
        notes = (_namesake_note(path),) if holds_model(path) else ()
        return ModelChoice(recipe.hf_id, recipe.hf_id, recipe.name, recipe, notes)
    if name.count("/") == 1 and not os.path.isfile(path):  # noqa: PTH113 (any text: no errors)
        return ModelChoice(name, name, name.rpartition("/")[2], None)
    return None


def _model_in_folder(path: Path, recipe: ModelRecipe | None = None) -> ModelChoice:
    """The model in `path`, by default with what the zoo knows of the folder's name."""
    from oscar_zoo.models.config_file import check_folder

    check_folder(path)
    # written as a path, or a loader could take it for the id of a model on a hub
    source = path_text(path)
    check_utf8(path.absolute(), "the path of a model, for the libraries that load it,")
    cached = cached_model(path.resolve())
    model_id = cached[0] if cached else safe_part(path.resolve().name)
    recipe = recipe or Catalog.packaged().recipe(model_id)
    if recipe is None:
        return ModelChoice(source, model_id, safe_part(model_id.rpartition("/")[2]), None)
    return ModelChoice(source, recipe.hf_id, recipe.name, recipe)


def recorded_model(model_id: str) -> ModelChoice:
    """The model of a manifest or moments file. No folder is looked at: its name means nothing on
    another machine."""
    recipe = Catalog.packaged().recipe(model_id)
    name = recipe.name if recipe else safe_part(model_id.rpartition("/")[2])
    return ModelChoice(model_id, model_id, name, recipe)


def holds_model(path: Path) -> bool:
    return os.path.isfile(path / "config.json")  # noqa: PTH113 (any text: no errors)


def refusal(path: Path, error: errors.OscarZooError) -> errors.OscarZooError:
    """The `error` for what is at `path`, or a better one where that is a model in GGUF."""
    from oscar_zoo.models.config_file import gguf_refusal

    return gguf_refusal(path) or error


def _namesake_note(place: Path) -> str:
    kind = "folder" if place.is_dir() else "file"
    return f"{place} is taken as a name; the {kind} of that name is {quote(path_text(place))}"


def check_made_for(choice: ModelChoice, manifest: Manifest | None) -> None:
    """Refuse the artifact of a folder's name that was computed for another model of that name.
    Names that the zoo knows mean one model everywhere."""
    made_for = manifest.model.config_sha256 if manifest else None
    if manifest is None or made_for is None or choice.recipe is not None:
        return
    folder = Path(choice.source)
    if made_for != sha256_hex((folder / "config.json").read_bytes()):
        raise errors.UsageError(
            f"{manifest.id} was made for another model than {folder}: config.json differs.",
            hint="give the folder a name of its own",
        )


def check_model_id(text: str) -> None:
    parts = text.split("/")
    if len(parts) > 2:
        raise errors.InvalidName(
            f"{text[:120]!r} is not a model id.", hint="ids look like Qwen/Qwen3-8B"
        )
    for part in parts:
        check_part(part, "model id")


class _Written:
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class PathTarget(_Written):
    """A file, an artifact folder or a tree of them; nothing needs to be there yet."""

    text: str
    path: Path
    choice = None
    """The model that the text alone means: none."""


@dataclass(frozen=True)
class ModelTarget(_Written):
    """A folder that holds a model and is no artifact. It stands for the artifact of its name."""

    text: str
    choice: ModelChoice

    @property
    def path(self) -> Path:
        return Path(self.choice.source)

    @property
    def reference(self) -> Reference:
        return Reference(self.choice.name)


@dataclass(frozen=True)
class NameTarget(_Written):
    """The name of an artifact; `namesake` is a file or folder of the current folder that has the
    same name."""

    text: str
    reference: Reference
    namesake: Path | None = None

    @cached_property
    def choice(self) -> ModelChoice | None:
        return _model_called(self.reference.name)

    @property
    def model_namesake(self) -> Path | None:
        """`namesake`, if it is a folder that holds a model and is no artifact."""
        return self.namesake if self.namesake and _is_model_folder(self.namesake) else None


Target = PathTarget | ModelTarget | NameTarget


def parse(text: str | Path) -> Target:
    if isinstance(text, Path) or is_path(text):
        path = Path(text).expanduser()
        if _is_model_folder(path):
            return ModelTarget(str(text), _model_in_folder(path))
        return PathTarget(str(text), path)
    namesake = Path(text) if os.path.lexists(text) else None
    try:
        return NameTarget(text, Reference.parse(text), namesake)
    except errors.InvalidName:
        if namesake is not None:
            error: errors.OscarZooError = errors.ArtifactNotFound.for_name(text)
            suggest_path(namesake, error)
        elif table.kind_of(text) is not None:
            hint = "a hub is given with --hub; what it has: oscar-zoo list --hub " + quote(text)
            error = errors.InvalidName(f"{text} is a hub, and this takes a name.", hint=hint)
        else:
            raise
        raise error from None


def parse_named(text: str | Path) -> ModelTarget | NameTarget:
    target = parse(text)
    if isinstance(target, PathTarget):
        raise _takes_a_name(target)
    return target


def parse_name(text: str) -> NameTarget:
    target = parse(text)
    if not isinstance(target, NameTarget):
        raise _takes_a_name(target)
    return target


def parse_model(model: str | Path, observer: Observer) -> ModelChoice:
    """`choose_model`, with a note where something else has that name."""
    choice = choose_model(model)
    for text in choice.notes:
        observer.note(Note("model.namesake", text, {"model": choice.source}))
    return choice


def parse_given_model(
    model: str | Path | None, observer: Observer, *, again: str
) -> ModelChoice | None:
    if model is None:
        return None
    choice = parse_model(model, observer)
    choice.check_can_be_had(again)
    return choice


def suggest_path(place: Path, error: errors.OscarZooError) -> None:
    """Let `error` ask whether `place` was meant."""
    kind = "folder" if place.is_dir() else "file"
    error.advise()
    error.suggestions = (SuggestedPath(path_text(place), kind),)


def _takes_a_name(target: PathTarget | ModelTarget) -> errors.OscarZooError:
    """The error for a path in the place of a name, with a command that takes this path."""
    from oscar_zoo.artifact.artifact_folder import find_artifacts

    text = f"{target} is a path; this takes a name."
    if isinstance(target, ModelTarget):
        hint = f"oscar-zoo compute {quote(target.text)} makes a rotation for this model"
        if target.choice.recipe is not None:
            hint = f"the name of this model: {target.choice.name}"
        return errors.UsageError(text, hint=hint)
    if not os.path.lexists(target.path):
        hint = "check the path, or give a name: oscar-zoo list"
        return errors.PathNotFound(f"no such file or folder: {target}", hint=hint)
    here = f"it is here already: oscar-zoo verify {quote(target.text)}"
    error: errors.OscarZooError = errors.UsageError(text, hint=here)
    if find_artifacts(target.path):
        return error
    if target.path.is_dir():
        hint = "name another folder, or an artifact: oscar-zoo list"
        error = errors.PathNotFound(
            f"no model (config.json) and no rotations in {target}.", hint=hint
        )
    return refusal(target.path, error)


def _is_model_folder(path: Path) -> bool:
    """Whether `path` holds a model and is no artifact itself; what lies deeper changes nothing."""
    from oscar_zoo.artifact.artifact_folder import is_artifact

    return holds_model(path) and not (path / FILE_NAME).exists() and not is_artifact(path)


_NO_HUB = (errors.PathNotFound, errors.RepositoryNotFound, errors.RevisionNotFound)
"""Errors of a hub that is not there: another name would not be found on it either."""


@contextmanager
def looking_up(target: Target, observer: Observer) -> Iterator[None]:
    """While `target` is looked up: mention its namesake, in the error or in a note."""
    place = target.namesake if isinstance(target, NameTarget) else None
    try:
        yield
    except (errors.NotFoundError, errors.NetworkError, errors.InvalidName) as error:
        mention_namesake(place, error, observer)
        raise
    mention_namesake(place, None, observer)


def mention_namesake(
    place: Path | None, error: errors.OscarZooError | None, observer: Observer
) -> None:
    """Let `error` ask whether the file or folder `place` was meant, unless the hub itself is
    missing; without one the observer hears a note."""
    if place is None or isinstance(error, _NO_HUB):
        return
    if error is not None:
        suggest_path(place, error)
    else:
        observer.note(Note("target.namesake", _namesake_note(place), {"path": str(place)}))


@dataclass(frozen=True)
class ComputeWish:
    """What a caller wants when nobody has published an artifact: to compute one, or else to `ask`
    the observer. For a server, a model that `serve` refuses is an error."""

    compute: bool = False
    ask: bool = False
    calib_data: str | None = None
    device: str | None = None
    revision: str | None = None
    offline: bool = False
    to_serve: bool = False

    def may_compute(self, error: errors.OscarZooError) -> bool:
        return self.compute or (
            self.ask and isinstance(error, errors.ArtifactNotFound | errors.OfflineError)
        )

    def check(self) -> None:
        if self.calib_data and not self.compute:
            hint = "add --compute, or leave it out"
            raise errors.UsageError("--calib-data goes with --compute.", hint=hint)


def computing(choice: ModelChoice, sources: Sources, *, offline: bool = False) -> Compute:
    """The next step where nothing is computed: an artifact under the name that is looked for."""
    words = option_words(PullParams(hubs=sources.named, compute=True, offline=offline))
    return Compute(choice.name, command_line(["pull", choice.source, *words]))


def model_to_compute(
    target: ModelTarget | NameTarget, error: errors.OscarZooError, model: ModelChoice | None = None
) -> ModelChoice | None:
    """The model from which an artifact for `target` can be made, after a search gave `error`;
    `model` is where its weights are, if the caller said so. `None` when the error says something
    else, or the target names one version."""
    reference = target.reference
    if not isinstance(error, errors.ArtifactNotFound | errors.NetworkError):
        return None
    if reference.tag is not None or reference.digest is not None:
        return None
    model = model or target.choice
    return model if model is not None and model.is_called(reference.name) else None


def tell_of_folder(target: ModelTarget | NameTarget, error: errors.OscarZooError) -> None:
    """Let the `error` of a search begin with what the folder is, and suggest nothing."""
    if not isinstance(target, ModelTarget):
        return
    if isinstance(error, errors.NetworkError) and error.said is not None:
        why = f" on this machine, and not every hub could be asked ({error.said.rstrip('.')})."
    elif isinstance(error, errors.OfflineError):
        why = " on this machine, and offline mode asks no hub."
    elif isinstance(error, errors.ArtifactNotFound):
        why = " known."
    else:
        return
    error.message = f"{target} is a model; no rotation for it is{why}"
    error.args = (error.message,)
    error.advise()


def propose_computing(
    choice: ModelChoice, error: errors.OscarZooError, again: Callable[..., str]
) -> None:
    """Let the `error` of a search name computing as the next step, where that may be meant. `again`
    gives the command line that means the same, with other options."""
    from oscar_zoo.models.config_file import unread_weights
    from oscar_zoo.models.model_hub import is_here

    here, place = is_here(choice.source), Path(choice.source)
    slash = choice.recipe is None and "/" in choice.source and not is_path(choice.source)
    first = Path(choice.source.partition("/")[0])
    # a path without `./`: it exists, or the folder that it begins with does, and no such model
    if slash and (os.path.lexists(choice.source) or (first.is_dir() and not here)):
        if not os.path.lexists(place):
            error.advise(f"a path begins with ./, and nothing is at {path_text(place)}")
    elif refused := unread_weights(choice.source):
        error.advise(str(refused.hint))
    elif here or not isinstance(error, errors.NetworkError):
        online = {} if here else {"offline": False}  # the model has to be fetched
        error.next_step = Compute(choice.name, again(compute=True, **online))
        if slash and not (here or error.suggestions or error.advice):
            error.advice = f"a folder would be written {path_text(place)}"
