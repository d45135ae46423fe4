"""What the verbs of the zoo take. Imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from oscar_zoo.registry.hubs.table import FORMS
from oscar_zoo.registry.params import ASKED_HUBS, CREATE_PR, OFFLINE, WRITTEN_HUBS
from oscar_zoo.verb import Arg, Opt

Sort = Literal["name", "score", "gpqa", "perplexity", "recall", "size"]
SORTS: tuple[str, ...] = get_args(Sort)
FILTERS = ("model", "tag", "family", "method", "format", "bits", "status", "state")


Version = Annotated[str, Arg("Exactly one version.", "NAME:TAG", complete="versions")]
NameOrFolder = Annotated[
    str | Path, Arg("A name or the folder of an artifact.", "NAME|DIR", complete="names_or_paths")
]
Offline = Annotated[bool, OFFLINE]
TASK = Opt(
    "A benchmark, or the beginning of its name; perplexity; recall.", "NAME", complete="tasks"
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which hubs are asked."""

    offline: Offline = False
    hubs: Annotated[str | tuple[str, ...] | None, ASKED_HUBS] = None


@dataclass(frozen=True, kw_only=True)
class ListParams(Asked):
    """Show the artifacts that can be had, and what is installed.

    With words, only what has every one of them is shown, as by oscar-zoo search. Hubs that do not
    answer are named; what this package knows of them is shown all the same. With --hub only what
    those hubs have is shown; it counts as installed when the local store has the same bytes.

    \b
    Examples:
      oscar-zoo list
      oscar-zoo list qwen 8b
      oscar-zoo list --for Qwen/Qwen3-8B
      oscar-zoo list --family Qwen3.5
      oscar-zoo list qwen --sort score --task gpqa
      oscar-zoo list --sort gpqa --filter family='Qwen3*'
      oscar-zoo list --hub file:/srv/zoo --json
    """

    words: Annotated[
        str | tuple[str, ...],
        Arg("A text, or several, which are taken apart at spaces.", "[WORD]...", complete="names"),
    ] = ()
    installed: Annotated[bool, Opt("Only artifacts in the local store.")] = False
    model: Annotated[
        str | None,
        Opt(
            "Only artifacts whose rotations have this model's name.",
            "MODEL",
            flag="--for",
            complete="names",
        ),
    ] = None
    family: Annotated[
        str | None,
        Opt(
            "Only models of this family; the beginning of its name is enough.",
            "NAME",
            complete="families",
        ),
    ] = None
    filters: Annotated[
        tuple[str, ...],
        Opt(
            "Only artifacts that fit, such as method=wush or family='Qwen3*'. Can be repeated."
            f" Keys: {', '.join(FILTERS)}.",
            "KEY=PATTERN",
            flag="--filter",
        ),
    ] = ()
    sort: Annotated[
        Sort,
        Opt(
            "Best first: the score with INT2 in --task, the highest GPQA or recall, the smallest"
            " change of perplexity or size. Unknown values come last.",
            shown=True,
        ),
    ] = "name"
    task: Annotated[str | None, replace(TASK, help=f"{TASK.help} [default: gpqa]")] = None


@dataclass(frozen=True)
class SearchParams(Asked):
    """Find artifacts, and models without one, that have every word.

    Words are looked for in names, aliases, families, methods, tasks of scores, status and digests;
    case does not matter. A word such as 7b or 0.6b is the size of a model; mla and latents find
    those that cache latents.

    \b
    Examples:
      oscar-zoo search qwen3 wush
      oscar-zoo search gemma
      oscar-zoo search qwen 8b
      oscar-zoo search gpqa_diamond --hub hf:my-org/zoo --json
    """

    words: Annotated[
        str | tuple[str, ...],
        Arg("A text, or several, which are taken apart at spaces.", "WORD...", complete="names"),
    ]


@dataclass(frozen=True)
class LeaderboardParams(Asked):
    """Rank artifacts by a score with an INT2 cache, beside BF16.

    Every line says who reports the score. What this tool measured is taken before what others say.
    A difference is shown only where both caches answered the same questions. Perplexity is ranked
    by its change over BF16.

    \b
    Examples:
      oscar-zoo leaderboard
      oscar-zoo leaderboard --task perplexity --measured
      oscar-zoo leaderboard --hub hf:my-org/zoo --json
    """

    task: Annotated[str, replace(TASK, shown=True)] = "gpqa"
    _: KW_ONLY
    measured: Annotated[bool, Opt("Only what oscar-zoo itself measured.")] = False


@dataclass(frozen=True)
class CompareParams(Asked):
    """Put two artifacts side by side: how good they are, what they take, how they were made.

    A star marks what differs. Scores come with their errors and are not subtracted from each other,
    since they may be of different questions.

    \b
    Examples:
      oscar-zoo compare Qwen3-8B Qwen3-32B
      oscar-zoo compare Qwen3-8B ./rotation
      oscar-zoo compare ./one ./two --json
    """

    first: NameOrFolder
    second: NameOrFolder


@dataclass(frozen=True)
class CardParams(Asked):
    """Write the card of one artifact, or of a hub: metadata that hubs read, with scores, and a
    section with quality, commands, calibration, licence and citation.

    Only what stands between two markers is replaced, in the metadata and in the text, as publish
    does. A key of the metadata that the owner has is not written. With --output, the report that
    compute left beside the folder is copied to the card and shown in it.

    \b
    Examples:
      oscar-zoo card ./rotation --output ./rotation/README.md
      oscar-zoo card Qwen3-8B
      oscar-zoo card --hub hf:my-org/zoo --output README.md
    """

    target: Annotated[
        str | Path | None,
        Arg(
            "A name, the folder of an artifact or of a hub; without one, the card is of the one hub"
            " that is named.",
            "[NAME|DIR]",
            complete="names_or_paths",
        ),
    ] = None
    _: KW_ONLY
    output: Annotated[
        Path | None,
        Opt("File to write, such as README.md. What others wrote into it stays.", "FILE"),
    ] = None


@dataclass(frozen=True)
class InfoParams(Asked):
    """Show what is known about a model, or one of its artifacts.

    A folder with a rotation is described by its oscar.json and the scores beside it, and its files
    are verified. A model that is not in the zoo is given by its folder, or by its id where its
    config.json was fetched before. What works for its architecture is shown then.

    What weights and cache take, and how many tokens fit on GPUs, are estimates.

    \b
    Examples:
      oscar-zoo info Qwen3-8B
      oscar-zoo info Qwen3-8B --gpu-memory 24GiB
      oscar-zoo info Qwen3-8B:seq20000_prompt83_group128 --json
      oscar-zoo info ./my-rotation
      oscar-zoo info ./my-model
    """

    name: Annotated[
        str, Arg("A model, an artifact or a folder.", "NAME[:TAG]|DIR", complete="names_or_paths")
    ]
    _: KW_ONLY
    gpu_memory: Annotated[
        int | None,
        Opt(
            "Say what fits on a GPU of this size or name, such as 24GiB or 4090.",
            "SIZE",
            flag="--gpu-memory --gpu",
            read="oscar_zoo.serving.sizes:gpu_bytes",
        ),
    ] = None


@dataclass(frozen=True)
class ScoresParams(Asked):
    """Show what was measured first, then what others and upstream report, with earlier values.

    A folder that begins with ./, ../, / or ~ shows the scores beside its rotation. The word show
    may be left out.

    \b
    Examples:
      oscar-zoo scores show Qwen3-8B
      oscar-zoo scores show Qwen3-8B --hub hf:my-org/zoo --json
      oscar-zoo scores show ./my-rotation
    """

    name: Annotated[
        str | Path, Arg("A model, an artifact or a folder.", "NAME[:TAG]|DIR", complete="names")
    ]


@dataclass(frozen=True, kw_only=True)
class WritingParams:
    """To which hubs something is written, and how."""

    create_pr: Annotated[bool, CREATE_PR] = False
    hubs: Annotated[tuple[str, ...], WRITTEN_HUBS] = ()


@dataclass(frozen=True)
class AddScoresParams(WritingParams):
    """Attach the records of a score file to a version of a hub.

    FILE is what oscar-zoo eval writes, and must be about exactly these bytes. Only the hub's index
    and card change. What was measured with the most tokens or answers stands, else the
    latest value, and its history keeps the others.

    \b
    Examples:
      oscar-zoo scores add Qwen3-8B:seq20000_prompt83_group128 gpqa.json
      oscar-zoo scores add Qwen3-8B@sha256:3f9a12b4c5d6 gpqa.json --hub hf:my-org/zoo
      oscar-zoo scores add Qwen3-8B:seq512_prompt2_group128 gpqa.json --create-pr
    """

    name: Version
    file: Annotated[Path, Arg("A score file.", "FILE")]


@dataclass(frozen=True)
class UnyankParams(WritingParams):
    """Offer a version again that was yanked or deprecated.

    \b
    Examples:
      oscar-zoo unyank Qwen3-8B:seq512_prompt2_group128
      oscar-zoo unyank Qwen3-8B:seq512_prompt2_group128 --hub hf:my-org/zoo
    """

    name: Version


@dataclass(frozen=True)
class YankParams(WritingParams):
    """Withdraw a version that must not be used.

    It is no longer found by name. Its bytes stay: who names its digest, or has locked it, still
    gets them, with the reason as a warning. Only the hub's index changes.

    \b
    Examples:
      oscar-zoo yank Qwen3-8B:seq512_prompt2_group128 --reason "calibrated on the test set"
      oscar-zoo yank Qwen3-8B@sha256:3f9a12b4c5d6 --reason "wrong layers" --hub hf:my-org/zoo
    """

    name: Version
    _: KW_ONLY
    reason: Annotated[str, Opt("Why; told to everybody who asks for it.", "TEXT")]
    replaced_by: Annotated[
        str | None, Opt("The version of the same hub to use instead.", "NAME:TAG")
    ] = None


@dataclass(frozen=True)
class DeprecateParams(YankParams):
    """Advise against a version: it is still found by name, with the reason as a warning.

    \b
    Examples:
      oscar-zoo deprecate Qwen3-8B:old --reason "there is a better one" --replaced-by Qwen3-8B:new
      oscar-zoo deprecate Qwen3-8B:old --reason "no longer maintained" --hub hf:my-org/zoo
    """


@dataclass(frozen=True)
class CacheListParams:
    """Show what is stored, from where, and how much room it takes.

    \b
    Examples:
      oscar-zoo cache list
      oscar-zoo cache list --json
    """


@dataclass(frozen=True)
class CacheVerifyParams:
    """Hash every stored file again and verify every artifact; exit code 4 if one is damaged.

    \b
    Examples:
      oscar-zoo cache verify
      oscar-zoo cache verify --json
    """


@dataclass(frozen=True)
class CacheGcParams:
    """Remove what no stored artifact needs: unused files, leftovers of killed processes, old
    listings of hubs.

    \b
    Examples:
      oscar-zoo cache gc --dry-run
      oscar-zoo cache gc
    """

    dry_run: Annotated[bool, Opt("Only say what would go.")] = False


@dataclass(frozen=True)
class CacheRmParams:
    """Remove artifacts from the store. They can be pulled again as long as a hub has them.

    \b
    Examples:
      oscar-zoo cache rm Qwen3-8B
      oscar-zoo cache rm Qwen3-8B:seq20000_prompt83_group128 Qwen3-4B@sha256:3f9a12b4c5d6
    """

    names: Annotated[tuple[str, ...], Arg("Artifacts.", "NAME[:TAG]...", complete="stored")]


@dataclass(frozen=True)
class CacheDirParams:
    """Print the folder of the store; the variable OSCAR_ZOO_CACHE moves it.

    \b
    Examples:
      oscar-zoo cache dir
      du -sh "$(oscar-zoo cache dir)"
    """


@dataclass(frozen=True)
class SiteParams:
    """Build the zoo's page: a table of all artifacts, and one page for each with its quality, its
    charts and whether it fits a GPU.

    The files need no server, load nothing from elsewhere, and are the same for the same manifests.
    The charts of a hub in a folder also show the reports and eigenvalues that lie there.

    \b
    Examples:
      oscar-zoo site
      oscar-zoo site --serve
      oscar-zoo site --hub hf:my-org/zoo --output public
    """

    output: Annotated[
        Path,
        Opt("Folder of the site. A site that is there already is replaced.", "DIR", shown=True),
    ] = Path("site")
    _: KW_ONLY
    hubs: Annotated[
        tuple[str, ...],
        Opt(
            f"Hub to show beside what this package knows: {FORMS}. Can be repeated. Without it no"
            " hub is asked.",
            "HUB",
            flag="--hub",
        ),
    ] = ()
    serve: Annotated[bool, Opt("Then serve it on this machine until Ctrl-C.")] = False
    port: Annotated[
        int, Opt("Port of --serve; 0 takes a free one.", "N", least=0, most=65535, shown=True)
    ] = 8000
    offline: Offline = False
