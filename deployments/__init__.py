"""All that knows Ray and HTTP: the ingress, the replicas, the controller and how they agree."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deployments.adapter_controller import AdapterController

__all__ = ["AdapterController"]


def __getattr__(name: str) -> object:
    # Late, so that the parts that need no Ray are imported without it.
    if name == "AdapterController":
        from deployments.adapter_controller import AdapterController

        return AdapterController
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
