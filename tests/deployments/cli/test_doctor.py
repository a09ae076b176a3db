"""``lorafleet doctor`` finds what it is there to find."""

import asyncio
import json
import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from deployments.cli import app, doctor_checks
from deployments.cli.doctor_checks import (
    Level,
    check_clock,
    check_cpu_kernels,
    check_directories,
    check_kernels_name,
    check_model,
    check_port,
    check_resolvers,
    check_shared_memory,
    judge_torch,
)
from deployments.config import DeploymentConfig
from deployments.http_app import create_http_app
from resolvers.filesystem import FilesystemResolver
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import serving

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("version", "platform", "is_available", "has_gpu", "level"),
    [
        ("2.13.0+cpu", "None", False, True, Level.FAIL),
        ("2.13.0+cu130", "13.0", False, True, Level.FAIL),
        ("2.13.0+cu130", "13.0", True, True, Level.OK),
        ("2.13.0+cpu", "None", False, False, Level.OK),
        ("2.13.0+cu130", "13.0", False, False, Level.OK),
    ],
)
def test_torch_must_go_with_the_machine(
    version: str, platform: str, is_available: bool, has_gpu: bool, level: Level
) -> None:
    finding = judge_torch(version, platform, is_available=is_available, has_gpu=has_gpu)
    assert finding.level is level
    assert bool(finding.advice) is (level is Level.FAIL)


def test_a_taken_port_is_found() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert check_port("127.0.0.1", port).level is Level.FAIL
    assert check_port("127.0.0.1", port).level is Level.OK


@pytest.mark.parametrize(
    ("total", "level"), [(64 << 20, Level.FAIL), (512 << 20, Level.WARN), (8 << 30, Level.OK)]
)
def test_too_little_shared_memory_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, total: int, level: Level
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=total))
    assert check_shared_memory(tmp_path).level is level
    assert check_shared_memory(tmp_path / "missing").level is Level.WARN


@pytest.mark.parametrize(("is_built", "level"), [("True", Level.OK), ("False", Level.WARN)])
def test_a_missing_compiler_is_found(
    monkeypatch: pytest.MonkeyPatch, is_built: str, level: Level
) -> None:
    probe = SimpleNamespace(returncode=0, stdout=f"{is_built}\n", stderr="")
    monkeypatch.setattr(doctor_checks, "_run", lambda _: probe)
    monkeypatch.delenv("CXX", raising=False)
    finding = check_cpu_kernels(compilers=("no-such-compiler",))
    assert finding.level is level
    assert ("C++ compiler" in finding.advice) is (level is Level.WARN)


def test_kernels_that_could_be_built_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probe = SimpleNamespace(returncode=0, stdout="False\n", stderr="")
    monkeypatch.setattr(doctor_checks, "_run", lambda _: probe)
    monkeypatch.setenv("CXX", sys.executable)
    finding = check_cpu_kernels(compilers=())
    assert (finding.level, finding.advice) == (Level.WARN, "make kernels")
    probe.returncode, probe.stderr = 1, "Traceback\nOSError: undefined symbol\n"
    finding = check_cpu_kernels(compilers=())
    assert (finding.level, finding.text) == (Level.FAIL, "OSError: undefined symbol")


def test_a_crashing_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_TORCH_PROBE", "import os; os.abort()")
    assert doctor_checks.check_torch().level is Level.FAIL


def test_a_distribution_that_hides_our_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_kernels_name().level is Level.OK
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(version="1.0"))
    assert check_kernels_name().level is Level.FAIL


def test_skewed_clocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(create_http_app(FakeBackend())) as url:
        assert check_clock(url).level is Level.OK
        monkeypatch.setattr(doctor_checks, "MAX_SKEW_S", -1.0)
        assert check_clock(url).level is Level.FAIL
    assert check_clock("http://127.0.0.1:1").level is Level.WARN


def test_places_that_cannot_be_written_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    adapters = {"store_dir": str(tmp_path / "file" / "store")}
    config = DeploymentConfig.model_validate(
        {"adapters": adapters, "cluster": {"state_dir": str(tmp_path / "state")}}
    )
    levels = {finding.check: finding.level for finding in check_directories(config)}
    assert levels["adapter store"] is Level.FAIL
    assert levels["journal"] is not Level.FAIL


def test_full_disks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    config = DeploymentConfig.model_validate(
        {"adapters": {"store_dir": str(tmp_path)}, "cluster": {"state_dir": str(tmp_path)}}
    )
    assert [finding.level for finding in check_directories(config)] == [Level.WARN] * 2


def test_resolvers_that_do_not_answer_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(doctor_checks, "_RESOLVER_TIMEOUT_S", 0.5)
    s3 = {"name": "s3", "uri": "s3://adapters", "endpoint_url": "http://127.0.0.1:1"}
    config = DeploymentConfig.model_validate(
        {"adapters": {"directories": [str(tmp_path)], "resolvers": [s3]}}
    )
    levels = {finding.check: finding.level for finding in check_resolvers(config)}
    assert levels == {"resolver filesystem": Level.OK, "resolver s3": Level.FAIL}


def test_resolvers_that_never_answer_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(FilesystemResolver, "resolve_lora", hang)
    monkeypatch.setattr(doctor_checks, "_RESOLVER_TIMEOUT_S", 0.05)
    config = DeploymentConfig.model_validate({"adapters": {"directories": [str(tmp_path)]}})
    [finding] = check_resolvers(config)
    assert finding.level is Level.FAIL and "no answer within" in finding.text


def test_a_missing_model_is_a_warning_and_a_broken_one_a_failure(tmp_path: Path) -> None:
    assert check_model(DeploymentConfig(model="nobody/nothing")).level is Level.WARN
    assert check_model(DeploymentConfig(model=str(tmp_path))).level is Level.FAIL
    (tmp_path / "config.json").write_text("{}")
    assert check_model(DeploymentConfig(model=str(tmp_path))).level is Level.OK


def test_the_command_reports_a_broken_configuration(tmp_path: Path) -> None:
    broken = tmp_path / "serve.yaml"
    application = {
        "import_path": "deployments.app:build_app",
        "args": {"engine": {"max_lora": 3}},
    }
    broken.write_text(yaml.safe_dump({"applications": [application]}))
    result = CliRunner().invoke(app, ["doctor", "--config", str(broken), "--json"])
    assert result.exit_code == 1
    found = {finding["check"]: finding for finding in json.loads(result.output)}
    assert found["configuration"]["level"] == "fail"
    assert "max_lora" in found["configuration"]["text"]


def test_shells_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "_LORAFLEET_COMPLETE": "complete_bash",
        "COMP_WORDS": "lorafleet adapters ro",
        "COMP_CWORD": "2",
    }
    result = CliRunner().invoke(app, [], env=environment, prog_name="lorafleet")
    assert "rollback" in result.output
