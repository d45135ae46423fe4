"""The JSON Schemas of what commands print: complete, closed, and one for every command."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from cli_output import SCHEMAS, check
from documents import ROOT
from jsonschema import Draft202012Validator

from oscar_zoo.cli.main import cli

FILES = sorted(SCHEMAS.glob("*-[0-9]*.json"))
NOT_PRINTED = {
    "answers",
    "capture",
    "capture-ranks",
    "index",
    "known-digests",
    "lock",
    "manifest",
    "moments",
    "record",
    "report",
    "scores",
    "stats",
    "trusted-keys",
    "timestamp",
    "widths",
}
"""Schemas of files and of parts of them; no command prints these by themselves."""


def table() -> dict[str, list[str]]:
    """The commands in each row of the page by the name of the row's schema."""
    rows = re.findall(
        r"^\| (.*) \| \[(.+)\]\(\2\.json\) \|$", (SCHEMAS / "README.md").read_text("utf-8"), re.M
    )
    return {name: re.findall(r"`([a-z][^`]*)`", commands) for commands, name in rows}


def every_command(
    command: click.Command, option: str = "", words: tuple[str, ...] = ()
) -> Iterator[str]:
    """Every command below `command`, or those that take `option`."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from every_command(inner, option, (*words, name))
    elif not option or any(option in known.opts for known in command.params):
        yield " ".join(words)


def with_json(command: click.Command) -> Iterator[str]:
    """Every command below `command` that takes `--json`."""
    return every_command(command, "--json")


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every part of a schema that describes an object by its keys."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
            yield schema
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from objects(part)


def test_every_command_with_json_has_a_schema() -> None:
    rows = table()
    assert set(rows) == {file.stem for file in FILES}
    assert {command for commands in rows.values() for command in commands} == set(with_json(cli))
    assert [name for name, commands in rows.items() if not commands] == ["error-1"]


def test_every_command_has_json_and_can_be_silenced() -> None:
    assert {*every_command(cli)} - {*with_json(cli)} == {"completion"}
    assert {*every_command(cli)} == {*every_command(cli, "--quiet")}


def test_every_schema_that_the_program_names_is_described() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "oscar_zoo").rglob("*.py"))
    named = set(re.findall(r'"oscar-zoo\.([a-z-]+)/([0-9]+)"', source))
    printed = {f"{name}-{number}" for name, number in named if name not in NOT_PRINTED}
    assert printed == {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_schema_is_valid_and_closed(file: Path) -> None:
    schema = json.loads(file.read_bytes())
    Draft202012Validator.check_schema(schema)
    name, number = file.stem.rsplit("-", 1)
    assert schema["properties"]["schema"] == {"const": f"oscar-zoo.{name}/{number}"}
    assert schema["title"] and schema["description"] and "schema" in schema["required"]
    for part in objects(schema):
        assert part["additionalProperties"] is False, part
        assert set(part.get("required", ())) <= set(part["properties"]), part


def test_shared_definitions_are_those_of_the_package() -> None:
    spec = importlib.util.spec_from_file_location("write", SCHEMAS / "write.py")
    assert spec is not None and spec.loader is not None
    write = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write)
    shared = write.definitions()
    for file in write.files():
        again = "run python docs/schemas/write.py"
        assert file.read_text("utf-8") == write.made(file, shared), again


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema": "oscar-zoo.cache-dir/1"},
        {"schema": "oscar-zoo.cache-dir/1", "path": None},
        {"schema": "oscar-zoo.cache-dir/1", "path": "/a", "new": 1},
    ],
    ids=["missing", "type", "unknown"],
)
def test_the_check_of_outputs_finds_what_is_wrong(wrong: dict[str, Any]) -> None:
    check({"schema": "oscar-zoo.cache-dir/1", "path": "/a"})
    with pytest.raises(AssertionError, match=r"cache-dir/1: \$"):
        check(wrong)
