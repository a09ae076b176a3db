"""Names a full KV block by everything its content depends on.

Knows token ids and adapter digests. Knows nothing of blocks' places or lifetimes.

A block's KV depends on its own tokens, on all tokens before it and on the weights. The hash chains
these: the root stands for the weights, every block adds its tokens to its parent's hash. A sequence
whose adapter is applied from some token on starts with the base model's blocks; a switch then adds
the adapter and the place. All fields have a fixed width or are the last one, and roots, switches
and blocks carry different tags, so two different inputs never give the same SHA-256 input, and no
choice of tokens can imitate an adapter.
"""

import hashlib
from array import array
from collections.abc import Sequence

_BASE_TAG = b"lorafleet-kv-base\0"
_ADAPTER_TAG = b"lorafleet-kv-adapter\0"
_SWITCH_TAG = b"lorafleet-kv-switch\0"
_BLOCK_TAG = b"lorafleet-kv-block\0"


def root_hash(digest: str | None) -> bytes:
    """Return the parent of a sequence's first block: the adapter's, or the base model's."""
    if digest is None:
        return hashlib.sha256(_BASE_TAG).digest()
    return hashlib.sha256(_ADAPTER_TAG + digest.encode()).digest()


def switch_hash(parent: bytes, digest: str, adapter_start: int) -> bytes:
    """Return the parent of the first block with an adapter, after base blocks named by `parent`."""
    place = adapter_start.to_bytes(8, "little")
    return hashlib.sha256(_SWITCH_TAG + parent + place + digest.encode()).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block that follows the block (or root) named by ``parent``."""
    return hashlib.sha256(_BLOCK_TAG + parent + array("q", token_ids).tobytes()).digest()
