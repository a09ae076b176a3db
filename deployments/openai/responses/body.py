"""The body of a response's request, and what it comes to as a chat.

Knows the fields' shapes and which of chat's fields they are. Items of the input are taken apart in
``input_items.py``.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.openai.body import Body
from deployments.openai.failures import ApiError
from deployments.openai.responses.input_items import input_messages
from deployments.openai.schema import ChatBody, Int, SamplingFields
from deployments.openai.structured import (
    NamedSchema,
    ResponseFormat,
    StructuredFields,
    structured_output,
)
from deployments.openai.tools import MAX_TOOLS, Function, FunctionIdentifier, Tool
from deployments.openai.unsupported import REFUSED_RESPONSES, Refused
from engine.structured import StructuredOutput

LOGPROBS = "message.output_text.logprobs"

_MAX_METADATA = 16


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True)


class FunctionTool(_Part):
    """One entry of ``tools``: a function, whose fields stand beside its type."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    name: FunctionIdentifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(_Part):
    """``tool_choice`` as an object."""

    type: Literal["function"]
    name: str


class TextFormat(_Part):
    """``text.format``; a schema's fields stand beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(_Part):
    """What the text must look like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(_Part):
    """Nothing can be asked of the reasoning; clients send the fields all the same."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class EventOptions(_Part):
    """Nothing can be asked of the events."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body, SamplingFields, StructuredFields):
    """POST /v1/responses."""

    refused: ClassVar[Refused] = REFUSED_RESPONSES

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    text: TextOptions = TextOptions()
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)
    top_logprobs: Int | None = None
    stream_options: EventOptions | None = None
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] = Field(
        default_factory=dict
    )
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or bool(self.top_logprobs)

    def structure(self) -> StructuredOutput | None:
        """What the text must match, from ``text.format`` or vLLM's fields."""
        merged = self.model_copy(update={"response_format": self._response_format()})
        return structured_output(merged, format_field="text.format")

    def _response_format(self) -> ResponseFormat | None:
        wanted = self.text.format
        if wanted is None or wanted.type != "json_schema":
            return None if wanted is None else ResponseFormat(type=wanted.type)
        if wanted.schema_ is None or wanted.name is None:
            raise ApiError("text.format needs name and schema.", param="text.format")
        named = NamedSchema(name=wanted.name, schema=wanted.schema_)
        return ResponseFormat(type=wanted.type, json_schema=named)

    def as_chat(self) -> ChatBody:
        """The chat that this asks for, but for the structure of its text."""
        shared = self.model_fields_set & SamplingFields.model_fields.keys()
        fields = self.model_dump(include={*shared, "chat_template", "chat_template_kwargs"})
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if isinstance(self.tool_choice, FunctionChoice):
            fields["tool_choice"] = {
                "type": "function",
                "function": {"name": self.tool_choice.name},
            }
        elif self.tools or self.tool_choice == "required":
            fields["tool_choice"] = self.tool_choice
        return ChatBody(
            **fields,
            messages=input_messages(self.input, self.instructions),
            tools=[_nested(tool) for tool in self.tools],
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
        )


def _nested(tool: FunctionTool) -> Tool:
    """A function as chat's tools have it."""
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)
