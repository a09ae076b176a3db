"""``lorafleet check`` says before deployment what the engine would say after it."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from typer.testing import CliRunner

from deployments.cli import app
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.resolvers.hub_server import hub_server
from tests.resolvers.s3_server import CREDENTIALS, Bucket, s3_server
from tests.tiny_models import MakeModel

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def model(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = shutil.copytree(make_model("llama"), tmp_path_factory.mktemp("models") / "base")
    save_tiny_tokenizer(path, vocab_size=131)
    return path


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "sql"
    path.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True}
    config |= {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(3):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = torch.ones(4, 48)
        tensors[f"{module}.lora_B.weight"] = torch.ones(48, 4)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


@pytest.fixture
def run(model: Path) -> Run:
    def run(source: Path | str, *options: str) -> Result:
        return CliRunner().invoke(app, ["check", str(source), "--model", str(model), *options])

    return run


def read_config(adapter: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return fields


@pytest.fixture
def changed(adapter: Path, tmp_path: Path) -> Callable[..., Path]:
    def change(**fields: Any) -> Path:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / name).write_bytes((adapter / name).read_bytes())
        config = read_config(adapter) | fields
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return tmp_path

    return change


def test_served_adapter_is_described(run: Run, adapter: Path) -> None:
    result = run(adapter)
    assert result.exit_code == 0, result.output
    for text in ("served exactly", "q_proj", "use_rslora", "bytes in a slot"):
        assert text in result.output


def test_json_holds_every_fact(run: Run, adapter: Path) -> None:
    result = run(adapter, "--json")
    facts = json.loads(result.output)
    assert (facts["served"], facts["problems"], facts["rank"]) == (True, [], 4)
    assert facts["target_modules"] == ["q_proj"]
    assert facts["features"] == ["use_rslora"]
    assert facts["size_bytes"] > 0 and len(facts["digest"]) == 64


def test_refused_adapter_says_why_and_fails(run: Run, changed: Callable[..., Path]) -> None:
    result = run(changed(r=8), "--json")
    assert result.exit_code == 1
    facts = json.loads(result.output)
    assert not facts["served"]
    assert "configuration and base model say (8, 48)" in facts["problems"][0]
    assert "not served" in run(changed(r=8)).output


def test_every_problem_is_named(run: Run, changed: Callable[..., Path]) -> None:
    path = changed(r=8, megatron_config={"a": 1}, use_qalora=True, lora_alpha="a lot")
    (path / "adapter_model.safetensors").write_bytes(b"short")
    facts = json.loads(run(path, "--json", "--max-lora-rank", "4").output)
    problems = facts["problems"]
    assert [part for part in PARTS if any(part in problem for problem in problems)] == PARTS
    assert len(problems) == len(PARTS) and all("adapter '" in problem for problem in problems)
    output = run(path).output
    assert all(problem in output for problem in problems)


PARTS = ["megatron_config", "use_qalora", "lora_alpha", "too short for a safetensors file"]


def test_rank_over_the_limit_does_not_hide_what_else_is_wrong(
    run: Run, changed: Callable[..., Path]
) -> None:
    problems = json.loads(run(changed(r=8), "--json", "--max-lora-rank", "4").output)["problems"]
    assert "rank 8" in problems[0] and "over the limit" in problems[0]
    assert "configuration and base model say (8, 48)" in problems[1]
    assert len(problems) == 2


def test_rank_limit_is_the_deployments(run: Run, adapter: Path) -> None:
    assert run(adapter, "--max-lora-rank", "4").exit_code == 0
    assert run(adapter, "--max-lora-rank", "3").exit_code == 1


def test_what_the_adapter_says_beside_its_weights_is_checked(
    run: Run, changed: Callable[..., Path]
) -> None:
    path = changed()
    (path / "adapter.yaml").write_text("tool_parser: morse")
    (path / "added_tokens.json").write_text('{"<tool>": 131}')
    problems = json.loads(run(path, "--json").output)["problems"]
    assert "token '<tool>' has id 131" in problems[0]
    assert "adapter.yaml: tool_parser" in problems[1]
    (path / "added_tokens.json").unlink()
    problems = json.loads(run(path, "--json").output)["problems"]
    assert len(problems) == 1 and "adapter.yaml: tool_parser" in problems[0]


def test_missing_adapter_is_refused(run: Run, tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 1
    assert "no adapter_config.json" in result.output


def test_missing_model_cannot_tell(adapter: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(adapter), "--model", str(tmp_path)])
    assert result.exit_code == 2


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with s3_server() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        bucket = Bucket(port, "adapters")
        bucket.create()
        yield bucket


def test_s3_uri_is_checked_without_deploying(run: Run, adapter: Path, bucket: Bucket) -> None:
    files = {path.name: path.read_bytes() for path in adapter.iterdir()}
    weights, config = files["adapter_model.safetensors"], files["adapter_config.json"]
    bucket.put_adapter("team/sql", weights, config)
    assert run("s3://adapters/team/sql").exit_code == 0
    missing = run("s3://adapters/team/other")
    assert missing.exit_code == 1 and "no adapter_config.json" in missing.output
    assert run("s3://no-such-bucket/sql").exit_code == 2


def test_hub_uri_is_checked_at_its_revision(
    run: Run, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in adapter.iterdir()}
    with hub_server(tmp_path) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        # Read when the library was imported, maybe offline.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        hub.put("acme/sql", "1" * 40, files, "v1")
        hub.put("acme/sql", "2" * 40, files | {"adapter_config.json": b"[]"}, "main")
        assert run("hf://acme/sql@v1").exit_code == 0
        refused = run("hf://acme/sql")
        assert refused.exit_code == 1 and "must hold a JSON object" in refused.output
        assert run("hf://acme/unknown").exit_code == 1
        hub.fail("/api/", times=9, status=500)
        assert run("hf://acme/sql").exit_code == 2
