"""Hands out KV block ids, counts their users and remembers which hold a known prefix.

Knows ids, reference counts, hashes and recency. Knows nothing of tokens, requests or tensors.

A block without users is free. It may keep its hash, so that its content can be found again until
the block is needed for something else. Free blocks are reused in this order: those without a hash,
then those with one, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Block ids 0 to ``num_blocks - 1``."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_refs = [0] * num_blocks
        # In order of reuse. An OrderedDict takes from the front and from the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._adapter_of: dict[int, str] = {}
        self._blocks_of_adapter: dict[str, set[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``allocate`` can give, those with a remembered prefix included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found by its hash."""
        return len(self._block_of)

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, each with one reference; their old content is forgotten."""
        assert num_blocks <= len(self._free), "the caller checks num_free_blocks"
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in taken:
            self._forget(block_id)
            self._num_refs[block_id] = 1
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block; a free one stops being free and keeps its content."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                del self._free[block_id]
            self._num_refs[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference from each block of a table, given in the table's order.

        The last blocks go first in the order of reuse: a prefix is worth nothing without its start.
        """
        for block_id in reversed(block_ids):
            assert self._num_refs[block_id] > 0, f"block {block_id} is freed twice"
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._hash_of:
                    self._free.move_to_end(block_id, last=False)

    def count_free(self, block_ids: Sequence[int]) -> int:
        """Say how many of these blocks are free now."""
        return sum(self._num_refs[block_id] == 0 for block_id in block_ids)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block that holds this content."""
        return self._block_of.get(block_hash)

    def remember(self, block_id: int, block_hash: bytes, digest: str | None) -> None:
        """Make a block's content findable; it belongs to the adapter ``digest``.

        When another block already holds the same content, that one stays the one to be found.
        """
        assert self._num_refs[block_id] > 0 and block_id not in self._hash_of
        if block_hash in self._block_of:
            return
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        if digest is not None:
            self._adapter_of[block_id] = digest
            self._blocks_of_adapter.setdefault(digest, set()).add(block_id)

    def drop_adapter(self, digest: str) -> int:
        """Forget the content of an adapter's blocks and return how many they were.

        Their users keep them.
        """
        block_ids = list(self._blocks_of_adapter.get(digest, ()))
        for block_id in block_ids:
            self._forget(block_id)
            if block_id in self._free:
                self._free.move_to_end(block_id, last=False)
        return len(block_ids)

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is None:
            return
        del self._block_of[block_hash]
        digest = self._adapter_of.pop(block_id, None)
        if digest is not None:
            blocks = self._blocks_of_adapter[digest]
            blocks.remove(block_id)
            if not blocks:
                del self._blocks_of_adapter[digest]
