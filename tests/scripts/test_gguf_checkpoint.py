"""The two places where a GGUF conversion goes silently wrong: rotary rows and the tokenizer."""

import numpy as np
import pytest

from scripts.gguf_checkpoint import build_tokenizer, check_supported, restore_rotary_rows


def test_rotary_rows_return_to_halves() -> None:
    """One head of 6 rows: llama.cpp stores 0 3 1 4 2 5, each row beside its rotation partner."""
    stored = np.array([[0], [3], [1], [4], [2], [5], [10], [13], [11], [14], [12], [15]])
    restored = restore_rotary_rows(stored, num_heads=2)
    assert restored.ravel().tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]


def tokenizer_fields() -> dict[str, list[str] | list[int]]:
    return {
        "tokenizer.ggml.tokens": ["<|im_end|>", "1", "2", "a", "b", "ab", "12", "Ġ"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "1 2"],
    }


def test_letters_merge_and_digits_do_not() -> None:
    encoded = build_tokenizer(tokenizer_fields()).encode("ab 12")
    assert encoded.tokens == ["ab", "Ġ", "1", "2"]


def test_control_tokens_are_special() -> None:
    tokenizer = build_tokenizer(tokenizer_fields())
    ids = tokenizer.encode("ab<|im_end|>").ids
    assert ids == [5, 0]
    assert tokenizer.decode(ids) == "ab"


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="architecture"):
        check_supported({"general.architecture": "gemma"})
