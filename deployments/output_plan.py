"""How one request's text is to be restricted and read, from its model's profile and its prompt.

Knows tokenizers, profiles and parsers' formats. Knows nothing of engines or HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployments.generation import GenerateRequest
from deployments.model_profile import ModelProfile
from deployments.parsers.reasoning import ReasoningFormat
from deployments.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, detect_tool_parser
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """Sampling parameters as the engine gets them, and how the ingress reads the text.

    ``in_reasoning``: the prompt has opened the reasoning; None: there will be none.
    """

    params: SamplingParams
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    in_reasoning: bool | None = None


class OutputPlanner:
    """Plans for the requests of one replica."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def plan(
        self, request: GenerateRequest, profile: ModelProfile, prompt_token_ids: Sequence[int]
    ) -> OutputPlan:
        """What the profile makes of a request; texts that are no chat are left as they come."""
        params = profile.apply(request.params, request.given)
        if request.prompt.messages is None:
            return OutputPlan(params=params)
        markers: list[str] = []
        tool_parser = None
        if request.prompt.tools:
            tool_parser = profile.tool_parser or self._detect(request, profile)
            if tool_parser is not None:
                markers += TOOL_FORMATS[tool_parser].markers
        reasoning_parser, in_reasoning = profile.reasoning_parser, None
        if reasoning_parser is not None:
            reasoning = REASONING_FORMATS[reasoning_parser]
            markers += reasoning.opens, reasoning.closes
            in_reasoning = self._reasoning_at_start(reasoning, prompt_token_ids)
            params = _after_reasoning(params, reasoning, in_reasoning)
        if markers:
            params = replace(params, shown_special_token_ids=self._special_ids(markers))
        return OutputPlan(
            params=params,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            in_reasoning=in_reasoning,
        )

    def _detect(self, request: GenerateRequest, profile: ModelProfile) -> str | None:
        own = self._tokenizer.chat_template
        return detect_tool_parser(str(request.prompt.chat_template or profile.chat_template or own))

    def _reasoning_at_start(
        self, reasoning: ReasoningFormat, prompt_token_ids: Sequence[int]
    ) -> bool | None:
        """Whether the prompt's last marker opens reasoning; None if it closes it.

        Without a marker in the prompt the text itself may begin with one.
        """
        opens, closes = self._tokenizer.convert_tokens_to_ids([reasoning.opens, reasoning.closes])
        for token_id in reversed(prompt_token_ids):
            if token_id == closes:
                return None
            if token_id == opens:
                return True
        return False

    def _special_ids(self, markers: Sequence[str]) -> tuple[int, ...]:
        """The markers that would otherwise be left out of the text."""
        special = set(self._tokenizer.all_special_tokens)
        found = [marker for marker in markers if marker in special]
        return tuple(self._tokenizer.convert_tokens_to_ids(found))


def _after_reasoning(
    params: SamplingParams, reasoning: ReasoningFormat, in_reasoning: bool | None
) -> SamplingParams:
    """Structure begins behind the reasoning, where there may be any."""
    if params.structured is None or in_reasoning is None:
        return params
    opens = "" if in_reasoning else reasoning.opens
    return replace(
        params, structured=replace(params.structured, after=reasoning.closes, opens=opens)
    )
