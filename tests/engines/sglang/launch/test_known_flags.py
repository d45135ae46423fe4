"""Flags that the installed SGLang does not know."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from oscar_zoo.engines.sglang.launch import installed_flags
from oscar_zoo.engines.sglang.launch.flag_refusals import check_flags
from oscar_zoo.engines.sglang.launch.installed_flags import FEWEST
from oscar_zoo.engines.sglang.launch.known_flags import check_known
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.errors import UsageError

MANY = "".join(f"    field_{number}: int = 0\n" for number in range(FEWEST))
ARGUMENTS = f'''
class ServerArgs:
    """--not-a-flag by itself"""
    mem_fraction_static: float = 0.9
    host: str = "::"
    tp_size: int = 1
    quantization: str = None
    quantization_param_path: str = None
    enable_dp_attention: bool = False
    enable_dp_attention_local_control_broadcast: bool = False
{MANY}
    def add(parser):
        parser.add_argument("--old-name", help="--some words")
        parser.add_argument("--tensor-parallel-size", "--tp-size", dest="tp_size")
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an SGLang that cannot be imported; `find_spec` finds it."""
    folder = tmp_path / "sglang"
    groups = folder / "srt" / "arg_groups" / "fields"
    groups.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('SGLang was imported')")
    (folder / "srt" / "server_args.py").write_text(ARGUMENTS)
    (groups / "more.py").write_text("class More:\n    in_a_group: bool = False\n")
    spec = ModuleSpec("sglang", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "sglang" else find(name)
    )
    return folder


@pytest.mark.parametrize(
    "word",
    [
        "--mem-fraction-static=0.8",
        "--mem_fraction_static=0.8",
        "--mem-fraction=0.8",
        "--in-a-group",
        "--old-name=1",
        "--no-in-a-group",
        "--oscar-sink-size=64",
        "--help",
        "-x",
    ],
)
def test_a_flag_that_sglang_takes(word: str, package: Path) -> None:
    check_known(UserFlags([word]))


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--mem-fracton-static=0.8", "did you mean --mem-fraction-static?"),
        ("--old_nam_e", "did you mean --old-name?"),
        ("--oscar-sink-sise=3", "did you mean --oscar-sink-size?"),
        ("--hostt", "see its flags: python -P -m sglang.launch_server --help"),
        ("--not-a-flag", "see its flags: python -P -m sglang.launch_server --help"),
    ],
)
def test_a_flag_that_it_does_not_take(word: str, hint: str, package: Path) -> None:
    with pytest.raises(UsageError, match="has no flag --") as caught:
        check_known(UserFlags(["--in-a-group", word]))
    assert caught.value.hint == hint


@pytest.mark.parametrize("word", ["--tensor-parallel=2", "--tensor_par=2", "--te=2", "--tp-s=2"])
def test_the_beginning_of_a_name_means_it(word: str, package: Path) -> None:
    assert UserFlags([word]).sizes().tensor_parallel == 2
    with pytest.raises(UsageError, match="'two' is not a number of GPUs"):
        UserFlags([word.replace("2", "two")]).sizes()


def test_a_share_of_memory_by_the_beginning_of_its_name(package: Path) -> None:
    assert UserFlags(["--mem-frac=0.5"]).sizes().memory_fraction == 0.5
    with pytest.raises(UsageError, match="'7' is no share of the memory"):
        check_flags(UserFlags(["--mem=7"]), "cuda")


def test_a_beginning_of_several_names_is_left_to_sglang(package: Path) -> None:
    """A whole name means itself, also where a longer one begins with it."""
    assert UserFlags(["--quant=fp8"]).sizes().weights_known
    assert not UserFlags(["--quantization=fp8"]).sizes().weights_known
    assert not UserFlags(["--enable-dp-att"]).sizes().dp_attention
    assert UserFlags(["--enable-dp-attention"]).sizes().dp_attention


def test_values_are_no_flags(package: Path) -> None:
    check_known(UserFlags(["--old-name", "--some words that begin with hyphens"]))


@pytest.mark.parametrize("change", ["no file", "no python", "few flags"])
def test_a_source_of_another_kind_refuses_nothing(change: str, package: Path) -> None:
    path = package / "srt" / "server_args.py"
    if change == "no file":
        path.unlink()
    else:
        path.write_text("class (" if change == "no python" else "class A:\n    few: int\n")
    check_known(UserFlags(["--no-such-flag"]))


def test_without_sglang_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not installed_flags.installed_flags()
    check_known(UserFlags(["--no-such-flag"]))


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_the_installed_sglang_is_not_imported() -> None:
    program = (
        "import sys\n"
        "from oscar_zoo.engines.sglang.launch import installed_flags\n"
        "assert len(installed_flags.installed_flags()) > 300\n"
        "assert not {'sglang', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
