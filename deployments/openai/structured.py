"""``response_format``, ``structured_outputs`` and the older ``guided_*`` to one restriction.

Knows the fields' shapes. What a schema or grammar means is the engine's business, which refuses
what it could not enforce.
"""

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from deployments.openai.failures import ApiError
from engine.structured import JSON_OBJECT, StructuredOutput, StructureKind

Schema = dict[str, Any] | str | bool


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True)


class NamedSchema(_Part):
    """The ``json_schema`` of a response format. It is always enforced, strict or not."""

    name: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Part):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(_Part):
    """vLLM's ``structured_outputs``: exactly one restriction."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None


class StructuredFields(BaseModel):
    """The fields of a body that restrict its output; at most one of them is given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None


def structured_output(
    body: StructuredFields, *, format_field: str = "response_format"
) -> StructuredOutput | None:
    """What the output must match, if anything. ``format_field`` is what clients call the format."""
    found = [
        *_from_response_format(body.response_format, format_field),
        *_from_structured_outputs(body.structured_outputs),
        *_given("json_schema", body.guided_json, "guided_json"),
        *_given("regex", body.guided_regex, "guided_regex"),
        *_given("choice", body.guided_choice, "guided_choice"),
        *_given("grammar", body.guided_grammar, "guided_grammar"),
    ]
    if len(found) > 1:
        raise ApiError(
            f"{found[0].field} and {found[1].field} both restrict the output; give one.",
            param=found[1].field,
        )
    return found[0] if found else None


def _from_response_format(wanted: ResponseFormat | None, field: str) -> list[StructuredOutput]:
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return _given("json_schema", JSON_OBJECT, field)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(f"{field}.json_schema.schema is needed.", param=f"{field}.json_schema")
    return _given("json_schema", wanted.json_schema.schema_, field)


def _from_structured_outputs(wanted: StructuredOutputs | None) -> list[StructuredOutput]:
    if wanted is None:
        return []
    field = "structured_outputs"
    found = [
        *_given("json_schema", wanted.json_, field),
        *_given("json_schema", JSON_OBJECT if wanted.json_object else None, field),
        *_given("regex", wanted.regex, field),
        *_given("choice", wanted.choice, field),
        *_given("grammar", wanted.grammar, field),
    ]
    if len(found) != 1:
        raise ApiError(
            "structured_outputs needs exactly one of json, json_object, regex, choice, grammar.",
            param=field,
        )
    return found


def _given(kind: StructureKind, value: object, field: str) -> list[StructuredOutput]:
    if value is None:
        return []
    source: str | tuple[str, ...]
    if isinstance(value, list):
        source = tuple(value)
    else:
        source = value if isinstance(value, str) else orjson.dumps(value).decode()
    return [StructuredOutput(kind=kind, source=source, field=field)]
