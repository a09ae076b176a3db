"""Gathers the outputs of one choice: all of them for a whole response, a few for one chunk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deployments.openai.fanout import PromptOutput
from engine.delivery import merge_outputs
from engine.outputs import FinishReason, PositionLogprobs, RequestOutput


@dataclass(slots=True)
class Choice:
    """Everything that one sequence produced."""

    prompt_index: int
    text_parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    def add(self, output: RequestOutput) -> None:
        self.text_parts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason


class ChoiceSet:
    """The choices of a request in order: prompt by prompt, n for each."""

    def __init__(self, num_prompts: int, n: int) -> None:
        self._n = n
        self._choices = [Choice(index // n) for index in range(num_prompts * n)]

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    def add(self, item: PromptOutput) -> None:
        self._choices[item.prompt_index * self._n + item.output.index].add(item.output)


def merge_by_choice(items: Sequence[PromptOutput]) -> list[PromptOutput]:
    """Join the outputs of each sequence, so that a chunk is written once for each choice."""
    if len(items) == 1:
        return list(items)
    by_prompt: dict[int, list[RequestOutput]] = {}
    for item in items:
        by_prompt.setdefault(item.prompt_index, []).append(item.output)
    return [
        PromptOutput(prompt_index, output)
        for prompt_index, outputs in by_prompt.items()
        for output in merge_outputs(outputs)
    ]
