"""What the layers of one model read during a step.

One object per model, filled before a forward pass and read by its layers, so that nothing is
global and several engines can live in one process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.lora.change_batch import ChangeBatch
from kernels.metadata import AttentionBatch, LoRABatch


class LoRAScope:
    """The LoRA batch of the tokens that a group of layers sees, None without adapters.

    ``changes`` picks the tokens whose adapters change more than B @ A adds, None without such.
    """

    __slots__ = ("batch", "changes")

    def __init__(self) -> None:
        self.batch: LoRABatch | None = None
        self.changes: ChangeBatch | None = None

    def show(self, batch: LoRABatch | None, select: "Select | None") -> None:
        """Set what the layers see."""
        self.batch = batch
        self.changes = None if batch is None or select is None else select(batch)


Select = Callable[[LoRABatch], ChangeBatch | None]


class ForwardContext:
    """The step's facts. The output head sees fewer tokens than the layers: it has its own scope.

    ``select`` finds the adapters of a batch that change more than B @ A adds.
    """

    __slots__ = ("_attention", "head", "layers", "select")

    def __init__(self) -> None:
        self._attention: AttentionBatch | None = None
        self.layers = LoRAScope()
        self.head = LoRAScope()
        self.select: Select | None = None

    @property
    def attention(self) -> AttentionBatch:
        assert self._attention is not None, "the model runs only inside ForwardContext.step"
        return self._attention

    @contextmanager
    def chosen(self, lora: LoRABatch | None) -> Iterator[None]:
        """Show the slots of chosen tokens to the layers that see no others."""
        self.head.show(lora, self.select)
        try:
            yield
        finally:
            self.head.show(None, None)

    @contextmanager
    def step(
        self, attention: AttentionBatch, lora: LoRABatch | None, logits_lora: LoRABatch | None
    ) -> Iterator[None]:
        """Show these batches to the layers while the block runs."""
        self._attention = attention
        self.layers.show(lora, self.select)
        self.head.show(logits_lora, self.select)
        try:
            yield
        finally:
            self._attention = None
            self.layers.show(None, None)
            self.head.show(None, None)
