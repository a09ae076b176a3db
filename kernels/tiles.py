# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Cuts ragged runs of tokens into tiles, without a host-built list of tiles.

Run r starts at ``starts[r]``; its tiles are given the ids from ``r + starts[r] // TILE`` up to the
next run's. A run of n tokens owns at least ceil(n / TILE) ids, surplus ids find no tokens and
stop, and ``num_tiles`` ids cover every run whatever the lengths are.
"""

import triton
import triton.language as tl


def num_tiles(num_runs: int, num_tokens: int, tile: int) -> int:
    """Return how many tile ids cover all runs."""
    return num_runs + num_tokens // tile


@triton.jit
def find_run(starts_ptr, num_runs, first_start, tile_id, TILE: tl.constexpr, SEARCH: tl.constexpr):
    """Return the run that owns `tile_id`: the last whose first id is not past it.

    `first_start` is subtracted from every start. Compares SEARCH runs at a time, since one wide
    load is faster than a chain of dependent ones.
    """
    owners = tl.zeros([SEARCH], tl.int32)
    for base in range(0, num_runs, SEARCH):
        runs = base + tl.arange(0, SEARCH)
        mask = runs < num_runs
        starts = tl.load(starts_ptr + runs, mask=mask, other=0) - first_start
        owners += (mask & (runs + starts // TILE <= tile_id)).to(tl.int32)
    return tl.sum(owners, 0) - 1
