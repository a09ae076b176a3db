"""A process that is one rank of a model, other than the first: it does as it is told.

    python -m engine.parallel.worker FD

FD is an open socket to rank 0. The process ends when rank 0 closes it or is gone, even while it
waits for the others in the middle of a layer.
"""

import os
import select
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from torch._C._distributed_c10d import TCPStore

from engine.executor import LocalExecutor
from engine.models.loader import resolve_device
from engine.parallel.group import TensorParallelGroup
from engine.parallel.wire import AllocateCache, ClearSlot, Start, WriteSlot, receive
from engine.step_batch import StepBatch
from kernels.threads import set_num_threads

READY = b"ready"


def main() -> None:
    """Serve until rank 0 hangs up."""
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError):
        start: Start = receive(connection)
        connection.send_bytes(READY)
        executor = _join(start)
        while True:
            _obey(executor, receive(connection))


def _join(start: Start) -> LocalExecutor:
    config = start.config
    set_num_threads(config.num_threads)
    store = TCPStore("127.0.0.1", start.store_port, is_master=False)
    device = resolve_device(config.device)
    size = config.tensor_parallel_size
    return LocalExecutor(config, group=TensorParallelGroup.join(store, start.tp_rank, size, device))


def _obey(
    executor: LocalExecutor, message: StepBatch | WriteSlot | ClearSlot | AllocateCache
) -> None:
    match message:
        case StepBatch():
            executor.execute(message)
        case WriteSlot():
            executor.write_slot(message.slot, message.adapter())
        case ClearSlot():
            executor.clear_slot(message.slot)
        case AllocateCache():
            executor.allocate_cache(message.num_blocks)


def _end_with(fd: int) -> None:
    """End this process when the other end of a socket is closed."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
