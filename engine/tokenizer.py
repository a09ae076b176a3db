"""Loads a model's tokenizer and the tokens that end a sequence."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from engine.errors import UnsupportedModelError


def load_tokenizer(model: Path) -> PreTrainedTokenizerFast:
    """Load the fast tokenizer beside the weights. Raises UnsupportedModelError without one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{model.name} has no usable tokenizer: {error}") from error
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"{model.name} has only a slow tokenizer; save a tokenizer.json beside its weights"
        )
    # A prompt's length is checked against the engine's own limit.
    tokenizer.model_max_length = 1 << 60
    return tokenizer


def eos_token_ids(
    model: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> frozenset[int]:
    """Collect the ids that end a sequence: generation_config's, else config's and tokenizer's."""
    ids: set[int] = set()
    try:
        ids |= _as_set(GenerationConfig.from_pretrained(model, local_files_only=True).eos_token_id)
    except OSError:
        ids |= _as_set(getattr(config, "eos_token_id", None))
    ids |= _as_set(tokenizer.eos_token_id)
    return frozenset(ids)


def _as_set(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)
