"""An adapter's tokenizer is the base model's, or the adapter is refused and told the difference."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from engine.lora.adapter_tokenizer import BaseTokenizer
from tests.engine.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    save_tiny_tokenizer(path, vocab_size=131)
    return path


@pytest.fixture
def check(base: Path, tmp_path: Path) -> Callable[[], None]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    ours = BaseTokenizer(tokenizer.backend_tokenizer, base)
    return lambda: ours.check(tmp_path / "adapter")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """As trainers leave it: the base model's tokenizer beside the weights."""
    return Path(shutil.copytree(base, tmp_path / "adapter"))


def tokenizer_of(adapter: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(adapter)
    return tokenizer


def test_adapter_without_a_tokenizer_uses_the_base_models(
    check: Callable[[], None], tmp_path: Path
) -> None:
    (tmp_path / "adapter").mkdir()
    check()


def test_base_models_own_tokenizer_is_accepted(check: Callable[[], None], adapter: Path) -> None:
    check()
    tokenizer_of(adapter).save_pretrained(adapter)
    check()


def test_how_batches_are_cut_and_how_the_file_is_written_do_not_matter(
    check: Callable[[], None], adapter: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(adapter / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding()
    (adapter / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str())))
    check()


def test_file_that_transformers_loads_as_something_else_is_accepted(
    base: Path, adapter: Path
) -> None:
    loaded = Tokenizer.from_file(str(base / "tokenizer.json"))
    loaded.add_special_tokens(["<loaded>"])
    BaseTokenizer(loaded, base).check(adapter)
    loaded.save(str(adapter / "tokenizer.json"))
    BaseTokenizer(loaded, base).check(adapter)


def test_token_that_only_fills_batches_up_is_accepted(
    check: Callable[[], None], adapter: Path
) -> None:
    tokenizer = tokenizer_of(adapter)
    tokenizer.add_special_tokens({"pad_token": "<|fill|>"})
    tokenizer.save_pretrained(adapter)
    check()
    (adapter / "tokenizer.json").unlink()
    (adapter / "added_tokens.json").write_text('{"<|fill|>": 131}')
    check()


def test_added_token_is_named(check: Callable[[], None], adapter: Path) -> None:
    tokenizer = tokenizer_of(adapter)
    tokenizer.add_tokens([AddedToken("<tool>", special=True)])
    tokenizer.save_pretrained(adapter)
    for _ in range(2):  # the second time it is remembered
        with pytest.raises(
            UnsupportedAdapterError, match="'<tool>' has id 131, the base model has"
        ):
            check()


def test_token_in_another_place_is_named(check: Callable[[], None], adapter: Path) -> None:
    file = adapter / "tokenizer.json"
    file.unlink()
    (adapter / "added_tokens.json").write_text('{"</s>": 7}')
    with pytest.raises(UnsupportedAdapterError, match="'</s>' has id 7, 2 in the base model's"):
        check()


def change_vocabulary(parts: dict[str, dict[str, dict[str, int]]]) -> None:
    vocab = parts["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (change_vocabulary, "model"),
        (lambda parts: parts.update(normalizer={"type": "Lowercase"}), "normalizer"),
    ],
)
def test_other_reading_of_a_text_is_refused(
    check: Callable[[], None], adapter: Path, change: Callable[[object], None], part: str
) -> None:
    file = adapter / "tokenizer.json"
    parts = json.loads(file.read_text())
    change(parts)
    file.write_text(json.dumps(parts))
    with pytest.raises(UnsupportedAdapterError, match=f"its {part} differ"):
        check()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"garbage", "tokenizer.json cannot be read"),
        ("tokenizer.json", b"\xff", "tokenizer.json is not UTF-8"),
        ("tokenizer_config.json", b"garbage", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json must hold a JSON object"),
        ("added_tokens.json", b'{"a":' * 100_000, "added_tokens.json is not valid JSON"),
    ],
)
def test_damaged_files_are_named(
    check: Callable[[], None], adapter: Path, name: str, content: bytes, message: str
) -> None:
    (adapter / name).write_bytes(content)
    with pytest.raises(InvalidAdapterError, match=message):
        check()
