"""The ranks that share one model, and the two ways in which they add up what each has computed.

Knows torch's process groups. Knows nothing of models, or of where the ranks run: they may be
processes or, in tests, threads. No default group is set, so several engines fit in one process.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Store

# Ranks wait for each other's share of a layer, and once for the slowest to have read the weights.
_TIMEOUT = timedelta(seconds=300)


class TensorParallelGroup:
    """One rank's view of the group; all ranks make the same calls in the same order."""

    def __init__(self, tp_rank: int, tp_size: int, device: torch.device, backend: Any) -> None:
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.device = device
        self._backend = backend

    @classmethod
    def join(
        cls, store: Store, tp_rank: int, tp_size: int, device: torch.device
    ) -> "TensorParallelGroup":
        """Meet the other ranks, which were given the same store; gloo on a CPU, else NCCL."""
        if device.type == "cpu":
            backend = _gloo(store, tp_rank, tp_size)
        else:
            device = torch.device(device.type, tp_rank)
            torch.cuda.set_device(device)
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            backend = distributed.ProcessGroupNCCL(store, tp_rank, tp_size, options)
        return cls(tp_rank, tp_size, device, backend)

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what must be added once, such as biases."""
        return self.tp_rank == 0

    def span(self, width: int) -> slice:
        """This rank's part of an axis; the last rank's is shorter when the ranks do not divide it.

        Raises ValueError when a rank would have nothing.
        """
        return span(width, self.tp_rank, self.tp_size)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace the values by their sum over the ranks, which is the same on each."""
        self._backend.allreduce([values]).wait()

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, of one shape, as [tp_size, *shape]."""
        gathered = values.new_empty(self.tp_size, *values.shape)
        self._backend.allgather([list(gathered.unbind(0))], [values]).wait()
        return gathered

    def abort(self) -> None:
        """Make calls that wait for other ranks fail. Any thread may call it."""
        self._backend.abort()


def span(width: int, tp_rank: int, tp_size: int) -> slice:
    """Rank `tp_rank`'s part of an axis; the last ones are shorter if the ranks do not divide it."""
    part = -(-width // tp_size)
    if (tp_size - 1) * part >= width:
        raise ValueError(f"{width} cannot be shared by {tp_size} ranks")
    return slice(tp_rank * part, min((tp_rank + 1) * part, width))


def _gloo(store: Store, tp_rank: int, tp_size: int) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    # The ranks share a machine, whose name may resolve to nothing.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return gloo(store, tp_rank, tp_size, options)
