"""The records that travel between layers: what to load, and what a name means to the cluster."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRARequest:
    """An adapter in a local directory, ready for an engine to read.

    The engine tells adapters apart by ``digest`` alone (SHA-256 of config and weights, hex); the
    name is for people: messages, metrics, model cards. A resolver may leave ``digest`` None;
    whoever takes the directory into service computes it then (``adapters.adapter_digest``).
    """

    lora_name: str
    lora_path: str
    digest: str | None = None
    generation: int = 0
    source_uri: str | None = None
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """What a name means to the whole cluster from one commit to the next.

    ``generation`` is a cluster-wide integer that only grows and is never reused.
    ``digest`` fixes the bytes: a replica serves exactly these or refuses.
    """

    name: str
    generation: int
    digest: str
    source_uri: str
    base_model: str
    rank: int
    size_bytes: int
    pinned: bool = False
    created_at: float = 0.0
    created_by: str = ""
