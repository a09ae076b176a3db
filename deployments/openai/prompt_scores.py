"""The prompts' log probabilities, and the outputs that must wait for them.

An engine computes a prompt's scores once, for the first of its n sequences that runs; the others'
output may come earlier, but cannot be echoed before.
"""

from collections.abc import Sequence

from deployments.errors import ClusterError
from deployments.openai.fanout import PromptOutput
from deployments.openai.logprobs import Positions


class PromptScores:
    """Scores by prompt index. When not ``wanted``, everything passes through."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._positions: dict[int, Positions] = {}
        self._held: list[PromptOutput] = []

    def __getitem__(self, prompt_index: int) -> Positions:
        return self._positions[prompt_index]

    def take(self, items: Sequence[PromptOutput]) -> list[PromptOutput]:
        """Return the outputs that can be shown now, in the order of their arrival."""
        if not self._wanted:
            return list(items)
        for item in items:
            scores = item.output.prompt_logprobs
            if scores is not None:
                self._positions.setdefault(item.prompt_index, scores)
        waiting = [*self._held, *items]
        self._held = [item for item in waiting if item.prompt_index not in self._positions]
        return [item for item in waiting if item.prompt_index in self._positions]

    def check_complete(self) -> None:
        """After the last output: nothing may be left waiting."""
        if self._held:
            raise ClusterError("the engine gave no log probabilities of the prompt")
