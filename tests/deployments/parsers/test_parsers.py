"""Messages in the formats of the model families, whole and cut at every place."""

import json
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.parsers.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from deployments.parsers.message_parser import MessageParser
from deployments.parsers.reasoning import THINK, ReasoningSplitter
from deployments.parsers.registry import TOOL_FORMATS, detect_tool_parser
from deployments.parsers.tool_parsers import JSON_LIST, CallFormat, FormatParser, NamedCallParser

HERMES, LLAMA3, MISTRAL = (TOOL_FORMATS[name] for name in ("hermes", "llama3", "mistral"))
Calls = list[tuple[str, str]]


@dataclass
class Message:
    text: str = ""
    reasoning: str = ""
    calls: Calls = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


def parse(parser: MessageParser, pieces: list[str]) -> Message:
    message = Message()
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    for delta in deltas:
        match delta:
            case TextDelta(text):
                assert text
                message.text += text
            case ReasoningDelta(text):
                assert text
                message.reasoning += text
            case ToolCallStart(index, call_id, name):
                assert index == len(message.calls)
                message.calls.append((name, ""))
                message.ids.append(call_id)
            case ToolCallArguments(index, text):
                assert text and index == len(message.calls) - 1
                name, arguments = message.calls[-1]
                message.calls[-1] = (name, arguments + text)
    return message


def check(call_format: CallFormat, source: str, text: str, calls: Calls) -> None:
    """Every way of cutting the source must give the same."""
    ways = [[source], list(source)]
    ways += [[source[:place], source[place:]] for place in range(1, len(source))]
    for pieces in ways:
        message = parse(MessageParser(None, FormatParser(call_format)), pieces)
        assert (message.text, message.calls) == (text, calls), pieces


@pytest.mark.parametrize(
    ("source", "text", "calls"),
    [
        ("Hello world.", "Hello world.", []),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            "",
            [("f", '{"a": 1}')],
        ),
        (
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {"b": [1, {"c": "\\""}]}, "name": "g"}\n</tool_call>',
            "Let me see.",
            [("f", '{"a": "}"}'), ("g", '{"b": [1, {"c": "\\""}]}')],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [("f", '{"a":1}')]),
        (
            '<tool_call>{"id": 7, "x": true, "name": "f", "arguments": {}}</tool_call> Done.',
            " Done.",
            [("f", "{}")],
        ),
        # No calls, though they look so at first.
        ("if a <tool and b < c", "if a <tool and b < c", []),
        ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
        ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
        # Cut short.
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_', "", [("f", "{}")]),
        ("and then <tool_ca", "and then <tool_ca", []),
    ],
)
def test_hermes(source: str, text: str, calls: Calls) -> None:
    check(HERMES, source, text, calls)


@pytest.mark.parametrize(
    ("source", "text", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
            "",
            [("f", "{}"), ("g", '{"b": 2}')],
        ),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ("Plain { text }", "Plain { text }", []),
        ('{"answer": 42} is it', '{"answer": 42} is it', []),
        ("[1, 2]", "[1, 2]", []),
    ],
)
def test_llama3(source: str, text: str, calls: Calls) -> None:
    check(LLAMA3, source, text, calls)


@pytest.mark.parametrize(
    ("source", "text", "calls"),
    [
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (
            'Sure.[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{"b": {}}',
            "Sure.",
            [("f", '{"a": 1}'), ("g", '{"b": {}}')],
        ),
        ('[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ("[TOOL_CALLS] or not", "[TOOL_CALLS] or not", []),
        ("[TOOL_CALLS]get_wea", "[TOOL_CALLS]get_wea", []),
        ("a [TOOL] b", "a [TOOL] b", []),
    ],
)
def test_mistral(source: str, text: str, calls: Calls) -> None:
    check(MISTRAL, source, text, calls)


@pytest.mark.parametrize(
    ("source", "text", "calls"),
    [
        (
            '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ('[{"name": "f", "parameters": {"a"', "", [("f", '{"a"')]),
    ],
)
def test_required_calls(source: str, text: str, calls: Calls) -> None:
    check(JSON_LIST, source, text, calls)


def test_a_mistake_behind_the_name_ends_the_call_there() -> None:
    source = '<tool_call>{"name": "f", "arguments": {"a": 1} "b"} and more'
    check(HERMES, source, 'b"} and more', [("f", '{"a": 1}')])


def test_a_named_call_is_all_arguments() -> None:
    message = parse(MessageParser(None, NamedCallParser("f")), ['{"a"', "", ": 1}"])
    assert message.calls == [("f", '{"a": 1}')]


def test_ids_are_unique_and_as_the_family_wants_them() -> None:
    twice = '<tool_call>{"name":"f"}</tool_call>' * 2
    ids = parse(MessageParser(None, FormatParser(HERMES)), [twice]).ids
    assert len(set(ids)) == 2 and all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids)
    (short,) = parse(MessageParser(None, FormatParser(MISTRAL)), ["[TOOL_CALLS]f{}"]).ids
    assert re.fullmatch("[A-Za-z0-9]{9}", short)


def test_one_call_leaves_out_the_others() -> None:
    twice = '<tool_call>{"name":"f"}</tool_call><tool_call>{"name":"g"}</tool_call>'
    message = parse(MessageParser(None, FormatParser(HERMES), one_call=True), [twice])
    assert message.calls == [("f", "{}")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.integers(1, 9),
)
def test_any_arguments_come_through_unchanged(
    arguments: dict[str, object], name_first: bool, indent: int | None, size: int
) -> None:
    call = {"name": "f", "arguments": arguments}
    if not name_first:
        call = {"arguments": arguments, "name": "f"}
    source = f"<tool_call>\n{json.dumps(call, indent=indent, ensure_ascii=False)}\n</tool_call>"
    pieces = [source[start : start + size] for start in range(0, len(source), size)]
    message = parse(MessageParser(None, FormatParser(HERMES)), pieces)
    ((name, text),) = message.calls
    assert (name, json.loads(text), message.text) == ("f", arguments, "")


@settings(deadline=None)
@given(st.text('<tol_ca>{}":[]nmerguts fx;/\n', max_size=60), st.integers(1, 7))
def test_no_text_breaks_a_parser_or_depends_on_how_it_is_cut(source: str, size: int) -> None:
    for call_format in (HERMES, LLAMA3, MISTRAL, JSON_LIST):
        whole = parse(MessageParser(None, FormatParser(call_format)), [source])
        pieces = [source[start : start + size] for start in range(0, len(source), size)]
        cut = parse(MessageParser(None, FormatParser(call_format)), pieces)
        assert (whole.text, whole.calls) == (cut.text, cut.calls)


@pytest.mark.parametrize(
    ("source", "in_reasoning", "reasoning", "text"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes.", False, "Hm.\n\nSo.", "Yes."),
        ("Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("Just text <think> here.", False, "", "Just text <think> here."),
        ("Only thoughts", True, "Only thoughts", ""),
        ("<think>Only thoughts", False, "Only thoughts", ""),
        ("<thin", False, "", "<thin"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>a </thin b</think>c", False, "a </thin b", "c"),
        ("\n  Yes", False, "", "\n  Yes"),
    ],
)
def test_reasoning_is_split_off(source: str, in_reasoning: bool, reasoning: str, text: str) -> None:
    ways = [[source], list(source)]
    ways += [[source[:place], source[place:]] for place in range(1, len(source))]
    for pieces in ways:
        splitter = ReasoningSplitter(THINK, in_reasoning=in_reasoning)
        message = parse(MessageParser(splitter, None), pieces)
        assert (message.reasoning, message.text) == (reasoning, text), pieces


def test_calls_in_thoughts_are_not_made() -> None:
    source = '<think><tool_call>{"name":"no"}</tool_call></think>\n<tool_call>{"name":"f"}'
    splitter = ReasoningSplitter(THINK, in_reasoning=False)
    message = parse(MessageParser(splitter, FormatParser(HERMES)), list(source))
    assert message.calls == [("f", "{}")]
    assert "no" in message.reasoning and message.text == ""


def test_the_parser_is_found_by_the_template() -> None:
    assert detect_tool_parser("... within <tool_call></tool_call> tags") == "hermes"
    assert detect_tool_parser("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert detect_tool_parser("{{ '<|python_tag|>' }}") == "llama3"
    assert detect_tool_parser("{{ messages }}") is None
