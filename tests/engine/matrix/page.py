"""Writes docs/compatibility.md: what the cells of the matrix found."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.engine.matrix.architectures import ARCHITECTURES
from tests.engine.matrix.features import FEATURES, GROUPS

PATH = Path(__file__).parents[3] / "docs" / "compatibility.md"

_HEAD = """# Compatibility

What of PEFT's LoRA is served, on which architectures. `tests/engine/matrix` writes this page: each
cell is an adapter that PEFT made with random weights for a tiny random model. **yes** means that in
float32 the logits are PEFT's to 1e-4, and 32 greedy tokens are PEFT's, alone and in one batch with
all other adapters of the column; **no** means that loading the adapter is refused, with the reason
below the table; **-** means that the architecture lacks the feature, or differs from llama in its
rotary positions alone.

Rewrite it with `LORAFLEET_WRITE_PAGES=1 pytest tests/engine/matrix`.
"""

_TAIL = """## Beyond the table

* Rope scalings `linear`, `llama3` and `yarn` were checked on sequences three times the original
  context. Frequencies of `dynamic` and `longrope` depend on the longest sequence of a batch, so a
  model with them is served up to its original context, and a larger `max_model_len` is refused at
  start.
* A chat template, stops and sampling defaults of an adapter's own are served. A tokenizer of its
  own is refused, naming the first token that differs; one that only fills batches up may differ.
* An adapter of a multimodal model's text part is served on the text model; one that changes the
  vision tower too is refused, naming the first tensor of it.
* An architecture is refused at start, with the reason, when its attention does not go through
  transformers' AttentionInterface, needs masks of its own, keeps other state than keys and values,
  or when sequences of a batch turn out to influence each other.
* Beside every adapter of a column the base model's logits are bit-identical to those of an engine
  without LoRA. In a model with experts that holds while adapters are loaded but not used: tokens
  that their adapters send to an expert change the shape of its products, as any other batch would.
* On Qwen3-MoE, PEFT takes `all-linear` and the names of an expert's linears for
  `target_parameters`.
* StableLM is refused at start: transformers does not express it through its AttentionInterface.
"""


def render(refusals: Mapping[tuple[str, str], str]) -> str:
    """The page for the refusals of (architecture, feature); all other cells are served."""
    names = list(ARCHITECTURES)
    parts = [_HEAD]
    for group, features in GROUPS.items():
        parts.append(f"\n## {group}\n")
        parts.append("| feature | " + " | ".join(names) + " |")
        parts.append("| --- |" + " --- |" * len(names))
        for feature in features:
            cells = [_cell(name, feature, refusals) for name in names]
            parts.append(f"| {feature} | " + " | ".join(cells) + " |")
        reasons = _reasons(list(features), refusals)
        if reasons:
            parts.append("\nRefused with:\n")
            parts.extend(reasons)
    return "\n".join(parts) + "\n\n" + _TAIL


def _cell(architecture: str, feature: str, refusals: Mapping[tuple[str, str], str]) -> str:
    arch, row = ARCHITECTURES[architecture], FEATURES[feature]
    if row.lacks(arch) is not None or (arch.rope_only and not row.with_rope):
        return "-"
    return "no" if (architecture, feature) in refusals else "yes"


def _reasons(features: list[str], refusals: Mapping[tuple[str, str], str]) -> list[str]:
    """One line for each feature, in the words of the first architecture that refuses it."""
    found = []
    for feature in features:
        texts = [text for (_, name), text in refusals.items() if name == feature]
        if texts:
            # PEFT saves sets, so the order in a list differs from run to run.
            reason = re.sub(r"=\[[^]]*\]", "=[...]", texts[0].partition(": ")[2])
            found.append(f"* {feature}: `{reason}`")
    return found
