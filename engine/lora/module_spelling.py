"""How an adapter's files spell the base model's modules.

An adapter that was trained on a multimodal model's text part names its modules as that model does,
and so do the expressions in its configuration. Knows the two spellings that transformers has used.
Knows nothing of configurations or tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.lora.targets import ModelTargets
from engine.lora.tensor_names import PEFT_PREFIX


@dataclass(frozen=True, slots=True)
class ModuleSpelling:
    """Modules whose path begins with ``ours`` are spelled with ``theirs`` in its place."""

    ours: str = ""
    theirs: str = ""

    def spell(self, name: str) -> str:
        """The adapter's name of the base model's module."""
        is_other = name.startswith(self.ours)
        return self.theirs + name.removeprefix(self.ours) if is_other else name

    def original(self, name: str) -> str:
        """The base model's name of a module that the adapter spells like this."""
        is_other = name.startswith(self.theirs)
        return self.ours + name.removeprefix(self.theirs) if is_other else name

    def spell_targets(self, targets: ModelTargets) -> ModelTargets:
        """The same modules under the adapter's names."""
        embedding, head = targets.input_embedding, targets.tied_head
        return replace(
            targets,
            modules={
                self.spell(name): replace(target, name=self.spell(name))
                for name, target in targets.items()
            },
            input_embedding=None if embedding is None else self.spell(embedding),
            tied_head=None if head is None else self.spell(head),
        )


AS_THE_BASE_MODEL = ModuleSpelling()
_MULTIMODAL = (
    ModuleSpelling("model.", "model.language_model."),
    # Before transformers 4.52: the text model as a whole, its head included.
    ModuleSpelling("", "language_model."),
)


def find_spelling(keys: Iterable[str], targets: ModelTargets) -> ModuleSpelling:
    """The spelling that some of an adapter file's keys have and the base model has not."""
    modules = [key.removeprefix(PEFT_PREFIX) for key in keys]
    for spelling in _MULTIMODAL:
        if any(name.startswith(spelling.theirs) for name in targets):
            continue
        if any(name.startswith(spelling.theirs) for name in modules):
            return spelling
    return AS_THE_BASE_MODEL
