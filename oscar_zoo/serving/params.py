"""What the verbs of serving take. Imports next to nothing, so that `--help` is fast."""

from __future__ import annotations

import re
import shlex
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from oscar_zoo.artifact.names import path_text
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.params import (
    ASKED_HUBS,
    CALIB_DATA,
    COMPUTE,
    DEVICE,
    KEY_FILE,
    MODEL_HERE,
    OFFLINE,
    REVISION,
    SERVED_MODEL,
    option_words,
)
from oscar_zoo.verb import Arg, Opt

PORT = 30000
Engine = Literal["sglang", "vllm"]
ENGINES: dict[Engine, str] = {"sglang": "SGLang", "vllm": "vLLM"}
ON_A_TERMINAL = 100
"""Lines of a log that people get to see, unless they ask for another number."""
Hubs = Annotated[tuple[str, ...], ASKED_HUBS]
Offline = Annotated[bool, OFFLINE]
Named = Annotated[str | None, Arg("Port, model or artifact of a server.", "[NAME|PORT]")]
KeyFile = Annotated[Path | None, KEY_FILE]


@dataclass(frozen=True)
class ServeParams:
    """Serve a model with an INT2 KV cache over the OpenAI-compatible API.

    The artifact is a NAME of the zoo, or a folder that begins with ./, ../, / or ~. It is verified,
    rewritten from the verified arrays into a private folder, and handed to a stock engine, SGLang
    or vLLM. Everything after -- goes to the engine, except flags that would open the server.

    --print shows the command for a shell: the stock engine with this plugin, which reads the
    artifact with the same checks. It needs neither of them. The artifact is fetched, or with
    --compute computed here; --device cuda says that a GPU will run the server.

    Requests on this machine need no key. --require-key makes one, and an exposed server always
    needs one. Routes that change a server are closed.

    --detach returns when the server is ready, which then outlives the terminal: see it with
    `oscar-zoo ps` and `oscar-zoo logs`, end it with `oscar-zoo stop`.

    Where nobody has an artifact for the model, one can be computed first: on a terminal you are
    asked, elsewhere --compute says so. It goes to your own zoo, where the next run finds it.

    --drafts is speculative decoding: greedy answers stay the same up to near-ties, and come sooner
    where guesses are right and few requests run at a time. Without it there are no drafts.

    \b
    Examples:
      oscar-zoo serve Qwen3-8B
      oscar-zoo serve ./my-rotation --model ./my-model --port 30001
      oscar-zoo serve ./my-model --compute
      oscar-zoo serve Qwen3-8B --drafts
      oscar-zoo serve Qwen3-8B --host-cache 64GiB --disk-cache ~/prompts
      oscar-zoo serve Qwen3-8B --engine vllm -- --max-model-len=32768
      oscar-zoo serve Qwen3-8B -- --tp=2 --context-length=32768
      oscar-zoo serve Qwen3-8B --print --device cuda
    """

    target: Annotated[
        str | Path, Arg("Name, folder or model.", "NAME|DIR|MODEL", complete="names_or_paths")
    ]
    _: KW_ONLY
    flags: Annotated[tuple[str, ...], Arg("Flags of SGLang.", "[-- ENGINE FLAGS]")] = ()
    model: Annotated[str | None, SERVED_MODEL] = None
    revision: Annotated[str | None, REVISION] = None
    port: Annotated[
        int,
        Opt(
            "Port to listen on.",
            metavar="PORT",
            least=1,
            most=65535,
            shown=True,
            variable="OSCAR_ZOO_PORT",
        ),
    ] = PORT
    expose: Annotated[
        str | None,
        Opt(
            "Listen on this address instead of loopback; needs --require-key or --api-key-file.",
            metavar="ADDRESS",
        ),
    ] = None
    require_key: Annotated[bool, Opt("Make an API key that requests need, and show it once.")] = (
        False
    )
    api_key_file: KeyFile = None
    allow_origin: Annotated[
        tuple[str, ...],
        Opt(
            "Web pages of this origin may ask and read; by default none may. Can be repeated.",
            metavar="URL",
        ),
    ] = ()
    engine_api: Annotated[
        bool,
        Opt(
            "Clients may set every field of the engine's own requests, some of which can end a"
            " server. Only on this machine; by default they may set what OpenAI's API and the"
            " documents name."
        ),
    ] = False
    clip: Annotated[
        Any,
        Opt(
            "Clip ratios to use in place of the recipe's.",
            metavar="K,V",
            read="oscar_zoo.artifact.specs:read_clip",
        ),
    ] = None
    host_cache: Annotated[
        str | None,
        Opt("Host memory for prompts that no longer fit the GPUs, such as 64GiB.", metavar="SIZE"),
    ] = None
    disk_cache: Annotated[
        Path | None,
        Opt(
            "Folder for the prompts of --host-cache, which a restart finds again; SGLang 0.5.21 or"
            " newer.",
            metavar="DIR",
        ),
    ] = None
    drafts: Annotated[
        Literal["auto", "mtp", "ngram"] | None,
        Opt(
            "Guess tokens ahead and check several in one step: with the model's own layer (mtp),"
            " from text that repeats itself (ngram), or the first where there is one (auto, also"
            " without a value). On a GPU.",
            kind="oscar_zoo.cli.engine_flags:OptionalChoice",
        ),
    ] = None
    engine: Annotated[Engine, Opt("What serves it; flags behind -- are its own.", shown=True)] = (
        "sglang"
    )
    timeout: Annotated[
        float, Opt("How long to wait until it is ready.", metavar="SECONDS", least=1, shown=True)
    ] = 1800
    detach: Annotated[bool, Opt("Return when it is ready; it goes on in the background.")] = False
    print_only: Annotated[
        bool, Opt("Show the command and its variables instead of running it.", flag="--print")
    ] = False
    compute: Annotated[bool, COMPUTE] = False
    calib_data: Annotated[str | None, CALIB_DATA] = None
    offline: Offline = False
    hubs: Hubs = ()
    device: Annotated[str | None, DEVICE] = None
    ask: bool = False
    """Where no artifact exists, ask the observer whether to compute one."""

    def check(self) -> None:
        """Refuse options that exclude or need each other."""
        if self.print_only and self.detach:
            raise UsageError(
                "--print starts nothing that could be detached.", hint="leave out one of the two"
            )
        sized = re.search(r"--hicache[-_](?:si|ra)\S*", " ".join(self.flags))
        if self.host_cache is not None and sized:
            name = sized[0].partition("=")[0]
            raise UsageError("--host-cache says the size already.", hint=f"leave out {name}")
        wanted: dict[str, object] = {
            "--drafts=mtp": self.drafts == "mtp",
            "--disk-cache": self.disk_cache,
            "--host-cache": self.host_cache,
        }
        if self.engine == "vllm":
            for one in (flag for flag, value in wanted.items() if value):
                raise UsageError(f"{one} does not work with vLLM.", hint=f"leave out {one}")
        if self.drafts is not None and self.host_cache is not None:
            raise UsageError(
                "--host-cache does not work with --drafts.", hint="leave out --host-cache"
            )
        if self.disk_cache is not None and self.host_cache is None:
            raise UsageError(
                "--disk-cache keeps what --host-cache has.", hint="add --host-cache SIZE"
            )
        opens = (self.expose, self.api_key_file, self.require_key, self.allow_origin)
        if self.print_only and (any(opens) or self.engine_api):
            own = "; SGLang reads address and key from --config FILE" * (self.engine == "sglang")
            raise UsageError(
                "--print shows a server on loopback without a key.",
                hint=f"leave out what opens it{own}",
            )
        if self.calib_data and not self.compute:
            raise UsageError("--calib-data goes with --compute.", hint="add --compute")
        if self.engine_api and self.expose is not None:
            raise UsageError(
                "--engine-api opens what can end a server, so it is for this machine only.",
                hint="leave out --expose, or --engine-api",
            )

    @property
    def of_sglang(self) -> tuple[str, ...]:
        """What SGLang reads of the flags, behind what the caches mean to it; vLLM has some of its
        names for the same."""
        if self.engine == "sglang":
            own = [] if self.host_cache is None else ["--enable-hierarchical-cache"]
            if self.disk_cache is not None:
                own += [f"--oscar-disk-cache={self.disk_cache.expanduser().absolute()}"]
            return (*own, *self.flags)
        names = r"(?:--tensor-parallel-size|--tp|-tp|--dtype)[= ]\S+"
        return tuple(" ".join(re.findall(names, " ".join(self.flags))).split())

    def arguments(self, **changes: Any) -> list[str]:
        """The arguments behind `oscar-zoo` that mean the same, with `changes` of fields; `json`
        adds `--json`."""
        target = path_text(self.target) if isinstance(self.target, Path) else self.target
        if self.clip is not None:
            changes = {"clip": f"{self.clip.k},{self.clip.v}"} | changes
        words = ["serve", target, *option_words(self, **changes)]
        words += ["--json"] if changes.get("json") else []
        return [*words, *(["--", *self.flags] if self.flags else [])]

    def command_line(self, **changes: Any) -> str:
        """The same, for a shell."""
        return f"oscar-zoo {shlex.join(self.arguments(**changes))}"


@dataclass(frozen=True)
class PsParams:
    """Show the servers that `oscar-zoo serve` runs on this machine, in any terminal.

    A server that ended by itself is told below them, until another one starts on its port, you name
    it to `oscar-zoo stop`, or three days have passed.

    \b
    Examples:
      oscar-zoo ps
      oscar-zoo ps --json
    """


@dataclass(frozen=True)
class LogsParams:
    """Show the log of a server that `oscar-zoo serve` runs: its end on a terminal, and all of it in
    a pipe or a file.

    A server that ended by itself is meant where no other runs, and a port also means the last
    server that ran there, so that you see why it ended.

    \b
    Examples:
      oscar-zoo logs
      oscar-zoo logs 30000 -n 20
      oscar-zoo logs 30000 --lines all
      oscar-zoo logs Qwen3-8B --follow
      oscar-zoo logs 30000 -n 20 --json
    """

    name: Named = None
    follow: Annotated[bool, Opt("Show new lines until the server ends.", flag="-f --follow")] = (
        False
    )
    lines: Annotated[
        str | None,
        Opt(
            f"How many lines of the end to show, or all. [default: {ON_A_TERMINAL} on a terminal,"
            " else all]",
            metavar="N|all",
            flag="-n --lines",
        ),
    ] = None


@dataclass(frozen=True)
class StopParams:
    """Stop a server that `oscar-zoo serve` runs, and wait until it is gone.

    Requests that run may finish, for up to five minutes. A server is named by its port, its model
    or its artifact; where only one runs, it needs no name. One that had ended by itself is told and
    forgotten.

    \b
    Examples:
      oscar-zoo stop
      oscar-zoo stop 30000
      oscar-zoo stop Qwen3-8B --now
    """

    name: Named = None
    now: Annotated[bool, Opt("Do not wait for requests that run; they fail.")] = False


@dataclass(frozen=True)
class ChatParams:
    """Talk to a server that `oscar-zoo serve` runs on this machine, or ask it one question.

    With --model transformers runs a model in this process, with the cache of the artifact NAME, by
    default that of the model.

    One word of letters, digits and ._:@/~- is a NAME or the port of a server, and a QUESTION of one
    word follows it. All that comes from a pipe is one question, too.

    On a terminal every line is a question, and so is a pasted text. Arrow keys edit, and up brings
    back what was typed. /new starts another conversation, Ctrl-C ends an answer. Ctrl-D, /bye and
    Ctrl-C twice end the chat. Any other /WORD alone is refused.

    \b
    Examples:
      oscar-zoo chat 30000
      oscar-zoo chat "Why is the sky blue?"
      cat question.txt | oscar-zoo chat Qwen3-8B --json
      oscar-zoo chat --model ./my-model ./my-rotation
    """

    server: Named = None
    question: Annotated[str | None, Arg("What to ask.", "[QUESTION]")] = None
    model: Annotated[str | None, MODEL_HERE] = None
    device: Annotated[str | None, DEVICE] = None
    api_key_file: KeyFile = None
    max_tokens: Annotated[
        int,
        Opt(
            "Longest answer; a model that thinks first may need more.",
            metavar="TOKENS",
            least=1,
            shown=True,
        ),
    ] = 1024


@dataclass(frozen=True)
class DoctorParams:
    """Check hubs, versions, tokens, settings, disk, GPU and engine; takes ten seconds at most and
    changes nothing.

    Tokens are never shown, only where they come from. The exit code is 1 when a check FAILED. The
    last line says whether commands work all the same.

    \b
    Examples:
      oscar-zoo doctor
      oscar-zoo doctor --hub hf:Zhongzhu/OSCAR-RotationZoo
      oscar-zoo doctor --offline --json
    """

    hubs: Hubs = ()
    offline: Offline = False


@dataclass(frozen=True)
class FitGpuParams:
    """Estimate how many tokens and requests of a model fit a GPU, with a BF16, an FP8 and an INT2
    KV cache, in SGLang or vLLM.

    The model is a name of the zoo or a folder with a config.json; no hub is asked. INT2 has the
    bits of the artifact: of NAME:TAG, of an artifact's folder, or of the one that this machine
    knows for the model. Weights, the BF16 windows of INT2, sliding windows and the states of hybrid
    models share 85 % of the memory, in vLLM 89 %, divided as serve does. A name may lack facts
    about states; the answer is then a range, and says how to get the config.json.

    \b
    Examples:
      oscar-zoo fit-gpu Qwen3-8B --memory 24GiB
      oscar-zoo fit-gpu Qwen3-8B --gpu 'RTX 4090'
      oscar-zoo fit-gpu Qwen3-32B --gpu 2xH100 --context 32768
      oscar-zoo fit-gpu Qwen3-8B --memory 24GiB --bits 2.75 --host-cache 64GiB
      oscar-zoo fit-gpu Qwen3-8B --gpu H200 --engine vllm
      oscar-zoo fit-gpu ./my-model --memory 141GB --requests 64 --json
    """

    model: Annotated[
        str,
        Arg(
            "A name of the zoo, a hub id whose config.json is on this machine, a folder that holds"
            " one, or an artifact: NAME:TAG or its folder.",
            "MODEL|NAME:TAG|DIR",
            complete="names_or_paths",
        ),
    ]
    memory: Annotated[
        int | str | None,
        Opt(
            "Memory of one GPU, such as 24GiB; 24 and 24GB mean the same, and 4090 its card.",
            metavar="SIZE",
            flag="--memory --gpu-memory",
        ),
    ] = None
    _: KW_ONLY
    gpu: Annotated[
        str | None,
        Opt(
            "GPU to ask about instead of a memory, such as 'RTX 4090'; 2xH100 is --tp 2, too.",
            metavar="[N x] GPU",
        ),
    ] = None
    context: Annotated[
        int | None,
        Opt(
            "Tokens of each request. [default: 8192, or what the model takes at most]",
            metavar="N",
            least=1,
            most=1 << 24,
        ),
    ] = None
    requests: Annotated[
        int | None,
        Opt(
            "Requests that run at a time. [default: as many as serve lets run]",
            metavar="N",
            least=1,
            most=1 << 20,
        ),
    ] = None
    host_cache: Annotated[
        str | None, Opt("Also say what so much host memory holds, as of serve.", metavar="SIZE")
    ] = None
    gpus: Annotated[
        int | None,
        Opt(
            "GPUs that share the model. [default: 1 with --gpu, else those of its recipe]",
            metavar="N",
            flag="--tp",
            least=1,
            most=1024,
        ),
    ] = None
    weights: Annotated[
        int | None,
        Opt(
            "Size of all weights, such as 16GB. [default: of its files, its shapes or its name]",
            metavar="SIZE",
            read="oscar_zoo.serving.sizes:parse_weights",
        ),
    ] = None
    bits: Annotated[
        float | Literal["auto"] | None,
        Opt(
            "Bits of INT2 as for compute: 2 or 4 for all codes, or a budget such as 2.75. [default:"
            " those of the artifact, else 2]",
            metavar="BITS",
            read="oscar_zoo.cli.options:parse_bits",
        ),
    ] = None
    engine: Annotated[Engine, Opt("What serves it.", shown=True)] = "sglang"
