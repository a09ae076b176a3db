"""A byte-level tokenizer small enough for the tiny models, made without training data."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")


def save_tiny_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a tokenizer whose tokens are special tokens and single bytes, high bytes included.

    Bytes of multi-byte characters come first after ASCII letters, so that random token ids often
    end inside a character.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The byte-level alphabet spells bytes 0x80.. as characters from U+00A1 on; take both ends.
    tokens = [*SPECIAL_TOKENS, *alphabet[:94], *alphabet[94:]][:vocab_size]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)
