"""How many threads the ops use on a CPU."""

import torch

from kernels import cpu


def set_num_threads(count: int | None) -> None:
    """Let the ops of this process use `count` threads, the caller's included; None changes nothing.

    With the C++ ops torch keeps one thread for everything else that this process does.
    """
    if cpu.available():
        cpu.set_num_threads(count or cpu.num_threads())
    elif count is not None:
        torch.set_num_threads(count)
