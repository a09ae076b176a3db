"""Counts tokens of one HTTP request."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from deployments.generation import GenerationStart
from deployments.openai.fanout import PromptOutput


class Usage:
    """Prompt tokens count once for each prompt, output tokens for each choice."""

    def __init__(self, starts: Sequence[GenerationStart], *, count_output: bool = True) -> None:
        self._count_output = count_output
        self._prompt_tokens = [len(start.prompt_token_ids) for start in starts]
        self._output_tokens: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._cached_tokens: dict[int, int] = {}

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens)

    @property
    def completion_tokens(self) -> int:
        return sum(self._output_tokens.values())

    def add(self, item: PromptOutput) -> None:
        output, index = item.output, item.prompt_index
        if self._count_output:
            self._output_tokens[index, output.index] += len(output.token_ids)
        cached = max(self._cached_tokens.get(index, 0), output.num_cached_tokens)
        self._cached_tokens[index] = cached

    def total(self) -> dict[str, Any]:
        """The usage object of a whole response."""
        return {
            **_counts(self.prompt_tokens, self.completion_tokens),
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
            "completion_tokens_details": None,
        }

    def none_yet(self) -> dict[str, int]:
        """The running usage before any output."""
        return _counts(self.prompt_tokens, 0)

    def so_far(self, item: PromptOutput) -> dict[str, int]:
        """The running usage of one choice, for streams that ask for it with each chunk."""
        key = (item.prompt_index, item.output.index)
        return _counts(self._prompt_tokens[item.prompt_index], self._output_tokens[key])


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
