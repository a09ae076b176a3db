"""What goes to a cluster fits together: manifest, image and settings."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.main import get_command

from deployments.app import bind_replicas
from deployments.cli import app
from deployments.config import DeploymentConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/rayservice.yaml").read_text()))
SERVICE = next(document for document in DOCUMENTS if document["kind"] == "RayService")
SECRET = next(document for document in DOCUMENTS if document["kind"] == "Secret")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Of KubeRay's API (ray.io/v1), what is used here.
_SPEC = {"upgradeStrategy", "serveConfigV2", "rayClusterConfig"}
_CLUSTER = {
    "rayVersion",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "headGroupSpec",
    "workerGroupSpecs",
}
_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def application() -> DeploymentConfig:
    document = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(document)
    (only,) = document["applications"]
    assert only["import_path"] == "deployments.app:build_app"
    return load_config(only["args"], {})


def containers() -> list[dict[str, Any]]:
    groups = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
    return [each for group in groups for each in group["template"]["spec"]["containers"]]


def test_the_manifest_has_only_fields_that_kuberay_knows() -> None:
    assert SERVICE["apiVersion"] == "ray.io/v1"
    assert SERVICE["spec"].keys() <= _SPEC
    assert CLUSTER.keys() <= _CLUSTER
    assert CLUSTER["headGroupSpec"].keys() <= _GROUP - {"groupName"}
    for group in CLUSTER["workerGroupSpecs"]:
        assert group.keys() <= _GROUP
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]):
        # Ray takes its parameters as text.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_every_replica_has_a_place() -> None:
    config = application()
    (group,) = CLUSTER["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert config.num_cpus <= float(limits["cpu"])
    assert config.num_gpus <= float(limits["nvidia.com/gpu"])
    assert config.autoscaling is not None
    assert config.autoscaling.min_replicas <= group["minReplicas"]
    assert config.autoscaling.max_replicas <= group["maxReplicas"]


def test_a_pod_lives_as_long_as_its_replica_drains() -> None:
    replicas = bind_replicas(application())._bound_deployment._deployment_config
    (group,) = CLUSTER["workerGroupSpecs"]
    pod = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert pod > replicas.graceful_shutdown_timeout_s


def test_the_journal_outlives_the_pods_and_only_one_cluster_uses_it() -> None:
    assert application().cluster.journal_uri("model") is not None
    assert SERVICE["spec"]["upgradeStrategy"] == {"type": "None"}


def test_the_manifest_runs_the_ray_that_is_tested() -> None:
    assert CLUSTER["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]


def test_secrets_are_those_that_the_application_reads() -> None:
    name = SECRET["metadata"]["name"]
    for container in containers():
        assert container["envFrom"] == [{"secretRef": {"name": name}}]
    http = load_config({}, SECRET["stringData"]).http.build()
    assert (http.api_key, http.admin_api_key) == ("change-me", "change-me-too")


def test_volumes_that_are_mounted_exist() -> None:
    for group in CLUSTER["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert any(str(application().adapters.store_path).startswith(path) for path in paths)


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_is_built_from_what_is_here() -> None:
    known = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "CMD"}
    assert {name for name, _ in instructions()} <= known
    for name, text in instructions():
        if name == "COPY" and "--from" not in text:
            *sources, _ = text.split()
            assert all((ROOT / source).exists() for source in sources)
    extras = re.findall(r"-e '\.\[([a-z,]+)\]'", DOCKERFILE)
    assert extras and set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_image_runs_as_a_user_and_starts_a_command_that_exists() -> None:
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(at for at, name in enumerate(names) if name == "RUN")
    (command,) = (yaml.safe_load(text) for name, text in instructions() if name == "CMD")
    program, subcommand, config, *_ = command
    assert PROJECT["scripts"][program] == "deployments.cli:app"
    assert subcommand in get_command(app).commands  # type: ignore[attr-defined]
    assert (ROOT / config).is_file()


@pytest.mark.parametrize("pattern", [".git", ".venv", ".cache"])
def test_the_image_leaves_local_things_out(pattern: str) -> None:
    assert pattern in (ROOT / ".dockerignore").read_text().splitlines()
