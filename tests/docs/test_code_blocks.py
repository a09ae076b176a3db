"""Every block of code in the documentation is run, validated, or listed with a reason."""

import ast
import inspect
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import click
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.main import get_command

from deployments.cli import app
from deployments.config import DeploymentConfig, load_config
from deployments.model_profile import ModelProfile
from tests.docs.code_blocks import (
    BLOCKS,
    NOT_RUN,
    PAGES,
    PLAIN,
    ROOT,
    RUN,
    TRANSCRIPTS,
    VALIDATED,
    Block,
    blocks_in,
    exchanges,
)

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def test_there_are_blocks() -> None:
    assert len(BLOCKS) > 10


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_of_a_kind_that_is_tested(block: Block) -> None:
    assert block.language in PLAIN | VALIDATED | RUN | TRANSCRIPTS


def test_what_is_not_run_is_there_and_says_why() -> None:
    there = {(block.page, block.first_line) for block in BLOCKS if block.language in RUN}
    assert set(NOT_RUN) <= there, set(NOT_RUN) - there
    assert all(len(reason) > 10 for reason in NOT_RUN.values())


@pytest.mark.parametrize("block", blocks_in("yaml"), ids=str)
def test_settings_are_valid(block: Block) -> None:
    document = yaml.safe_load(block.text)
    if "applications" in document:
        ServeDeploySchema.model_validate(document)
        for application in document["applications"]:
            load_config(application["args"], {})
    elif document.keys() <= DeploymentConfig.model_fields.keys():
        load_config(_without_plug_ins(document), {})
    elif document.keys() <= ModelProfile.model_fields.keys():
        ModelProfile.model_validate(document)
    else:
        # Prometheus' own configuration.
        assert document.keys() == {"scrape_configs"}, document.keys()
        assert all({"job_name"} <= job.keys() for job in document["scrape_configs"])


def _without_plug_ins(document: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are, less what is installed only where somebody wants it."""
    adapters = dict(document.get("adapters") or {})
    resolvers = [entry for entry in adapters.get("resolvers", ()) if entry["name"] != "http"]
    return {**document, "adapters": {**adapters, "resolvers": resolvers}}


def test_json_is_valid() -> None:
    for block in blocks_in("json"):
        json.loads(block.text)


@pytest.mark.parametrize("block", blocks_in("python"), ids=str)
def test_python_can_be_compiled(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", blocks_in("bash"), ids=str)
def test_commands_can_be_parsed(block: Block) -> None:
    _parse(block.text)


@pytest.mark.parametrize("block", blocks_in("console"), ids=str)
def test_transcripts_are_commands(block: Block) -> None:
    commands = [command for command, _ in exchanges(block)]
    assert commands
    for command in commands:
        _parse(command)


def _parse(script: str) -> None:
    """What the shell and our own commands make of it, without running anything."""
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in script.replace("\\\n", " ").splitlines():
        if line.startswith("lorafleet ") and not line.startswith("lorafleet --"):
            _parse_ours(shlex.split(line, comments=True)[1:])
        if line.startswith("make "):
            targets = [word for word in shlex.split(line)[1:] if "=" not in word]
            assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)


def _parse_ours(words: list[str]) -> None:
    command: Any = get_command(app)
    context = click.Context(command)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    try:
        command.make_context(command.name, words, parent=context)
    except click.exceptions.UsageError as error:
        pytest.fail(error.format_message())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Any) -> None:
    for target in _LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = map(_anchor, _HEADING.findall(file.read_text()))
            assert anchor in set(headings), target


def _anchor(heading: str) -> str:
    """A heading's anchor as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_settings_that_are_named_exist(page: Any) -> None:
    sections = {
        name: field.annotation
        for name, field in DeploymentConfig.model_fields.items()
        if hasattr(field.annotation, "model_fields")
    }
    named = re.findall(rf"`({'|'.join(sections)})\.([a-z]\w*)", page.read_text())
    files = {"py", "md"}
    unknown = {
        f"{section}.{name}"
        for section, name in named
        if name not in sections[section].model_fields and name not in files
    }
    assert unknown == set()


def _messages() -> Iterator[str]:
    """Every text in the code, with … where it has a value."""
    for package in ("adapters", "deployments", "engine", "kernels", "resolvers"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(map(_part, node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def _part(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def test_messages_in_the_troubleshooting_page_are_those_of_the_code() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [line.removeprefix("> ") for line in text.splitlines() if line.startswith("> ")]
    assert len(quoted) > 15
    # Quotes around a value come from its representation.
    said = [_plain(message) for message in _messages()]
    unknown = [line for line in quoted if not any(_plain(line) in message for message in said)]
    assert unknown == []


def _plain(message: str) -> str:
    return re.sub(r"\W*…\W*", "…", inspect.cleandoc(message).replace("%s", "…"))
