"""What an adapter is: its name, its bytes' digest, its version. No torch, no ray, no network."""

from adapters.digest import AdapterFiles, adapter_digest, find_adapter_files
from adapters.names import InvalidAdapterNameError, validate_adapter_name
from adapters.request import AdapterVersion, LoRARequest

__all__ = [
    "AdapterFiles",
    "AdapterVersion",
    "InvalidAdapterNameError",
    "LoRARequest",
    "adapter_digest",
    "find_adapter_files",
    "validate_adapter_name",
]
