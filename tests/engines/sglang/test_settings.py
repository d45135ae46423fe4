"""Settings: precedence, origins, and that no variable is ever ignored in silence."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.engines import settings
from oscar_zoo.engines.setting_flags import (
    FORK_NAMES,
    FROM_FLAGS,
    MODEL,
    OPTIONS,
    CodeBits,
    flags_given,
    layers_text,
    one_or_text,
    parse_layers,
    write_flag,
)
from oscar_zoo.engines.settings import RecipeValues, read_settings
from oscar_zoo.errors import UsageError

DIR = {"OSCAR_INT2_ROTATION_PATH": "/artifact"}
RECIPE = RecipeValues(sink=32, recent=128, k_clip=(0.9,), v_clip=(0.8,), group_size=64)


def flags(*arguments: str, environ: dict[str, str] | None = None) -> dict[str, str]:
    """The environment after a command line."""
    environ = {} if environ is None else environ
    parser = argparse.ArgumentParser(exit_on_error=False)
    for option in OPTIONS.values():
        parser.add_argument(option.flag)
    given_flags = vars(parser.parse_args(arguments))
    for option in OPTIONS.values():
        value = given_flags[option.flag[2:].replace("-", "_")]
        if value is not None:
            write_flag(option, value, environ)
    return environ


def test_flag_beats_environment_beats_recipe_beats_default() -> None:
    """The defaults are the published recipe."""
    chosen = read_settings(DIR)
    kept = "sink 64, recent 256, idle_sinks None, host_sinks None"
    told = f"{kept}, bits 2, k_clip 0.96, v_clip 0.92, group_size None"
    parts = f"source /artifact, {told}, window_on_hit recompute".split(", ")
    origins = ["environment"] + ["default"] * 9
    assert chosen.describe() == ", ".join(f"{a} ({b})" for a, b in zip(parts, origins, strict=True))
    environ = {**DIR, "OSCAR_INT2_SINK_SIZE": "8", "SGLANG_MIXED_KV_RECENT_TOKENS": "99"}
    flags("--oscar-sink-size=16", environ=environ)
    chosen = read_settings(environ, RECIPE)
    assert (chosen.sink, chosen.recent, chosen.k_clip) == (16, 99, (0.9,))
    names = ("sink", "recent", "k_clip", "window_on_hit")
    assert [chosen.origin(one) for one in names] == ["flag", "environment", "recipe", "default"]


@pytest.mark.parametrize("name", FORK_NAMES)
def test_a_variable_of_the_fork_loses_against_ours_with_one_warning(name: str) -> None:
    environ = {**DIR, FORK_NAMES[name]: "0.25" if "clip" in name else "7"}
    assert read_settings(environ, RECIPE).warnings == ()
    environ[OPTIONS[name].variable] = "0.5" if "clip" in name else "9"
    chosen = read_settings(environ, RECIPE)
    assert getattr(chosen, name) in ((0.5,), 9)
    assert len(chosen.warnings) == 1 and FORK_NAMES[name] in chosen.warnings[0]


def test_flags_survive_in_the_environment_of_a_child() -> None:
    environ = flags("--oscar-rotation-path=/x", "--oscar-recent-size=32")
    assert environ[FROM_FLAGS] == "OSCAR_INT2_ROTATION_PATH,OSCAR_INT2_RECENT_SIZE"
    assert flags_given(environ) == ("--oscar-rotation-path", "--oscar-recent-size")
    chosen = read_settings(environ)
    assert chosen.origin("source") == chosen.origin("recent") == "flag" and chosen.recent == 32


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "needs the rotations of an artifact"),
        ({**DIR, "OSCAR_INT2_ARTIFACT": "Qwen3-8B"}, "exclude each other"),
        ({"SGLANG_OSCAR_K_ROTATION_PATH": "k.pt"}, "one is missing"),
        ({**DIR, "OSCAR_INT2_SINK_SIZE": "-1"}, "OSCAR_INT2_SINK_SIZE '-1'"),
        ({**DIR, "OSCAR_INT2_RECENT_SIZE": "0"}, "must be a whole number from 1 to 1048576"),
        ({**DIR, "SGLANG_OSCAR_K_CLIP_RATIO": "1.5"}, "SGLANG_OSCAR_K_CLIP_RATIO '1.5'"),
        ({**DIR, "OSCAR_INT2_WINDOW_ON_HIT": "maybe"}, "must be recompute or int2"),
        ({**DIR, "OSCAR_INT2_SINKSIZE": "8"}, "no setting is called OSCAR_INT2_SINKSIZE"),
    ],
)
def test_bad_settings_are_refused(environ: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        read_settings(environ)
    assert caught.value.hint


def test_the_two_files_of_the_fork_are_a_source() -> None:
    environ = {"SGLANG_OSCAR_K_ROTATION_PATH": "k.pt", "SGLANG_OSCAR_V_ROTATION_PATH": "v.pt"}
    assert read_settings(environ).source.files == ("k.pt", "v.pt")
    chosen = read_settings({**environ, **DIR})
    assert chosen.source.folder == "/artifact" and len(chosen.warnings) == 1


@given(st.sampled_from(settings.PREFIXES), st.from_regex(r"[A-Z_]{1,20}", fullmatch=True))
def test_no_name_with_our_prefixes_passes_unread(prefix: str, rest: str) -> None:
    name = prefix + rest
    ours = {o.variable for o in OPTIONS.values()} | {FROM_FLAGS, MODEL}
    known = ours | {settings.K_FILE, settings.V_FILE, *FORK_NAMES.values()}
    known |= {*settings.NO_EFFECT, *settings.ONLY, settings.SCALE_DTYPE}
    if name not in known:
        with pytest.raises(UsageError, match=name):
            read_settings({**DIR, name: "1"})


@pytest.mark.parametrize("name", sorted(settings.NO_EFFECT))
def test_settings_that_choose_an_implementation_only_warn(name: str) -> None:
    assert [w for w in read_settings({**DIR, name: "1"}).warnings if "no effect here" in w]


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("SGLANG_OSCAR_K_QUANTIZER", "pq", "int2"),
        ("SGLANG_OSCAR_V_QUANTIZER", "lloyd", "INT2"),
        ("SGLANG_MIXED_KV_HP_DTYPE", "float16", "bfloat16"),
        ("SGLANG_LLOYD_MAX", "1", "0"),
        ("SGLANG_LLOYD_MAX", "yes", "False"),
        ("SGLANG_ENABLE_MIXED_KV_WINDOWS", "0", "1"),
        ("SGLANG_ENABLE_MIXED_KV_WINDOWS", "off", "true"),
    ],
)
def test_a_choice_of_the_fork_we_do_not_have(name: str, bad: str, good: str) -> None:
    assert read_settings({**DIR, name: good}).warnings == ()
    with pytest.raises(UsageError, match=f"{name}={bad} is not supported"):
        read_settings({**DIR, name: bad})


def test_other_variables_of_sglang_are_not_ours() -> None:
    assert "16 bit" in read_settings({**DIR, settings.SCALE_DTYPE: "float32"}).warnings[0]
    assert read_settings({**DIR, "SGLANG_PLUGINS": "oscar", "PATH": "/bin"}).warnings == ()
    assert settings.present(
        {"SGLANG_OSCAR_A": "", "SGLANG_MIXED_KV_B": "", "SGLANG_PLUGINS": ""}
    ) == ("SGLANG_MIXED_KV_B", "SGLANG_OSCAR_A")


def test_layers_may_have_bits_and_clips_of_their_own() -> None:
    environ = {
        **DIR,
        "OSCAR_INT2_BITS": "4,2x2/2",
        "OSCAR_INT2_K_CLIP": "0,0.9,0.95",
        "OSCAR_INT2_V_CLIP": "0.8",
    }
    chosen = read_settings(environ, RECIPE)
    chosen.check_layers(3)
    assert [chosen.code("k", layer) for layer in range(3)] == [(4, 0.0), (2, 0.9), (2, 0.95)]
    assert [chosen.code("v", layer) for layer in range(3)] == [(2, 0.8)] * 3
    assert "bits 4,2x2/2 (environment), k_clip 0,0.9,0.95 (environment)" in chosen.describe()
    with pytest.raises(UsageError, match="--oscar-bits has 3 entries, and the model has 4 layers"):
        chosen.check_layers(4)
    # One ratio for all layers does not clip wider codes.
    chosen = read_settings({**DIR, "OSCAR_INT2_BITS": "4/2"}, RECIPE)
    assert (chosen.code("k", 7), chosen.code("v", 7)) == ((4, 0.0), (2, 0.8))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("OSCAR_INT2_BITS", "3", "codes have 2 or 4 bits, not '3'"),
        ("OSCAR_INT2_BITS", "", "''"),
        ("OSCAR_INT2_BITS", "4x0", "how many layers have the value"),
        ("OSCAR_INT2_BITS", "4xx", "how many layers have the value"),
        ("OSCAR_INT2_BITS", "2x600,2x600", "1200 entries are more than a model has layers"),
        ("OSCAR_INT2_K_CLIP", "0.9,1.5", "a number from 0 to 1, not '1.5'"),
        ("OSCAR_INT2_BITS", "4x\u0662", "how many layers have the value"),
        ("OSCAR_INT2_SINK_SIZE", "1_0", "a whole number from 0 to 1048576"),
        ("OSCAR_INT2_SINK_SIZE", "9" * 5000, "a whole number from 0 to 1048576"),
        ("OSCAR_INT2_RECENT_SIZE", str(1 + (1 << 20)), "a whole number from 1 to 1048576"),
        ("OSCAR_INT2_K_CLIP", "nan", "a number from 0 to 1, not 'nan'"),
    ],
)
def test_numbers_and_lists_that_are_none_are_refused(name: str, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_settings({**DIR, name: text}, RECIPE)
    assert str(caught.value.hint).startswith(f"for example {name}=")


WIDTHS = st.lists(st.sampled_from([2, 4]), min_size=1, max_size=40).map(tuple)


@pytest.mark.parametrize(
    ("text", "values"), [("2", (2,)), ("4,2x3", (4, 2, 2, 2)), (" 4 , 2 ", (4, 2)), ("4x1", (4,))]
)
def test_a_list_may_repeat_entries(text: str, values: tuple[int, ...]) -> None:
    assert parse_layers(text, int) == values


@given(k=WIDTHS, v=WIDTHS)
def test_bits_come_back_from_their_text(k: tuple[int, ...], v: tuple[int, ...]) -> None:
    bits = CodeBits(k, v)
    assert CodeBits.parse(str(bits)) == bits
    assert bits.narrow == (set(k + v) == {2})


@given(st.lists(st.sampled_from([0.0, 0.9, 0.92, 0.965]), min_size=1, max_size=40))
def test_ratios_come_back_from_their_text(ratios: list[float]) -> None:
    assert parse_layers(layers_text(ratios), float) == tuple(ratios)
    assert one_or_text(ratios) == (ratios[0] if len(ratios) == 1 else layers_text(ratios))
