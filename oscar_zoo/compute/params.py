"""What the verbs compute, fit, merge-moments and plot take. Imports no torch, so that `--help` is
fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from oscar_zoo.errors import UsageError
from oscar_zoo.registry.params import DTYPE, OFFLINE, STREAM_WEIGHTS
from oscar_zoo.verb import Arg, Opt

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip
    from oscar_zoo.observer import Observer

    Clips = tuple[float, float] | Clip
else:
    Observer = Clips = Any

MethodName = Literal["hadamard", "oscar", "oscar-exact", "oscar-per-head", "wush", "wush-tuned"]
"""The publishable methods of `methods.table`."""
Bits = float | Literal["auto"] | None
DEFAULT_TEXT = "mix"
Offline = Annotated[bool, OFFLINE]
Output = Annotated[
    str | Path | None,
    Opt(
        "Folder of the artifact. [default: ./<Model>/<tag>; where a model lies in ./<Model>,"
        " ./<Model>-rotation/<tag>]",
        "DIR",
        flag="--output-dir",
    ),
]
ClipRatios = Annotated[
    Clips | None,
    Opt(
        "Clip ratios to record for serving. [default: the recipe's, else 0.96,0.92, or of latents"
        " none]",
        "K,V",
        read="oscar_zoo.artifact.specs:read_clip",
    ),
]
GroupSize = Annotated[int | None, Opt("Channels per scale. [default: the recipe's]", "N", least=4)]
Force = Annotated[bool, Opt("Replace an artifact that is already in the output folder.")]


@dataclass(frozen=True)
class ComputeParams:
    """What to compute; the one place of the defaults for `compute`, `pull --compute`, `serve` and
    Python callers."""

    model: Annotated[
        str | Path, Arg("A folder, a name of the zoo, or a hub id.", complete="models")
    ]
    _: KW_ONLY
    calib_data: Annotated[
        str | Path,
        Opt(
            "Text or JSONL file, folder of such, a text known by name (mix, manuals, wikitext,"
            " mmlu, gpqa_diamond, ..), or a Hugging Face dataset:"
            " ORG/NAME[@REV][:CONFIG][:SPLIT][#FIELD].",
            "SOURCE",
            shown=True,
        ),
    ] = DEFAULT_TEXT
    calib_tokens: Annotated[
        int | None, Opt("Tokens to read. [default: the recipe's]", "N", least=1)
    ] = None
    seq_len: Annotated[
        int | None, Opt("Tokens per sequence. [default: up to 4096]", "N", least=2)
    ] = None
    method: Annotated[
        Literal["auto", MethodName],
        Opt("How to fit; auto measures all on held-out text and keeps the best.", shown=True),
    ] = "auto"
    chat_template: Annotated[bool | None, Opt("Render text as chat, or chats as text.")] = None
    seed: Annotated[
        int | None, Opt("Shuffle the documents. [default: as they come]", "N", least=0)
    ] = None
    allow_overlap: Annotated[
        bool, Opt("Calibrate although the text holds questions of an evaluation set.")
    ] = False
    fast: Annotated[
        bool, Opt("With auto, choose by errors of attention alone: no perplexity, no recall.")
    ] = False
    tune: bool = True
    bits: Annotated[
        Bits,
        Opt(
            "2 or 4: all codes have so many bits. Another number is a budget: at most so many bits"
            " for a stored element on average, its share of scales and offsets included, spent on"
            " codes of 4 bits where they gain most (in groups of 128, codes of 2 bits cost 2.25 and"
            " codes of 4 bits 4.25). auto: the fewest bits that lose at most 2 points of recall and"
            " 0.5 % of perplexity. [default: auto, and a --method that is named has codes of 2"
            " bits]",
            "BITS",
            read="oscar_zoo.cli.options:parse_bits",
        ),
    ] = None
    resume: Annotated[
        bool | None,
        Opt("Go on from what an interrupted run of the same command left. [default: where it did]"),
    ] = None
    model_id: Annotated[str | None, Opt("Identity to record for a local folder.", "ORG/NAME")] = (
        None
    )
    allow_poor: Annotated[bool, Opt("Write a result that fails its quality gates.")] = False
    output: Output = None
    revision: Annotated[str | None, Opt("Commit of a model on a hub.", "COMMIT")] = None
    clip: ClipRatios = None
    group_size: GroupSize = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], DTYPE] = "auto"
    device: Annotated[
        str | None,
        Opt(
            "Where to run; auto spreads the model over all GPUs. [default: cuda if there is one,"
            " else cpu]",
            "cpu|cuda[:N]|auto",
        ),
    ] = None
    stream_weights: Annotated[bool | None, STREAM_WEIGHTS] = None
    force: Force = False
    observer: Observer | None = None


@dataclass(frozen=True, kw_only=True)
class ComputeCommand(ComputeParams):
    """Fit a rotation for MODEL: a local folder, a name of the zoo, or an id such as Qwen/Qwen3-8B.

    A folder begins with ./, ../, / or ~. Without that, a name of the zoo wins; an id, or another
    name, means a folder of that name when it holds a config.json, as it does for transformers.

    Runs the model over calibration text once and keeps only sums (nothing of the size of the cache
    touches the disk), fits every method, measures each on held-out text, and writes the best as a
    verified artifact. Beside it: the moments, from which `oscar-zoo fit` makes other methods
    without the model, and a report.

    \b
    Examples:
      oscar-zoo compute Qwen/Qwen3-8B --calib-data prompts.jsonl --calib-tokens 8192
      oscar-zoo compute ./my-model --calib-data text.txt --output-dir ./my-rotation --method wush
      oscar-zoo compute ./my-model --bits 2.75
    """

    model: Annotated[str, Arg("The model.", complete="models")] = ""
    model_path: Annotated[str | None, Opt("Another way to give MODEL.", "MODEL")] = None
    compat: Annotated[
        bool, Opt("Only what the OSCAR server loads: one rotation per layer (--method oscar).")
    ] = False
    no_tune: Annotated[
        bool, Opt("With auto, leave out wush-tuned, which runs over the text once more.")
    ] = False
    offline: Offline = False

    def given(self) -> ComputeParams:
        """The parameters behind these options."""
        if self.model and self.model_path is not None:
            raise UsageError("MODEL and --model-path say the same.", hint="give one of the two")
        model = self.model or self.model_path
        if model is None:
            raise UsageError(
                "no model is given.", hint="oscar-zoo compute MODEL, or --model-path MODEL"
            )
        if self.compat and self.bits is not None:
            raise UsageError(
                "the OSCAR server reads codes of 2 bits only, so --compat has no other bits.",
                hint="leave out --compat, or --bits",
            )
        given = {one.name: getattr(self, one.name) for one in fields(ComputeParams)}
        given |= {"model": model, "tune": not self.no_tune}
        return ComputeParams(**(given | ({"method": "oscar"} if self.compat else {})))


@dataclass(frozen=True)
class FitParams:
    """Fit another rotation from MOMENTS, the file that compute writes beside an artifact. A
    folder stands for the file beside it or in it. Needs no model and no text.

    \b
    Examples:
      oscar-zoo fit ./Qwen3-8B/seq16384_prompt4_group128.moments.safetensors --method wush
      oscar-zoo fit merged.safetensors --method oscar --output-dir ./for-oscar-servers
    """

    moments: Annotated[str | Path, Arg("A moments file, or a folder with one.", "MOMENTS")]
    method: Annotated[MethodName, Opt("How to fit; wush-tuned needs the model: compute.")]
    _: KW_ONLY
    bits: Annotated[
        Literal[2, 4], Opt("Of all codes; other bits are measured with the model: compute.")
    ] = 2
    output: Output = None
    clip: ClipRatios = None
    group_size: GroupSize = None
    force: Force = False
    observer: Observer | None = None


@dataclass(frozen=True)
class MergeParams:
    """Add up captures of different texts.

    All must be of one model. Sequences that are in two files would count twice and are refused.

    \b
    Examples:
      oscar-zoo merge-moments monday.safetensors tuesday.safetensors --output both.safetensors
      oscar-zoo fit both.safetensors --method wush
    """

    paths: Annotated[
        tuple[str | Path, ...] | Sequence[str | Path],
        Arg("Moments files, or folders.", "MOMENTS..."),
    ]
    output: Annotated[str | Path, Opt("File to write.", "FILE")]


@dataclass(frozen=True)
class PlotParams:
    """Draw a report again from its numbers, or the spectra of a moments file.

    The page is one self-contained HTML file; the picture shows the same. DIR is an
    artifact's folder, with the report beside it, or a folder that holds one report or moments file.

    \b
    Examples:
      oscar-zoo plot ./Qwen3-8B/seq8192_prompt31_group128-wush.report.json
      oscar-zoo plot moments.safetensors --output spectra.png
    """

    source: Annotated[str | Path, Arg("What to draw.", "REPORT.json|MOMENTS|DIR")]
    output: Annotated[
        str | Path | None,
        Opt("File to write. [default: the page, beside the source]", "FILE.html|.png"),
    ] = None
