"""What the layers of one model read during a step.

One object per model, filled before a forward pass and read by its layers, so that nothing is
global and several engines can live in one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kernels.metadata import AttentionBatch, LoRABatch


class LoRAScope:
    """The LoRA batch of the tokens that a group of layers sees, None without adapters."""

    __slots__ = ("batch",)

    def __init__(self) -> None:
        self.batch: LoRABatch | None = None


class ForwardContext:
    """The step's facts. The output head sees fewer tokens than the layers: it has its own scope."""

    __slots__ = ("_attention", "head", "layers")

    def __init__(self) -> None:
        self._attention: AttentionBatch | None = None
        self.layers = LoRAScope()
        self.head = LoRAScope()

    @property
    def attention(self) -> AttentionBatch:
        assert self._attention is not None, "the model runs only inside ForwardContext.step"
        return self._attention

    @contextmanager
    def step(
        self, attention: AttentionBatch, lora: LoRABatch | None, logits_lora: LoRABatch | None
    ) -> Iterator[None]:
        """Show these batches to the layers while the block runs."""
        self._attention, self.layers.batch, self.head.batch = attention, lora, logits_lora
        try:
            yield
        finally:
            self._attention = self.layers.batch = self.head.batch = None
