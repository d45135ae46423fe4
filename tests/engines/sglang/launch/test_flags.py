"""Flags of SGLang, as users write them."""

from pathlib import Path

import pytest

from oscar_zoo.engines.setting_flags import BACKEND
from oscar_zoo.engines.sglang.launch import user_flags
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags, check_flags
from oscar_zoo.engines.sglang.sizing import SizeFlags
from oscar_zoo.errors import PathNotFound, UnsupportedMachine, UsageError


def test_flags_in_every_spelling() -> None:
    """The beginning of a name means it, as for the parser of SGLang."""
    for words in (["--tp", "1", "--tp-size=4"], ["--tensor_parallel_size=4"], ["--tensor-par=4"]):
        assert UserFlags(words).sizes().tensor_parallel == 4
    assert UserFlags(["--tp"]).text("--tp") is None
    for flag in ("--enable-dp-attention", "--enable_dp_attention", "--enable-dp"):
        assert UserFlags([flag]).sizes().dp_attention
    assert UserFlags(["--page-size=16"]).sizes() == SizeFlags()
    for word in ("--tp=two", "--tensor-parallel=0"):
        with pytest.raises(UsageError, match="is not a number of GPUs"):
            UserFlags([word]).sizes()


def test_a_switch_has_no_value() -> None:
    given = UserFlags(["--enable-metrics", "--tp", "2", "--name=--x", "--last"]).given
    assert [(flag.name, flag.value) for flag in given] == [
        ("--enable-metrics", None),
        ("--tp", "2"),
        ("--name", "--x"),
        ("--last", None),
    ]


CLOSED = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}'
OPEN = ', "replay_endpoint": "tcp://*:5558"}'


def test_flags_that_serve_refuses_are_no_user_flags() -> None:
    with pytest.raises(UsageError, match="--host is not allowed"):
        UserFlags(["--tp=2", "--host=0.0.0.0"])
    for endpoints in ("{}", "{", '"endpoint"', '{"endpoint": "tcp://*:5557"}', CLOSED[:-1] + OPEN):
        with pytest.raises(UsageError, match="--kv-events-config is not allowed"):
            UserFlags([f"--kv-events-config={endpoints}"])
    for words in ([f"--kv-events-config={CLOSED}"], ["--kv-events-config", CLOSED]):
        assert UserFlags(words).words == (*words,)
    with pytest.raises(UsageError, match="--trust-remote-code is not allowed"):
        UserFlags(["--tp=2"]).after("--trust-remote-code")
    assert UserFlags(["--tp=2"]).after("--dtype=half").words == ("--dtype=half", "--tp=2")


def test_numbers_that_are_none_are_left_to_sglang() -> None:
    words = ["--mem-fraction-static=half", "--max-running-requests=many", "--dp=x", "--pp=0"]
    flags = UserFlags(words).sizes()
    assert (flags.memory_fraction, flags.requests) == (1.0, None)
    assert (flags.data_parallel, flags.pipeline_parallel) == (1, 1)
    assert UserFlags(["--mem-fraction-static", "1.5"]).sizes().memory_fraction == 1.0


DRAFTS = "--speculative-algorithm=NGRAM"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--tp", "2", "--context-length=8192", "--enable-metrics"],
        [
            "--attention-backend",
            BACKEND,
            "--decode-attention-backend=triton",
            "--prefill-attention-backend",
            "fa3",
        ],
        ["--dcp-size=1", "--attn-cp-size", "1", "--kv-canary=none"],
        ["--cuda-graph-backend-prefill=breakable", "--cuda-graph-backend-decode", "full"],
        ["--pp-size=2", "--enable-mixed-chunk"],
        [DRAFTS, "--speculative-num-draft-tokens=32", "--pp-size=1"],
        ["--enable-hicache", "--page-size=32", "--hicache-size=8", "--tp=2"],
        ["--enable-hierarchical-cache", "--page-size=many"],
        ["--served-model-name=--enable-mis"],
        ["-1", "x"],
    ],
)
def test_what_works_passes(flags: list[str]) -> None:
    check_flags(UserFlags(flags), "cuda")
    check_flags(UserFlags(["--cuda-graph-backend-prefill=full"]), "cpu")  # which has no graphs


def test_drafts_that_cannot_start_are_refused_before_weights_load(tmp_path: Path) -> None:
    eagle, model = "--speculative-algorithm=EAGLE3", "--speculative-draft-model-path"
    with pytest.raises(UnsupportedMachine, match="algorithm needs a GPU"):
        check_flags(UserFlags([DRAFTS]), "cpu")
    with pytest.raises(UsageError, match="EAGLE3 needs a draft model"):
        check_flags(UserFlags([eagle]), "cuda")
    (tmp_path / "other.json").touch()
    with pytest.raises(PathNotFound, match=r"has no config\.json"):
        check_flags(UserFlags([eagle, f"{model}={tmp_path}"]), "cuda")
    with pytest.raises(PathNotFound, match="no such model folder"):
        check_flags(UserFlags([eagle, f"{model}={tmp_path}/nowhere"]), "cuda")
    (tmp_path / "config.json").write_text("{}")
    check_flags(UserFlags([eagle, f"{model}={tmp_path}"]), "cuda")
    check_flags(UserFlags([eagle, f"{model}=some/draft"]), "cuda")
    check_flags(UserFlags(["--speculative-algorithm=NEXTN"]), "cuda")


def test_variables_that_the_server_would_refuse() -> None:
    assert user_flags.check_environment({"PATH": "/bin", "SGLANG_USE_HND_KVCACHE": "0"}) == ()
    for name, value in (
        ("SGLANG_USE_HND_KVCACHE", "1"),
        ("SGLANG_OSCAR_MLA_X", "1"),
        ("SGLANG_OSCAR_K_CLIP", "1"),
    ):
        with pytest.raises(UsageError, match=name):
            user_flags.check_environment({name: value})


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--oscar-bits=4/3", "codes have 2 or 4 bits, not '3'"),
        ("--oscar-k-clip=2", "a number from 0 to 1, not '2'"),
        ("--oscar-recent-size=0", "must be a whole number from 1 to 1048576"),
        ("--kv-cache-quant-group-size=x", "--oscar-group-size 'x': must be a whole number"),
    ],
)
def test_values_of_the_cache_are_read_before_anything_starts(flag: str, said: str) -> None:
    check_flags(UserFlags(["--oscar-bits=4,2"]), "cuda")
    with pytest.raises(UsageError, match=said):
        check_flags(UserFlags([flag]), "cuda")


def test_a_share_of_memory() -> None:
    for value in ("0.8", "1", "1e-3", ".9"):
        check_flags(UserFlags([f"--mem-fraction-static={value}"]), "cuda")
    for value in ("8", "0", "-0.5", "nan", "inf", "80%", "1.01"):
        with pytest.raises(UsageError, match="is no share of the memory"):
            check_flags(UserFlags([f"--mem_fraction_static={value}"]), "cuda")


def test_backends_that_are_replaced_are_told() -> None:
    given = ["--attention-backend=fa3", "--decode-attention-backend", "triton", "--tp=2"]
    told = user_flags.replaced_backends(UserFlags(given))
    assert [text.partition(" is replaced by oscar_int2,")[0] for text in told] == [
        "--attention-backend fa3",
        "--decode-attention-backend triton",
    ]
    assert user_flags.replaced_backends(UserFlags([f"--attention-backend={BACKEND}"])) == ()
