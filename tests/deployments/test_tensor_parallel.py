"""What a deployment of a split model asks Ray for, and which settings contradict each other."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ray import serve

from deployments.app import REPLICAS, replica_resources
from deployments.config import DeploymentConfig
from deployments.llm_replica import LLMReplica


def config(tp_size: int, num_gpus: float, **engine: Any) -> DeploymentConfig:
    return DeploymentConfig.model_validate(
        {
            "num_cpus": 4,
            "num_gpus": num_gpus,
            "engine": {"tensor_parallel_size": tp_size, **engine},
        }
    )


def test_ranks_get_their_gpus_in_one_bundle_that_serve_accepts() -> None:
    options = replica_resources(config(4, 4))
    assert options == {
        "ray_actor_options": {"num_cpus": 4, "num_gpus": 4},
        "placement_group_bundles": [{"CPU": 4, "GPU": 4}],
        "placement_group_strategy": "STRICT_PACK",
    }
    deployment = serve.deployment(LLMReplica).options(name=REPLICAS, **options)
    assert deployment.ray_actor_options["num_gpus"] == 4


@pytest.mark.parametrize(("tp_size", "num_gpus"), [(1, 0), (1, 1), (1, 0.5), (2, 0)])
def test_no_bundle_without_several_gpus(tp_size: int, num_gpus: float) -> None:
    assert replica_resources(config(tp_size, num_gpus)) == {
        "ray_actor_options": {"num_cpus": 4, "num_gpus": num_gpus}
    }


@pytest.mark.parametrize(
    ("tp_size", "num_gpus", "device"), [(2, 1, "auto"), (2, 4, "cuda"), (2, 0, "cuda")]
)
def test_every_rank_needs_a_gpu_of_its_own(tp_size: int, num_gpus: float, device: str) -> None:
    with pytest.raises(ValidationError, match="tensor_parallel_size 2 needs num_gpus 2"):
        config(tp_size, num_gpus, device=device)


def test_ranks_share_the_replicas_threads() -> None:
    engine = config(2, 0).engine
    assert engine.build(Path("model"), num_threads=8).num_threads == 4
