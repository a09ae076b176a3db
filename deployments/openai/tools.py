"""``tools``, ``tool_choice`` and the calls in messages: what a body asks for, checked.

Knows the fields and what they mean for the output. How a model writes its calls is the parsers'
business.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from deployments.generation import GenerationStart
from deployments.openai.failures import ApiError
from deployments.parsers.message_parser import MessageParser
from deployments.parsers.reasoning import ReasoningSplitter
from deployments.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from deployments.parsers.tool_parsers import (
    JSON_LIST,
    FormatParser,
    NamedCallParser,
    ToolParser,
)
from engine.structured import StructuredOutput

MAX_TOOLS = 256

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

# Whitespace between JSON's tokens, bounded, so that no model idles there.
_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}}


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


FunctionIdentifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(_Part):
    """What the model may call. ``parameters`` is a JSON schema."""

    name: FunctionIdentifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    """One entry of ``tools``."""

    type: Literal["function"]
    function: Function


class FunctionName(_Part):
    """The function that must be called."""

    name: str


class NamedTool(_Part):
    """``tool_choice`` as an object."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolFields(BaseModel):
    """The fields of a chat body that have to do with tools."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """What becomes of a body's tools.

    ``template_tools`` is what the chat template gets, None where the model is not to know of any.
    ``structured`` makes the model call. ``named`` is the one function of a named choice.
    """

    template_tools: tuple[dict[str, Any], ...] | None = None
    structured: StructuredOutput | None = None
    is_auto: bool = False
    named: str | None = None
    one_call: bool = False

    @property
    def is_required(self) -> bool:
        return self.structured is not None and self.named is None


def tool_plan(body: ToolFields) -> ToolPlan:
    """Check the fields against each other and decide what they ask for."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise ApiError("tool_choice needs tools to choose from.", param="tool_choice")
        return ToolPlan()
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise ApiError("tools has two functions of one name.", param="tools")
    if choice == "none":
        return ToolPlan()
    shown = tuple(tool.model_dump(exclude_none=True) for tool in body.tools)
    one_call = not body.parallel_tool_calls
    if isinstance(choice, NamedTool):
        return _named_plan(body, choice.function.name, shown)
    if choice == "required":
        source = _required_grammar([tool.function for tool in body.tools], one_call=one_call)
        structured = StructuredOutput(kind="lark", source=source, field="tools")
        return ToolPlan(template_tools=shown, structured=structured, one_call=one_call)
    return ToolPlan(template_tools=shown, is_auto=True, one_call=one_call)


def _named_plan(body: ToolFields, name: str, shown: tuple[dict[str, Any], ...]) -> ToolPlan:
    for tool in body.tools:
        if tool.function.name == name:
            schema = orjson.dumps(_parameters(tool.function)).decode()
            structured = StructuredOutput(kind="json_schema", source=schema, field="tools")
            return ToolPlan(template_tools=shown, structured=structured, named=name)
    raise ApiError(f"tool_choice names {name[:128]!r}, which is not in tools.", param="tool_choice")


def _required_grammar(functions: list[Function], *, one_call: bool) -> str:
    """A list of calls. Each schema stays on its own, so that its references mean what they say."""
    calls = " | ".join(f"call_{index}" for index in range(len(functions)))
    more = "" if one_call else ' ("," " "? call)*'
    lines = [f'start: "[" call{more} "]"', f"call: {calls}"]
    for index, function in enumerate(functions):
        head, middle = _quoted('{"name":'), _quoted(f'"{function.name}",')
        key = _quoted('"parameters":')
        schema = orjson.dumps({**_parameters(function), **_JSON_OPTIONS}).decode()
        lines += [f'call_{index}: {head} " "? {middle} " "? {key} " "? parameters_{index} "}}"']
        lines += [f"parameters_{index}: %json {schema}"]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A text as Lark writes it, which is as JSON does."""
    return orjson.dumps(text).decode()


def _parameters(function: Function) -> dict[str, Any]:
    return _NO_PARAMETERS if function.parameters is None else function.parameters


def message_parser(plan: ToolPlan, start: GenerationStart) -> MessageParser | None:
    """Who reads the text of one choice; None where it is all there is to say."""
    reasoning = None
    if start.reasoning_parser is not None and start.in_reasoning is not None:
        reasoning_format = REASONING_FORMATS[start.reasoning_parser]
        reasoning = ReasoningSplitter(reasoning_format, in_reasoning=start.in_reasoning)
    tools = _tool_parser(plan, start)
    if reasoning is None and tools is None:
        return None
    return MessageParser(reasoning, tools, one_call=plan.one_call)


def _tool_parser(plan: ToolPlan, start: GenerationStart) -> ToolParser | None:
    if plan.named is not None:
        return NamedCallParser(plan.named)
    if plan.is_required:
        return FormatParser(JSON_LIST)
    if not plan.is_auto:
        return None
    if start.tool_parser is None:
        raise ApiError(
            "It is not known how this model writes tool calls: set tool_parser in the model's "
            "profile, or in adapter.yaml, or use tool_choice 'required'.",
            param="tool_choice",
        )
    return FormatParser(TOOL_FORMATS[start.tool_parser])


def template_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """A message's ``tool_calls`` as templates read them: arguments as values, not as text."""
    if not isinstance(calls, list):
        raise ApiError(f"{where}: Input should be a list", param=where)
    return [_template_call(call, f"{where}.{index}") for index, call in enumerate(calls)]


def _template_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise ApiError(f"{where}: Input should be an object with a function", param=where)
    if not isinstance(function.get("name"), str) or call.get("type", "function") != "function":
        raise ApiError(f"{where}: only calls of functions by name are supported", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(
            f"{where}.function.arguments: Input should be a JSON object in a string",
            param=f"{where}.function.arguments",
        )
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
