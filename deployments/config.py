"""The settings of a deployment: YAML arguments, checked, with overrides from the environment."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from deployments.autoscaling import AutoscalingSettings
from deployments.controller_settings import ControllerSettings
from deployments.model_profile import ModelProfile
from deployments.openai.settings import (
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_CHOICES,
    DEFAULT_MAX_PUSH_BYTES,
    HttpSettings,
)
from deployments.paths import absolute, home, is_directory
from deployments.telemetry.settings import TelemetrySettings
from engine.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    KVCacheDType,
    LoRAConfig,
    SchedulerConfig,
)
from resolvers.registry import check_entry, order_entries, places
from resolvers.store import DEFAULT_MAX_ADAPTER_BYTES, DEFAULT_MAX_BYTES

_S3_PLACE = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?")


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSettings(_Settings):
    """One replica's engine; see ``engine.config`` for what each means."""

    dtype: DType = "auto"
    device: Device = "auto"
    seed: int = 0
    max_model_len: int | None = None
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 1 << 30
    enable_prefix_caching: bool = True
    kv_cache_dtype: KVCacheDType = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_waiting: int = 2048
    max_adapter_wait_s: float = 0.5
    max_loras: int = 8
    max_cpu_loras: int = 64
    max_lora_rank: int = 64
    allow_pickle: bool = False
    base_model_names: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "EngineSettings":
        self.build(Path(), num_threads=None)
        return self

    def build(self, model: Path, *, num_threads: int | None) -> EngineConfig:
        """The engine's own record; the ranks share ``num_threads`` unless it is set here."""
        if num_threads is not None:
            num_threads = max(1, num_threads // self.tensor_parallel_size)
        return EngineConfig(
            model=model,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            max_model_len=self.max_model_len,
            num_threads=self.num_threads or num_threads,
            tensor_parallel_size=self.tensor_parallel_size,
            enforce_eager=self.enforce_eager,
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                memory_bytes=self.kv_cache_bytes,
                enable_prefix_caching=self.enable_prefix_caching,
                kv_cache_dtype=self.kv_cache_dtype,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_waiting=self.max_waiting,
                max_adapter_wait_s=self.max_adapter_wait_s,
            ),
            lora=LoRAConfig(
                max_loras=self.max_loras,
                max_cpu_loras=self.max_cpu_loras,
                max_lora_rank=self.max_lora_rank,
                allow_pickle=self.allow_pickle,
                base_model_names=self.base_model_names,
            ),
        )


class AdapterSettings(_Settings):
    """Where adapters come from and who may change them.

    ``directories`` are searched by name, in order, then ``resolvers``: each has the ``name`` of a
    resolver, perhaps ``timeout_s``, and the resolver's own options. ``resolver_order`` restricts
    and orders both by name. ``allowed_roots`` are the directories and URI prefixes that explicit
    loads may name; by default, where the resolvers look. Each node keeps what it serves in
    ``store_dir``. Of each name, ``max_versions_kept`` earlier versions stay known, to be asked for
    by generation or rolled back to.
    """

    directories: tuple[str, ...] = ()
    resolvers: tuple[dict[str, Any], ...] = ()
    resolver_order: tuple[str, ...] | None = None
    allowed_roots: tuple[str, ...] | None = None
    allow_runtime_updating: bool = False
    store_dir: str | None = None
    store_max_bytes: int = Field(default=DEFAULT_MAX_BYTES, gt=0)
    max_adapter_bytes: int = Field(default=DEFAULT_MAX_ADAPTER_BYTES, gt=0)
    max_versions_kept: int = Field(default=2, ge=0)

    @field_validator("directories", "allowed_roots")
    @classmethod
    def _absolute(cls, values: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if values is None:
            return None
        return tuple(value if "://" in value else str(absolute(value)) for value in values)

    @field_validator("resolvers")
    @classmethod
    def _buildable(cls, entries: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for entry in entries:
            check_entry(entry)
        return tuple(map(_with_absolute_directories, entries))

    @property
    def entries(self) -> list[Mapping[str, Any]]:
        """Every resolver in the order in which they are asked."""
        directories = {"name": "filesystem", "directories": list(self.directories)}
        entries = [directories, *self.resolvers] if self.directories else self.resolvers
        return order_entries(entries, self.resolver_order)

    @property
    def roots(self) -> tuple[str, ...]:
        """What explicit loads may name."""
        if self.allowed_roots is not None:
            return self.allowed_roots
        return (*self.directories, *(root for entry in self.resolvers for root in places(entry)))

    @property
    def store_path(self) -> Path:
        """The directory of the node's store."""
        return home() / "adapter-store" if self.store_dir is None else absolute(self.store_dir)


class ClusterSettings(_Settings):
    """How replicas agree. ``state_dir`` holds the journal and must outlive the head node's pods.

    It is a directory, or ``s3://bucket/prefix`` for clusters without a disk that does; the store
    must honour conditional writes. ``state_endpoint_url`` is for stores that are not AWS's.

    That a name was not found, or could not be looked up, is believed for ``not_found_ttl_s``; names
    that nobody loaded are looked up ``max_lookups_per_s`` times a second at most.

    ``push_dir`` (by default in ``state_dir``) is where the controller keeps pushed adapters and
    each ingress receives them; nodes need not share it. With the journal in S3, they are kept
    beside it.
    """

    state_dir: str | None = None
    state_endpoint_url: str | None = None
    push_dir: str | None = None
    lease_s: float = 10.0
    poll_s: float = 2.0
    prepare_timeout_s: float = 120.0
    operation_timeout_s: float = 180.0
    not_found_ttl_s: float = 3.0
    max_lookups_per_s: float = Field(default=100.0, gt=0)
    max_warm: int = 32

    @field_validator("state_dir")
    @classmethod
    def _known_scheme(cls, value: str | None) -> str | None:
        if value is not None and "://" in value and not _S3_PLACE.fullmatch(value):
            raise ValueError(f"state_dir is a directory or s3://bucket/prefix, not {value!r}")
        return value

    def journal_uri(self, model_id: str) -> str | None:
        """The journal's object, one for each base model; None if it is a file."""
        if self.state_dir is None or "://" not in self.state_dir:
            return None
        return f"{self.state_dir.rstrip('/')}/{_file_name(model_id)}.journal"

    def journal_path(self, model_id: str) -> Path:
        """The journal's file, one for each base model, if it is not an object."""
        return self._state_path / f"{_file_name(model_id)}.sqlite3"

    def push_archive_uri(self, model_id: str) -> str | None:
        """Where pushed adapters outlive the controller's disk; None if that lasts."""
        uri = self.journal_uri(model_id)
        return None if uri is None else uri.removesuffix(".journal") + ".pushed"

    @property
    def push_path(self) -> Path:
        """Where pushed adapters are received, and kept on the controller's node."""
        return self._state_path / "pushed" if self.push_dir is None else absolute(self.push_dir)

    @property
    def _state_path(self) -> Path:
        is_local = self.state_dir is not None and "://" not in self.state_dir
        return absolute(self.state_dir or "") if is_local else home() / "state"


class HttpOptions(_Settings):
    """The HTTP surface; see ``HttpSettings``."""

    api_key: SecretStr | None = None
    admin_api_key: SecretStr | None = None
    keys_file: str | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_push_bytes: int = DEFAULT_MAX_PUSH_BYTES
    max_choices: int = DEFAULT_MAX_CHOICES
    trust_request_chat_template: bool = False
    num_replicas: int = Field(default=1, ge=1)
    max_ongoing_requests: int = Field(default=1024, ge=1)
    max_queued_requests: int = Field(default=1024, ge=1)

    def build(self) -> HttpSettings:
        """The HTTP surface's own record."""
        return HttpSettings(
            api_key=_secret(self.api_key),
            admin_api_key=_secret(self.admin_api_key),
            keys_file=None if self.keys_file is None else Path(self.keys_file).absolute(),
            num_ingresses=self.num_replicas,
            max_body_bytes=self.max_body_bytes,
            max_push_bytes=self.max_push_bytes,
            max_choices=self.max_choices,
            trust_request_chat_template=self.trust_request_chat_template,
        )


class RoutingSettings(_Settings):
    """How far a request follows its adapter.

    A replica that holds the adapter is preferred unless it has ``spill_over`` requests more than
    the least loaded one.
    """

    spill_over: int = Field(default=4, ge=0)
    stats_period_s: float = Field(default=1.0, gt=0)


class DeploymentConfig(_Settings):
    """Everything that can be said about one deployment.

    ``model`` is a prepared model's name, a directory, or an id on the model hub; ``model_id`` is
    what clients call it. ``num_cpus`` and ``num_gpus`` are what Ray reserves for a replica.
    While all replicas have ``max_ongoing_requests``, each ingress keeps up to
    ``max_queued_requests`` and refuses more. A replica that ends goes on with the requests that it
    has for ``graceful_shutdown_timeout_s``.
    A stream's tokens are sent at most every ``coalesce_ms``, with many streams up to five times it.
    ``profile`` says how the base model wants to be talked to. ``autoscaling`` goes instead of
    ``num_replicas``.
    """

    model: str = "smollm2-135m-instruct"
    model_id: str = ""
    num_replicas: int = Field(default=1, ge=1)
    autoscaling: AutoscalingSettings | None = None
    num_cpus: float = Field(default=0, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    max_ongoing_requests: int = Field(default=1024, ge=1)
    max_queued_requests: int = Field(default=1024, ge=1)
    graceful_shutdown_timeout_s: float = Field(default=60, ge=0)
    coalesce_ms: float = Field(default=20, ge=0)
    profile: ModelProfile = ModelProfile()
    engine: EngineSettings = EngineSettings()
    adapters: AdapterSettings = AdapterSettings()
    cluster: ClusterSettings = ClusterSettings()
    http: HttpOptions = HttpOptions()
    routing: RoutingSettings = RoutingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _check(self) -> "DeploymentConfig":
        self.controller_settings(deployed_at=0.0)
        self.http.build()
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set:
            raise ValueError("num_replicas and autoscaling exclude each other")
        self._check_gpus()
        return self

    def _check_gpus(self) -> None:
        """Each rank of a split model has a GPU to itself, or all of them the CPU."""
        wanted = self.engine.tensor_parallel_size
        allowed = (wanted,) if self.engine.device == "cuda" else (wanted, 0)
        if wanted > 1 and self.num_gpus not in allowed:
            raise ValueError(
                f"tensor_parallel_size {wanted} needs num_gpus {wanted}, not {self.num_gpus:g}"
            )

    @property
    def public_model_id(self) -> str:
        """The base model's name as clients say it."""
        if self.model_id:
            return self.model_id
        return Path(self.model).name if is_directory(self.model) else self.model

    def controller_settings(self, *, deployed_at: float) -> ControllerSettings:
        """The controller's own record."""
        return ControllerSettings(
            base_model=self.public_model_id,
            allow_runtime_updating=self.adapters.allow_runtime_updating,
            lease_s=self.cluster.lease_s,
            poll_s=self.cluster.poll_s,
            prepare_timeout_s=self.cluster.prepare_timeout_s,
            operation_timeout_s=self.cluster.operation_timeout_s,
            negative_ttl_s=self.cluster.not_found_ttl_s,
            max_lookups_per_s=self.cluster.max_lookups_per_s,
            max_warm=self.cluster.max_warm,
            max_versions_kept=self.adapters.max_versions_kept,
            deployed_at=deployed_at,
        )


def load_config(
    args: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> DeploymentConfig:
    """Check the arguments of an application, after the environment's overrides."""
    merged: dict[str, Any] = {key: value for key, value in args.items() if value is not None}
    adapters = merged["adapters"] = dict(merged.get("adapters") or {})
    http = merged["http"] = dict(merged.get("http") or {})
    if num_replicas := environ.get("LORAFLEET_NUM_REPLICAS"):
        merged["num_replicas"] = num_replicas
    allow = _first(
        environ, "LORAFLEET_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    )
    if allow:
        adapters["allow_runtime_updating"] = allow
    if directory := _first(environ, "LORAFLEET_ADAPTER_DIR", "VLLM_LORA_RESOLVER_CACHE_DIR"):
        adapters["directories"] = (directory,)
    if repositories := _listed(environ.get("VLLM_LORA_RESOLVER_HF_REPO_LIST", "")):
        hub = {"name": "hub", "allowed": repositories}
        adapters["resolvers"] = (*(adapters.get("resolvers") or ()), hub)
    if (plugins := environ.get("VLLM_PLUGINS")) is not None:
        adapters["resolver_order"] = _listed(plugins)
    for name in ("api_key", "admin_api_key"):
        if key := environ.get(f"LORAFLEET_{name.upper()}"):
            http[name] = key
    if keys_file := environ.get("LORAFLEET_KEYS_FILE"):
        http["keys_file"] = keys_file
    return DeploymentConfig.model_validate(merged)


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _with_absolute_directories(entry: dict[str, Any]) -> dict[str, Any]:
    if "directories" not in entry:
        return entry
    return {**entry, "directories": [str(absolute(path)) for path in entry["directories"]]}


def _file_name(model_id: str) -> str:
    return model_id.replace("/", "--")


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()
