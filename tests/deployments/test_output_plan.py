"""Profile and prompt decide how a text is restricted, shown and read."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from deployments.generation import GenerateRequest, PromptInput
from deployments.model_profile import ModelProfile, SamplingDefaults
from deployments.output_plan import OutputPlan, OutputPlanner
from engine.sampling_params import SamplingParams
from engine.structured import StructuredOutput

DIGITS = StructuredOutput(kind="regex", source="[0-9]+")
TOOLS = ({"type": "function", "function": {"name": "f"}},)
THINK, END_THINK, CALL = 1, 2, 3


@pytest.fixture(scope="module")
def planner() -> OutputPlanner:
    vocabulary = {"a": 0, "<think>": THINK, "</think>": END_THINK, "[TOOL_CALLS]": CALL}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")),
        chat_template="{{ tools }} [TOOL_CALLS]",
        extra_special_tokens=["[TOOL_CALLS]"],
    )
    return OutputPlanner(tokenizer)


def plan(
    planner: OutputPlanner,
    profile: ModelProfile | None = None,
    prompt_token_ids: tuple[int, ...] = (0,),
    **fields: Any,
) -> OutputPlan:
    params = SamplingParams(structured=fields.pop("structured", None))
    given = fields.pop("given", frozenset())
    prompt = PromptInput(**(fields or {"messages": ({"role": "user", "content": "a"},)}))
    request = GenerateRequest(request_id="r", prompt=prompt, params=params, given=given)
    return planner.plan(request, profile or ModelProfile(), prompt_token_ids)


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": ({"role": "user", "content": "a"},), **fields}


def test_a_plain_chat_is_left_alone(planner: OutputPlanner) -> None:
    assert plan(planner) == OutputPlan(params=SamplingParams())


def test_defaults_fill_what_was_not_given(planner: OutputPlanner) -> None:
    profile = ModelProfile(generation=SamplingDefaults(temperature=0.3, top_p=0.4))
    params = plan(planner, profile, given=frozenset({"top_p"}), text="a").params
    assert (params.temperature, params.top_p) == (0.3, 1.0)


def test_tools_are_read_in_the_templates_format_unless_the_profile_says(
    planner: OutputPlanner,
) -> None:
    detected = plan(planner, **chat(tools=TOOLS))
    assert detected.tool_parser == "mistral"
    assert detected.params.shown_special_token_ids == (CALL,)
    assert plan(planner, ModelProfile(tool_parser="hermes"), **chat(tools=TOOLS)).tool_parser == (
        "hermes"
    )
    foreign = ModelProfile(chat_template="{{ tools }}")
    assert plan(planner, foreign, **chat(tools=TOOLS)).tool_parser is None


@pytest.mark.parametrize(
    ("prompt_token_ids", "in_reasoning", "opens", "after"),
    [
        ((0,), False, "<think>", "</think>"),
        ((0, THINK, 0), True, "", "</think>"),
        ((THINK, END_THINK), None, "", ""),
        ((THINK, END_THINK, 0, THINK), True, "", "</think>"),
    ],
)
def test_structure_waits_for_the_end_of_reasoning(
    planner: OutputPlanner,
    prompt_token_ids: tuple[int, ...],
    in_reasoning: bool | None,
    opens: str,
    after: str,
) -> None:
    profile = ModelProfile(reasoning_parser="think")
    made = plan(planner, profile, prompt_token_ids, structured=DIGITS)
    assert (made.reasoning_parser, made.in_reasoning) == ("think", in_reasoning)
    structured = made.params.structured
    assert structured is not None
    assert (structured.opens, structured.after) == (opens, after)


def test_texts_that_are_no_chat_have_neither(planner: OutputPlanner) -> None:
    profile = ModelProfile(reasoning_parser="think", tool_parser="hermes")
    made = plan(planner, profile, (THINK,), structured=DIGITS, text="a")
    assert (made.reasoning_parser, made.tool_parser) == (None, None)
    assert made.params.structured == DIGITS
