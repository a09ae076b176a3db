"""Chooses which implementation of an op runs.

Knows the four backends and where each keeps its ops. Knows nothing of shapes. A backend's module is
imported when it is first used, so that neither Triton nor the C++ extension is needed to import
``kernels``.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, get_args

Backend = Literal["triton", "cpu", "torch", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

_MODULES = {"cpu": "kernels.cpu", "torch": "kernels.torch_ops", "reference": "kernels.reference"}
_TRITON_MODULES = {
    "rms_norm": "kernels.rms_norm",
    "add_rms_norm": "kernels.rms_norm",
    "silu_and_mul": "kernels.silu_and_mul",
    "rope_and_store_kv": "kernels.kv_store",
    "store_kv": "kernels.kv_store",
    "paged_decode": "kernels.paged_decode",
    "paged_prefill": "kernels.paged_prefill",
    "lora_shrink": "kernels.lora_shrink",
    "lora_expand": "kernels.lora_expand",
    "lora_apply": "kernels.lora_apply",
    "sample_tokens": "kernels.sample_tokens",
}
# Ops that the C++ extension leaves to torch or to other ops.
_NOT_IN_EXTENSION = frozenset({"rope_and_store_kv", "sample_tokens"})


def is_available(backend: Backend, op: str) -> bool:
    """Return whether `backend` implements `op` on this machine, on some device."""
    if backend == "triton":
        return op in _TRITON_MODULES and importlib.util.find_spec("triton") is not None
    if backend == "cpu":
        return op not in _NOT_IN_EXTENSION and _cpu_extension_is_built()
    return True


@functools.cache
def implementation(op: str, device_type: str, backend: Backend | None) -> Callable[..., Any]:
    """Return the function that runs `op` on tensors of `device_type`.

    Without `backend`: on a CPU the C++ extension when it is built, else torch; elsewhere Triton
    where it has the op, else torch. The choice is made once per process.
    """
    chosen = backend or _default_backend(op, device_type)
    if chosen not in BACKENDS:
        raise ValueError(f"unknown backend {chosen!r}, expected one of {BACKENDS}")
    if not is_available(chosen, op):
        raise RuntimeError(f"backend {chosen!r} cannot run {op} on this machine")
    function: Callable[..., Any] = getattr(importlib.import_module(_module(op, chosen)), op)
    return function


def _default_backend(op: str, device_type: str) -> Backend:
    fastest: Backend = "cpu" if device_type == "cpu" else "triton"
    return fastest if is_available(fastest, op) else "torch"


def _module(op: str, backend: Backend) -> str:
    return _TRITON_MODULES[op] if backend == "triton" else _MODULES[backend]


@functools.cache
def _cpu_extension_is_built() -> bool:
    if importlib.util.find_spec("kernels.cpu") is None:
        return False
    return bool(importlib.import_module("kernels.cpu").available())
