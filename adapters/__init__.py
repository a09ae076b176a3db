"""What an adapter is: its name, its bytes' digest, its version. No torch, no ray, no network."""

from adapters.content import AdapterContent, read_adapter
from adapters.digest import (
    CONFIG_FILE,
    OPTIONAL_FILES,
    PICKLE_WEIGHTS_FILE,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    AdapterChangedError,
    AdapterFiles,
    DigestBuilder,
    adapter_digest,
    find_adapter_files,
    weight_file_names,
)
from adapters.names import InvalidAdapterNameError, validate_adapter_name
from adapters.request import AdapterVersion, LoRARequest

__all__ = [
    "CONFIG_FILE",
    "OPTIONAL_FILES",
    "PICKLE_WEIGHTS_FILE",
    "WEIGHTS_FILE",
    "WEIGHTS_INDEX_FILE",
    "AdapterChangedError",
    "AdapterContent",
    "AdapterFiles",
    "AdapterVersion",
    "DigestBuilder",
    "InvalidAdapterNameError",
    "LoRARequest",
    "adapter_digest",
    "find_adapter_files",
    "read_adapter",
    "validate_adapter_name",
    "weight_file_names",
]
