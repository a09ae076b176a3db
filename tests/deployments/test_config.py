"""Arguments and environment become settings, or are refused with a reason."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from deployments.app import replica_config, replica_count
from deployments.config import ClusterSettings, DeploymentConfig, load_config
from deployments.controller_actor import Deployed
from deployments.paths import find_prepared

ROOT = Path(__file__).resolve().parents[2]


def test_runtime_updating_is_off_by_default() -> None:
    assert not load_config({}, {}).adapters.allow_runtime_updating


@pytest.mark.parametrize("path", ["serve_config.yaml", *(ROOT / "configs").rglob("*.yaml")])
def test_shipped_configurations_are_valid(path: str | Path) -> None:
    shipped = yaml.safe_load((ROOT / path).read_text())
    for application in shipped["applications"]:
        assert application["import_path"] == "deployments.app:build_app"
        load_config(application["args"], {})


def test_replicas_are_counted_or_scaled() -> None:
    scaling = {"max_replicas": 3}
    config = load_config({"autoscaling": scaling}, {})
    assert replica_count(config)["autoscaling_config"]["max_replicas"] == 3
    assert replica_count(load_config({"num_replicas": 2}, {})) == {"num_replicas": 2}
    for wrong in (
        {"autoscaling": scaling, "num_replicas": 2},
        {"autoscaling": {"min_replicas": 2, "max_replicas": 1}},
    ):
        with pytest.raises(ValidationError):
            load_config(wrong, {})


def test_demo_is_bound_to_loopback_with_runtime_updating() -> None:
    shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config = load_config(shipped["applications"][0]["args"], {})
    assert shipped["http_options"]["host"] == "127.0.0.1"
    assert config.adapters.allow_runtime_updating
    assert config.public_model_id == "smollm2-135m-instruct"
    assert config.adapters.roots == (str(ROOT / "examples" / "adapters"),)


@pytest.mark.parametrize("prefix", ["LORAFLEET", "VLLM"])
def test_environment_overrides_runtime_updating(prefix: str) -> None:
    name = f"{prefix}_ALLOW_RUNTIME_LORA_UPDATING"
    assert load_config({}, {name: "1"}).adapters.allow_runtime_updating
    args = {"adapters": {"allow_runtime_updating": True}}
    assert not load_config(args, {name: "false"}).adapters.allow_runtime_updating


def test_environment_overrides_replicas_directory_and_keys(tmp_path: Path) -> None:
    config = load_config(
        {"num_replicas": 1, "adapters": {"directories": ["elsewhere"]}},
        {
            "LORAFLEET_NUM_REPLICAS": "3",
            "LORAFLEET_ADAPTER_DIR": str(tmp_path),
            "LORAFLEET_API_KEY": "user",
            "LORAFLEET_ADMIN_API_KEY": "sesame",
        },
    )
    assert config.num_replicas == 3
    assert config.adapters.directories == (str(tmp_path),)
    http = config.http.build()
    assert (http.api_key, http.admin_api_key) == ("user", "sesame")
    assert "sesame" not in repr(config)


@pytest.mark.parametrize(
    ("plugins", "is_read"),
    [
        (None, True),
        ("lora_filesystem_resolver", True),
        ("a,lora_filesystem_resolver", True),
        ("", False),
        ("other", False),
    ],
)
def test_directory_of_vllm_counts_if_its_plugin_is_on(
    tmp_path: Path, plugins: str | None, is_read: bool
) -> None:
    environ = {"VLLM_LORA_RESOLVER_CACHE_DIR": str(tmp_path)}
    if plugins is not None:
        environ["VLLM_PLUGINS"] = plugins
    entries = load_config({}, environ).adapters.entries
    assert [entry["directories"] for entry in entries] == ([[str(tmp_path)]] if is_read else [])


BUCKET = {"name": "s3", "uri": "s3://bucket/team/{lora_name}/v1"}


@pytest.mark.parametrize(
    ("plugins", "names"),
    [
        (None, ["filesystem", "s3"]),
        ("lora_s3_resolver, lora_filesystem_resolver", ["s3", "filesystem"]),
        ("lora_s3_resolver,other", ["s3"]),
        ("", []),
    ],
)
def test_plugins_of_vllm_order_the_resolvers(plugins: str | None, names: list[str]) -> None:
    args = {"adapters": {"directories": ["/a"], "resolvers": [BUCKET]}}
    environ = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    adapters = load_config(args, environ).adapters
    assert [entry["name"] for entry in adapters.entries] == names


@pytest.mark.parametrize(
    ("plugins", "names"), [(None, ["s3", "hub"]), ("lora_hf_hub_resolver", ["hub"]), ("", [])]
)
def test_repositories_of_vllm_are_for_the_hub(plugins: str | None, names: list[str]) -> None:
    environ = {"VLLM_LORA_RESOLVER_HF_REPO_LIST": "acme/sql, acme/chat"}
    if plugins is not None:
        environ["VLLM_PLUGINS"] = plugins
    adapters = load_config({"adapters": {"resolvers": [BUCKET]}}, environ).adapters
    assert [entry["name"] for entry in adapters.entries] == names
    assert adapters.resolvers[-1]["allowed"] == ("acme/sql", "acme/chat")
    assert adapters.roots[-1] == "hf://acme/chat"


def test_explicit_loads_may_name_what_the_resolvers_read() -> None:
    adapters = load_config(
        {"adapters": {"directories": ["/a"], "resolvers": [BUCKET]}}, {}
    ).adapters
    assert adapters.roots == ("/a", "s3://bucket/team/")


def test_allowed_roots_replace_the_directories(tmp_path: Path) -> None:
    roots = [str(tmp_path), "s3://bucket/adapters"]
    config = load_config({"adapters": {"directories": ["/a"], "allowed_roots": roots}}, {})
    assert config.adapters.roots == tuple(roots)


@pytest.mark.parametrize(
    "args",
    [
        {"num_replica": 2},
        {"num_replicas": 0},
        {"engine": {"max_loras": 9, "max_cpu_loras": 2}},
        {"engine": {"block_size": 3}},
        {"cluster": {"lease_s": 1, "poll_s": 2}},
        {"http": {"api_key": ""}},
        {"adapters": {"resolvers": [{"name": "no-such-resolver"}]}},
        {"adapters": {"resolvers": [{"name": "s3"}]}},
        {"adapters": {"resolvers": [{"name": "s3", "uri": "s3://b/p", "endpoint": "typo"}]}},
        {"adapters": {"store_max_bytes": 0}},
        {"cluster": {"state_dir": "gs://bucket/state"}},
        {"cluster": {"state_dir": "s3://"}},
        {"cluster": {"state_dir": "s3://bucket/state?versionId=1"}},
    ],
)
def test_nonsense_is_refused(args: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        load_config(args, {})


def test_model_is_found_by_name_or_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAFLEET_HOME", str(tmp_path))
    prepared = tmp_path / "models" / "tiny"
    prepared.mkdir(parents=True)
    assert find_prepared("tiny") == prepared
    assert find_prepared(str(prepared)) == prepared
    assert find_prepared("org/model") is None
    names = {m: DeploymentConfig(model=m).public_model_id for m in ("tiny", str(prepared), "a/b")}
    assert names == {"tiny": "tiny", str(prepared): "tiny", "a/b": "a/b"}
    assert DeploymentConfig(model="a/b", model_id="c").public_model_id == "c"


def test_journal_has_one_file_for_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAFLEET_HOME", str(tmp_path))
    cluster = DeploymentConfig().cluster
    assert cluster.journal_path("a/b") == tmp_path / "state" / "a--b.sqlite3"
    assert cluster.journal_uri("a/b") is None
    assert cluster.push_archive_uri("a/b") is None


@pytest.mark.parametrize("state_dir", ["s3://bucket/some/where", "s3://bucket/some/where/"])
def test_journal_in_s3_has_pushed_adapters_beside_it(
    state_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAFLEET_HOME", str(tmp_path))
    cluster = ClusterSettings(state_dir=state_dir)
    assert cluster.journal_uri("a/b") == "s3://bucket/some/where/a--b.journal"
    assert cluster.push_archive_uri("a/b") == "s3://bucket/some/where/a--b.pushed"
    assert cluster.push_path == tmp_path / "state" / "pushed"


def test_stored_settings_hold_no_keys() -> None:
    config = load_config({"num_replicas": 3}, {"LORAFLEET_API_KEY": "secret-key"})
    text = Deployed(config=config, deployed_at=2.0).to_json()
    assert "secret-key" not in text
    restored = Deployed.from_json(text)
    assert (restored.deployed_at, restored.config.num_replicas) == (2.0, 3)
    scaled = Deployed(config=load_config({"autoscaling": {"max_replicas": 3}}, {}))
    assert Deployed.from_json(scaled.to_json()) == scaled


def test_replicas_are_told_everything_but_the_http_surface() -> None:
    args = {"engine": {"max_loras": 2}, "autoscaling": {"max_replicas": 3}}
    config = load_config(args, {})
    served = load_config({**args, "http": {"api_key": "secret-key"}}, {})
    assert replica_config(served) == replica_config(config)
    assert DeploymentConfig.model_validate_json(replica_config(served)) == config
