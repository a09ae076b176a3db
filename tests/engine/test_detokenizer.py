"""Text comes out whole characters at a time, and stop strings end it exactly."""

import random

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from engine.detokenizer import Detokenizer
from tests.engine.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(path, vocab_size=300)
    return AutoTokenizer.from_pretrained(path).backend_tokenizer


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    found = []
    for token_id in token_ids:
        found.append(detokenizer.append(token_id))
        if detokenizer.stop_reason is not None:
            break
    return [*found, detokenizer.finish()]


def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    text = "naïve — 日本 🎉 done"
    found = pieces(Detokenizer(tokenizer, [5]), tokenizer.encode(text).ids)
    assert "".join(found) == text
    assert all("�" not in piece for piece in found)


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_give_what_decoding_them_at_once_gives(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    token_ids = [rng.randrange(3, 259) for _ in range(200)]
    found = pieces(Detokenizer(tokenizer, [5]), token_ids)
    assert "".join(found) == tokenizer.decode(token_ids)


def test_text_that_may_start_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [5], stop=("END",))
    found = pieces(detokenizer, tokenizer.encode("xENyE").ids)
    assert found == ["x", "", "", "ENy", "", "E"]


@pytest.mark.parametrize(("include", "expected"), [(False, "say "), (True, "say STOP")])
def test_text_is_cut_at_the_stop_string(
    tokenizer: Tokenizer, *, include: bool, expected: str
) -> None:
    detokenizer = Detokenizer(tokenizer, [5], stop=("zzz", "STOP"), include_stop=include)
    found = pieces(detokenizer, tokenizer.encode("say STOP more").ids)
    assert "".join(found) == expected
    assert detokenizer.stop_reason == "STOP"


def test_the_stop_string_that_comes_first_wins(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [5], stop=("cd", "bc"))
    assert "".join(pieces(detokenizer, tokenizer.encode("abcd").ids)) == "a"
    assert detokenizer.stop_reason == "bc"


def test_special_tokens_are_skipped_unless_asked_for(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("a").ids, 2, *tokenizer.encode("b").ids]
    assert "".join(pieces(Detokenizer(tokenizer, [5]), token_ids)) == "ab"
    shown = Detokenizer(tokenizer, [5], skip_special_tokens=False)
    assert "".join(pieces(shown, token_ids)) == "a</s>b"


def test_chosen_special_tokens_are_shown_among_skipped_ones(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("a").ids, 1, 2, *tokenizer.encode("é").ids[:1], 1]
    shown = Detokenizer(tokenizer, [5], shown={1: "<s>"})
    assert "".join(pieces(shown, token_ids)) == "a<s>�<s>"


@pytest.mark.parametrize(("glued", "expected"), [(False, "a [X] [Y] b [X]"), (True, "a [X][Y] b")])
def test_special_tokens_stand_together_when_asked(*, glued: bool, expected: str) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[X]": 2, "[Y]": 3}, unk_token="a"))
    words.add_special_tokens(["[X]", "[Y]"])
    added = {2: "[X]", 3: "[Y]"} if glued else {}
    detokenizer = Detokenizer(words, [0], skip_special_tokens=False, glued=added)
    text = "".join(pieces(detokenizer, [0, 2, 3, 1, 2])).strip()
    assert text.startswith(expected)
