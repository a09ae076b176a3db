"""What is said of a model: read from an adapter's files, laid over the base model's, applied."""

import json
from pathlib import Path

import pytest

from deployments.model_profile import ModelProfile, SamplingDefaults, read_profile
from engine.errors import InvalidAdapterError
from engine.sampling_params import SamplingParams


def test_an_adapter_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_profile(tmp_path) == ModelProfile()
    (tmp_path / "adapter.yaml").write_text("# nothing yet\n")
    assert read_profile(tmp_path) == ModelProfile()


def test_fields_are_read(tmp_path: Path) -> None:
    (tmp_path / "adapter.yaml").write_text(
        "tool_parser: hermes\nreasoning_parser: qwen3\nstop: ['###']\nstop_token_ids: [7]\n"
        "generation: {temperature: 0.2, top_k: 5, max_tokens: 99}\n"
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{% generation %}{{ messages }}{% endgeneration %}"
    )
    profile = read_profile(tmp_path)
    assert (profile.tool_parser, profile.reasoning_parser) == ("hermes", "qwen3")
    assert (profile.stop, profile.stop_token_ids) == (("###",), (7,))
    assert profile.generation == SamplingDefaults(temperature=0.2, top_k=5, max_tokens=99)
    assert profile.chat_template is not None and "messages" in profile.chat_template


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tool_parser: morse", "tool_parser"),
        ("reasoning_parser: 7", "reasoning_parser"),
        ("temperature: 0.5", "temperature"),
        ("generation: {temperature: -1}", "temperature"),
        ("generation: {temperature: .nan}", "temperature"),
        ("generation: {seed: 1}", "seed"),
        ("stop: '###'", "stop"),
        ("stop: ['']", "stop"),
        ("stop_token_ids: [-1]", "stop_token_ids"),
        ("chat_template: '{% if %}'", "chat_template"),
        ("- a list", "fields with values"),
        ("a: [", "YAML"),
        ("[" * 100_000, "YAML"),
        ("stop_token_ids: [" + "9" * 5000 + "]", "YAML"),
        ("a: " + "x" * (1 << 20), "larger"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "adapter.yaml").write_text(text)
    with pytest.raises(InvalidAdapterError, match=named):
        read_profile(tmp_path)


@pytest.mark.parametrize(
    "stored",
    [
        "{{ messages }}",
        [{"name": "rag", "template": "-"}, {"name": "default", "template": "{{ messages }}"}],
    ],
)
def test_template_in_the_tokenizers_configuration_is_read(tmp_path: Path, stored: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    assert read_profile(tmp_path).chat_template == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}")
    assert read_profile(tmp_path).chat_template == "{{ tools }}"


@pytest.mark.parametrize("stored", [[], ["a"], [{"name": []}], None])
def test_tokenizers_configuration_need_not_have_a_template(tmp_path: Path, stored: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    assert read_profile(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert read_profile(tmp_path).chat_template is None


@pytest.mark.parametrize("text", ["garbage", '{"chat_template": 3}', '{"chat_template": "{% if"}'])
def test_damaged_tokenizers_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(InvalidAdapterError, match=r"tokenizer_config|chat_template"):
        read_profile(tmp_path)


def test_template_without_end_to_its_nesting_is_refused(tmp_path: Path) -> None:
    nested = "(" * 50_000
    (tmp_path / "chat_template.jinja").write_text("{{" + nested + "}}")
    with pytest.raises(InvalidAdapterError, match="no Jinja template"):
        read_profile(tmp_path)


def test_two_templates_are_one_too_many(tmp_path: Path) -> None:
    (tmp_path / "adapter.yaml").write_text("chat_template: '{{ messages }}'")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(InvalidAdapterError, match="both"):
        read_profile(tmp_path)
    (tmp_path / "adapter.yaml").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidAdapterError, match="UTF-8"):
        read_profile(tmp_path)


def test_the_adapters_word_goes_before_the_base_models() -> None:
    base = ModelProfile(
        chat_template="base",
        tool_parser="llama3",
        stop=("a",),
        generation=SamplingDefaults(temperature=0.1, top_p=0.5),
    )
    adapter = ModelProfile(
        tool_parser="mistral", stop=("b",), generation=SamplingDefaults(temperature=0.9)
    )
    both = adapter.over(base)
    assert (both.chat_template, both.tool_parser) == ("base", "mistral")
    assert both.stop == ("a", "b")
    assert both.generation == SamplingDefaults(temperature=0.9, top_p=0.5)
    assert ModelProfile().over(base) == base


def test_the_requests_own_word_goes_before_all() -> None:
    profile = ModelProfile(
        stop=("a",), generation=SamplingDefaults(temperature=0.1, top_p=0.5, max_tokens=7)
    )
    params = SamplingParams(temperature=1.0, stop=("a", "b"))
    applied = profile.apply(params, {"temperature", "stop"})
    assert (applied.temperature, applied.top_p, applied.max_tokens) == (1.0, 0.5, 7)
    assert applied.stop == ("a", "b")
    assert ModelProfile().apply(params, ()) is params
