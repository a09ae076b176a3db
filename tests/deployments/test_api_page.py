"""docs/api.md says of every field what the code does with it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from deployments.http_app import create_http_app
from deployments.openai.body import Body
from deployments.openai.embeddings import EmbeddingsBody
from deployments.openai.models import ModelPage
from deployments.openai.responses.body import ResponsesBody
from deployments.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeChatBody,
    TokenizeTextBody,
    UnloadAdapterBody,
)
from tests.deployments.fake_backend import FakeBackend

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HONOURED = ("supported", "different")

BODIES: Mapping[str, tuple[type[Any], ...]] = {
    "POST /v1/completions": (CompletionBody,),
    "POST /v1/chat/completions": (ChatBody,),
    "POST /v1/responses": (ResponsesBody,),
    "POST /v1/embeddings": (EmbeddingsBody,),
    "POST /tokenize": (TokenizeTextBody, TokenizeChatBody),
    "POST /detokenize": (DetokenizeBody,),
    "POST /v1/load_lora_adapter": (LoadAdapterBody,),
    "POST /v1/unload_lora_adapter": (UnloadAdapterBody,),
    "GET /v1/models": (ModelPage,),
}
OPENAI: Mapping[str, Any] = {
    "POST /v1/completions": completion_create_params.CompletionCreateParamsStreaming,
    "POST /v1/chat/completions": chat_create_params.CompletionCreateParamsStreaming,
    "POST /v1/responses": response_create_params.ResponseCreateParamsStreaming,
    "POST /v1/embeddings": embedding_create_params.EmbeddingCreateParams,
}


def tables() -> dict[str, dict[str, list[str]]]:
    """By section and field: the cells after the field's."""
    found: dict[str, dict[str, list[str]]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
        assert len(dict(rows)) == len(rows), f"{title} has a field twice"
        found[title] = {field: cells.split(" | ") for field, cells in rows}
    return found


@pytest.mark.parametrize("route", BODIES)
def test_every_field_is_on_the_page_with_what_becomes_of_it(route: str) -> None:
    honoured: set[str] = set()
    refused: set[str] = set()
    for body in BODIES[route]:
        honoured |= {field.alias or name for name, field in body.model_fields.items()}
        refused |= set(body.refused) if issubclass(body, Body) else set()
        # A field may be refused by name although the model has it.
    honoured -= {
        name for name in honoured & refused if all(name in body.refused for body in BODIES[route])
    }
    refused -= honoured
    rows = tables()[route]
    assert {field for field, cells in rows.items() if cells[0] in HONOURED} == honoured
    assert {field for field, cells in rows.items() if cells[0] == "refused"} == refused
    assert {cells[0] for cells in rows.values()} <= {*HONOURED, "refused", "ignored"}


@pytest.mark.parametrize("route", OPENAI)
def test_every_field_of_openais_is_on_the_page(route: str) -> None:
    rows = tables()[route]
    assert {field for field, cells in rows.items() if cells[1] == "yes"} == set(
        get_type_hints(OPENAI[route])
    )


def test_what_is_different_says_how() -> None:
    for route, rows in tables().items():
        for field, cells in rows.items():
            assert cells[0] != "different" or cells[-1].strip(" |"), f"{route}: {field}"


def test_every_route_is_on_the_page() -> None:
    text = PAGE.read_text()
    for path in create_http_app(FakeBackend()).openapi()["paths"]:
        assert re.search(rf"[ `]{re.escape(path)}[`\n]", text), path
