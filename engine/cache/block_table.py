"""Each request's block table, filled from the prefix cache and the block pool.

Knows requests' tokens and block ids. Knows nothing of tensors or of who is scheduled when.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.block_pool import BlockPool
from engine.cache.prefix import block_hash, root_hash, switch_hash
from engine.request import Request


@dataclass(slots=True)
class _BlockTable:
    """``block_ids[i]`` holds tokens [i * block_size, (i + 1) * block_size) of the sequence.

    ``hashes[i]`` names the content of block i; it is worked out when first needed. The content of
    the first ``num_remembered`` blocks was made findable.
    """

    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_remembered: int = 0


class KVCacheManager:
    """Block tables of all requests over one pool."""

    def __init__(
        self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._tables: dict[tuple[str, int], _BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Say how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request: Request) -> tuple[int, ...]:
        """Return the request's block table, empty when it has none."""
        table = self._tables.get(request.key)
        return () if table is None else tuple(table.block_ids)

    def find_cached(self, request: Request) -> list[int]:
        """Return the blocks that hold the longest known prefix of a request without blocks.

        The last token is never served from the cache, since its logits are needed. A request for
        prompt logprobs needs the logits of every prompt token, one for a mean the hidden states,
        so nothing is served for it.
        """
        params = request.params
        needs_all = params.prompt_logprobs is not None or params.pooling == "mean"
        if not self._enable_prefix_caching or needs_all:
            return []
        table = self._tables.setdefault(request.key, _BlockTable())
        found: list[int] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            block_id = self.pool.find(self._hash_at(request, table, index))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def allocate_slots(self, request: Request, num_tokens: int, cached: Sequence[int] = ()) -> bool:
        """Extend the table to hold ``num_tokens`` after those computed, or change nothing.

        ``cached``, from ``find_cached`` and for a request without blocks only, starts the table;
        its tokens count as computed.
        """
        table = self._tables.setdefault(request.key, _BlockTable())
        assert not (cached and table.block_ids), "a cached prefix starts a table"
        num_computed = request.num_computed_tokens + len(cached) * self.block_size
        num_held = len(table.block_ids) + len(cached)
        num_new = max(self.blocks_for(num_computed + num_tokens) - num_held, 0)
        if num_new > self.pool.num_free_blocks - self.pool.count_free(cached):
            return False
        if cached:
            self.pool.touch(cached)
            table.block_ids.extend(cached)
            table.num_remembered = len(cached)
        if num_new:
            table.block_ids.extend(self.pool.allocate(num_new))
        return True

    def cache_full_blocks(self, request: Request) -> None:
        """Make the blocks that the computed tokens have filled findable."""
        if not self._enable_prefix_caching:
            return
        table = self._tables[request.key]
        num_full = request.num_computed_tokens // self.block_size
        for index in range(table.num_remembered, num_full):
            name = self._hash_at(request, table, index)
            is_base = (index + 1) * self.block_size <= request.adapter_start
            self.pool.remember(table.block_ids[index], name, None if is_base else request.digest)
        table.num_remembered = max(table.num_remembered, num_full)

    def free(self, request: Request) -> None:
        """Give up the request's table. Does nothing for a request without one."""
        table = self._tables.pop(request.key, None)
        if table is not None:
            self.pool.free(table.block_ids)

    def drop_adapter(self, digest: str) -> int:
        """Forget the prefixes computed with an adapter and return how many blocks they held."""
        return self.pool.drop_adapter(digest)

    def _hash_at(self, request: Request, table: _BlockTable, index: int) -> bytes:
        hashes = table.hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else root_hash(_first_digest(request))
            place = request.adapter_start
            if request.digest is not None and start <= place < start + self.block_size and place:
                parent = switch_hash(parent, request.digest, request.adapter_start)
            hashes.append(block_hash(parent, request.token_slice(start, start + self.block_size)))
        return hashes[index]


def _first_digest(request: Request) -> str | None:
    """Whose weights compute the first token."""
    return None if request.adapter_start else request.digest
