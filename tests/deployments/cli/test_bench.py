"""The command that sends load: figures for people and for scripts, statuses for both."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.backend import BaseModelInfo
from deployments.cli import app
from deployments.http_app import create_http_app
from tests.deployments.fake_backend import BASE, FakeBackend
from tests.deployments.http_client import serving


class Words(FakeBackend):
    """Has a vocabulary of words, not of characters."""

    async def base_model(self) -> BaseModelInfo:
        return replace(await super().base_model(), vocab_size=32_000)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    backend = Words()
    # Every answer has exactly as many tokens as are asked for.
    backend.reply = "x" * 200
    with serving(create_http_app(backend)) as url:
        yield url


def bench(url: str, *args: str) -> tuple[int, str]:
    fixed = ["--concurrency", "2", "--prompt-tokens", "5", "--output-tokens", "4"]
    result = CliRunner().invoke(app, ["bench", "--url", url, *fixed, *args])
    return result.exit_code, result.output


def test_figures_of_the_base_model_are_told(url: str) -> None:
    status, text = bench(url)
    assert status == 0, text
    assert "8 of 8" in text and "time to first token" in text


def test_scripts_get_json(url: str) -> None:
    status, text = bench(url, "--json", "--requests", "3", "--model", BASE)
    assert status == 0, text
    figures = json.loads(text)
    assert (figures["num_requests"], figures["errors"]) == (3, 0)
    assert figures["output_tokens_per_s"] > 0


def test_an_unknown_model_fails_with_the_servers_reason(url: str) -> None:
    status, text = bench(url, "--model", "nobody")
    assert status == 3 and "404" in text
    status, text = bench(url, "--model", "nobody", "--model", BASE)
    assert status == 1 and "404" in text


def test_without_a_server_there_is_no_answer() -> None:
    status, text = bench("http://127.0.0.1:9")
    assert status == 3 and "127.0.0.1:9" in text


def test_what_it_runs_is_installed_with_it() -> None:
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert "benchmarks*" in project["tool"]["setuptools"]["packages"]["find"]["include"]
